"""Tensors as a run recorded them, rebuilt in their layout, with elements that are recorded, random
or special.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_DTYPE_NAMES = (
    "float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint64", "uint32",
    "uint16", "uint8", "bool", "complex64", "complex128",
)  # fmt: skip
NAMES = {getattr(torch, n): n for n in _DTYPE_NAMES if hasattr(torch, n)}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Tensor:
    """A recorded tensor. stride, offset: in elements. values: (least, greatest) that was seen.
    data: sample -> name in data.safetensors.

    storage: tensors of one call with the same name here share memory.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    values: tuple[float, float] | None
    data: Mapping[int, str]
    storage: str

    @property
    def reach(self) -> int:
        """Elements of the storage from its start to the end of this tensor."""
        if 0 in self.shape:
            return self.offset
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride)) + 1


def tensor(
    dtype: str,
    shape: tuple[int, ...],
    *,
    stride: tuple[int, ...] | None = None,
    offset: int = 0,
    values: tuple[float, float] | None = None,
    data: Mapping[int, str] | None = None,
    storage: str = "",
) -> Tensor:
    """See `Tensor`; without a stride it is contiguous."""
    if stride is None:
        stride = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
    return Tensor(dtype, shape, stride, offset, values, data or {}, storage)


class Data:
    """Elements of a safetensors file, read when asked for. path: need not exist when nothing is
    asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header: dict[str, Any] = {}
        self._start = 0

    def read(self, name: str, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new CPU tensor. Raises KeyError for a name that is not there."""
        with self.path.open("rb") as file:
            if not self._header:
                size = int.from_bytes(file.read(8), "little")
                self._header, self._start = json.loads(file.read(size)), 8 + size
            begin, end = self._header[name]["data_offsets"]
            file.seek(self._start + begin)
            raw = bytearray(file.read(end - begin))
        if not raw:
            return torch.empty(shape, dtype=DTYPES[dtype])
        return torch.frombuffer(raw, dtype=torch.uint8).view(DTYPES[dtype]).reshape(shape)


def specs_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The recorded tensors of (nested) arguments, with a name each."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from specs_in(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            yield from specs_in(item, f"{name}.{k}")


class Built:
    """The tensors of one call: their elements on the CPU, made into fresh tensors of the recorded
    layout as often as asked.

    elements: name (see `specs_in`) -> values in logical order, shape and dtype as recorded.
    """

    def __init__(self, arguments: Mapping[str, Any], elements: Mapping[str, Any]) -> None:
        self.arguments, self.elements = arguments, elements
        self._groups: dict[str, list[tuple[str, Tensor]]] = {}
        for name, spec in specs_in(arguments):
            self._groups.setdefault(spec.storage or f"\0{name}", []).append((name, spec))

    def make(self, device: Any = "cpu", floating: Any = None) -> dict[str, Any]:
        """Arguments with tensors on `device`; floating: dtype that real floating ones get (complex
        ones its complex), None: as recorded.

        Tensors that share memory do so here too. Memory seen as several dtypes keeps them.
        """
        tensors: dict[str, Any] = {}
        for group in self._groups.values():
            one_dtype = len({spec.dtype for _, spec in group}) == 1
            values = [
                widened(self.elements[name], floating)
                if floating is not None and one_dtype
                else self.elements[name]
                for name, _ in group
            ]
            # Where a storage begins does not matter; what lies between its tensors does.
            first = min(spec.offset for _, spec in group) // 64 * 64
            size = max(max(spec.reach for _, spec in group) - first, 0)
            item = values[0].element_size()
            raw = torch.zeros((size, item), dtype=torch.uint8)
            for (_, spec), value in zip(group, values):
                raw[positions(spec, first)] = (
                    value.contiguous().reshape(-1, 1).view(torch.uint8).reshape(-1, item)
                )
            raw = raw.to(device)
            for (name, spec), value in zip(group, values):
                base = (
                    raw.reshape(-1).view(value.dtype)
                    if raw.numel()
                    else torch.empty(0, dtype=value.dtype, device=device)
                )
                offset = spec.offset - first if value.numel() else 0
                tensors[name] = base.as_strided(spec.shape, spec.stride, offset)
        return {key: _filled(value, key, tensors, device) for key, value in self.arguments.items()}


def positions(spec: Tensor, first: int = 0) -> Any:
    """Where each element of the tensor lies in its storage, counted from `first`: int64, flat, in
    logical order.
    """
    indices = torch.full((), spec.offset - first, dtype=torch.int64)
    for extent, step in zip(spec.shape, spec.stride):
        indices = indices.unsqueeze(-1) + torch.arange(extent) * step
    return indices.reshape(-1)


def _filled(value: Any, name: str, tensor: Mapping[str, Any], device: Any) -> Any:
    if isinstance(value, Tensor):
        return tensor[name]
    if isinstance(value, (list, tuple)):
        return [_filled(item, f"{name}.{k}", tensor, device) for k, item in enumerate(value)]
    return torch.device(device) if isinstance(value, torch.device) else value


def widened(value: Any, floating: Any) -> Any:
    """The tensor, or dtype, in this floating dtype (complex: that of its width); what is neither
    floating nor complex as it is.
    """
    dtype = value if isinstance(value, torch.dtype) else value.dtype
    if dtype.is_floating_point:
        new = floating
    elif dtype.is_complex:
        new = torch.complex128 if floating is torch.float64 else torch.complex64
    else:
        return value
    return new if isinstance(value, torch.dtype) else value.to(new)


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors of nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def rounds(value: Any) -> bool:
    return bool(value.is_floating_point() or value.is_complex())


@dataclass(frozen=True)
class Settings:
    """How tests run. device: of the operators under test. seed: of random elements. factory: load,
    random or special.

    cpu_init: random elements are drawn on the CPU, so that they are the same for every device.
    table: the csv, "" for none.
    """

    folder: Path
    device: str = "cpu"
    seed: int = 0
    factory: str = "load"
    cpu_init: bool = False
    table: str = ""


class Elements:
    """Makes the elements of recorded tensors. made_up: names of those that were to be loaded and
    were not kept.
    """

    def __init__(
        self, settings: Settings, data: Data, name: str, sample: int | None, *, full: bool
    ) -> None:
        self.settings, self.data, self.name, self.sample, self.full = (
            settings,
            data,
            name,
            sample,
            full,
        )
        self.made_up: list[str] = []

    def of(self, name: str, spec: Tensor) -> Any:
        """A CPU tensor of the spec's shape and dtype."""
        key = spec.data.get(self.sample) if self.sample is not None else None
        exact = not (DTYPES[spec.dtype].is_floating_point or DTYPES[spec.dtype].is_complex)
        # Offsets, lengths and generator states mean nothing at random; a negative index stands for
        # something.
        if key is not None and (
            self.settings.factory == "load"
            or (exact and (_is_structure(name) or min(spec.values or (0,)) < 0))
        ):
            return self.data.read(key, spec.dtype, spec.shape)
        if self.settings.factory == "load":
            self.made_up.append(name)
        return self._drawn(name, spec)

    def _drawn(self, name: str, spec: Tensor) -> Any:
        device = "cpu" if self.settings.cpu_init else self.settings.device
        generator = torch.Generator(device)
        generator.manual_seed(zlib.crc32(f"{self.settings.seed} {self.name} {name}".encode()))
        dtype, count = DTYPES[spec.dtype], math.prod(spec.shape)
        uniform = torch.rand(count, generator=generator, device=device).to("cpu", torch.float64)
        if dtype.is_complex:
            parts = torch.stack((uniform, uniform.roll(1))) * 2 - 1
            size = max(map(abs, spec.values)) if spec.values else 1.0
            return torch.complex(*(parts * size / math.sqrt(2))).to(dtype).reshape(spec.shape)
        least, greatest = spec.values or ((-1.0, 1.0) if dtype.is_floating_point else (0, 1))
        if not dtype.is_floating_point:
            least, greatest = int(least), int(greatest)
            steps = greatest - least + 1
            # indices: each once, so that no two write to one place
            if "ind" in name and steps >= count:
                whole = uniform.argsort() * (steps // max(count, 1)) + least
            else:
                whole = (uniform * steps).to(torch.int64).clamp(max=steps - 1) + least
            return whole.to(dtype).reshape(spec.shape)
        values = least * (1 - uniform) + greatest * uniform
        if self.settings.factory == "special":
            chosen = torch.tensor(
                special_values(dtype, least, greatest, full=self.full), dtype=torch.float64
            )
            kind = uniform.argsort()  # a permutation of the positions
            odd = kind % 3 == 0 if count > 1 else torch.ones(count, dtype=torch.bool)
            values = torch.where(odd, chosen[(kind // 3) % len(chosen)], values)
        return values.to(dtype).reshape(spec.shape)


def special_values(dtype: Any, least: float, greatest: float, *, full: bool) -> list[float]:
    """Zeros of both signs, denormals, the smallest normal, ties, the ends of the range; full: also
    the greatest, infinities and NaN.

    Sums that meet the greatest number or infinities depend on the order in which they are taken, so
    these are for pointwise operators.
    """
    info = torch.finfo(dtype)
    some = [
        0.0,
        -0.0,
        info.tiny,
        -info.tiny,
        info.tiny / 2,
        least,
        least,
        greatest,
        greatest,
        (least + greatest) / 2,
    ]
    return [*some, info.max, -info.max, math.inf, -math.inf, math.nan, 1.0, -1.0] if full else some


def _is_structure(name: str) -> bool:
    last = name.rpartition(".")[2] if not name.rpartition(".")[2].isdigit() else name.split(".")[-2]
    return name.startswith("state") or any(
        word in last for word in ("offset", "length", "lens", "seq", "batch_sizes", "split", "crow")
    )
