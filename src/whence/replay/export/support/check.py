"""What generated tests stand on: rebuilds recorded tensors, runs operators on a device and on the
CPU, judges, writes a row.

This file travels with the tests, as `operator_support.py`: it needs torch and nothing else, and
pytest only where a test is skipped. A test says what is called on what; here it is run three ways
on equal inputs: on the device, on the CPU in float64 (what is right) and on the CPU in its own
dtype (how far rounding alone strays). The device passes when it strays no further than a few times
that.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {
    getattr(torch, n): n
    for n in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e5m2",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
        "complex64",
        "complex128",
    )
    if hasattr(torch, n)
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
COLUMNS = (
    "name",
    "op_name",
    "dtype",
    "shape",
    "min-val",
    "max-val",
    "max",
    *(f"1e-{k}" for k in range(1, 9)),
    "ulp",
    "nan_mismatch",
    "inf_mismatch",
    "local_error",
    "status",
    "time",
    "reason",
    "device",
    "numel",
    "calls",
)

# ---- tensors as recorded


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
        made: dict[str, Any] = {}
        for group in self._groups.values():
            one = len({spec.dtype for _, spec in group}) == 1
            values = [
                widened(self.elements[name], floating)
                if floating is not None and one
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
                at = spec.offset - first if value.numel() else 0
                made[name] = base.as_strided(spec.shape, spec.stride, at)
        return {key: _filled(value, key, made, device) for key, value in self.arguments.items()}


def positions(spec: Tensor, first: int = 0) -> Any:
    """Where each element of the tensor lies in its storage, counted from `first`: int64, flat, in
    logical order.
    """
    at = torch.full((), spec.offset - first, dtype=torch.int64)
    for extent, step in zip(spec.shape, spec.stride):
        at = at.unsqueeze(-1) + torch.arange(extent) * step
    return at.reshape(-1)


def _filled(value: Any, name: str, made: Mapping[str, Any], device: Any) -> Any:
    if isinstance(value, Tensor):
        return made[name]
    if isinstance(value, (list, tuple)):
        return [_filled(item, f"{name}.{k}", made, device) for k, item in enumerate(value)]
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


# ---- elements: recorded, random, special


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
            if (
                "ind" in name and steps >= count
            ):  # indices: each once, so that no two write to one place
                whole = uniform.argsort() * (steps // max(count, 1)) + least
            else:
                whole = (uniform * steps).to(torch.int64).clamp(max=steps - 1) + least
            return whole.to(dtype).reshape(spec.shape)
        values = least * (1 - uniform) + greatest * uniform
        if self.settings.factory == "special":
            chosen = torch.tensor(
                special_values(dtype, least, greatest, full=self.full), dtype=torch.float64
            )
            which = uniform.argsort()  # a permutation of the positions
            odd = which % 3 == 0 if count > 1 else torch.ones(count, dtype=torch.bool)
            values = torch.where(odd, chosen[(which // 3) % len(chosen)], values)
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


# ---- running


class Operators:
    """Runs operators: as recorded, or in a wider floating dtype. `ops.aten.mm.default(a, b)` is
    that overload.

    floating: the wider dtype, None: as recorded. stepwise: attention and norms are written out,
    rounding at every step. Afterwards, notes: what was met ("aten.foo.default in float32: ...");
    length: the most terms one element was summed from.
    """

    def __init__(
        self, device: Any = "cpu", floating: Any = None, *, stepwise: bool = False
    ) -> None:
        self.device, self.floating, self.stepwise = torch.device(device), floating, stepwise
        self.notes: list[str] = []
        self.length, self.wrote_out = 1, False

    def __getattr__(self, namespace: str) -> Any:
        if namespace.startswith("__"):
            raise AttributeError(namespace)
        return _Name(self, namespace)

    def cast(self, x: Any, way: str) -> Any:
        """A cast point of the recorded code: "up" to float32, or "back"."""
        return x.to(torch.float32 if self.floating is None else self.floating)

    def guard(self, found: Any, expected: Any) -> Any:
        """A number that the recorded code read from a tensor, and may have decided by."""
        number = (
            found
            if isinstance(found, (bool, int, float))
            else sum(t.numel() for t in tensors_in(found))
        )
        if number != expected:
            raise RuntimeError(f"guard: read {number!r} where the recording had {expected!r}")
        return found

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator of this name ("aten.mm.default"), by position and by schema name."""
        func = overload(name)
        if self.floating is None and not self.stepwise:  # on a device: nothing but the operator
            return func(*args, **kwargs)
        named = dict(zip((a.name for a in func._schema.arguments), args)) | dict(kwargs)
        base = func._schema.name.partition("::")[2]
        self.length = max(self.length, reduction_length(base, named))
        if self.stepwise and base in WRITTEN_OUT:
            self.wrote_out = True
            return _as_returned(func, WRITTEN_OUT[base](named))
        if self.floating is None:
            return func(*args, **kwargs)
        return self._wide(func, base, list(args), dict(kwargs), named)

    def _wide(
        self, func: Any, base: str, args: list[Any], kwargs: dict[str, Any], named: dict[str, Any]
    ) -> Any:
        if named.get("half_to_float"):
            args, kwargs = (
                [
                    named[a.name] if a.name != "half_to_float" else False
                    for a in func._schema.arguments
                ],
                {},
            )
        args = [widened(a, self.floating) if isinstance(a, torch.dtype) else a for a in args]
        kwargs = {
            k: widened(v, self.floating) if isinstance(v, torch.dtype) else v
            for k, v in kwargs.items()
        }
        given = list(tensors_in([args, list(kwargs.values())]))
        changes = any(a.alias_info is not None for a in func._schema.arguments)
        if (
            torch.Tag.pointwise in func.tags
            and given
            and not changes
            and not any(_rounds(t) for t in given)
        ):
            # Integers become the default floating dtype on the way (positions / 10).
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                floats = [
                    a.to(self.floating)
                    if isinstance(a, torch.Tensor) and a.dtype is not torch.bool
                    else a
                    for a in args
                ]
                if any(_rounds(t) for t in tensors_in(func(*args, **kwargs))):
                    return func(*floats, **kwargs)
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            text = (
                f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                if str(error)
                else type(error).__name__
            )
            if base in ("view", "_unsafe_view", "_reshape_alias"):
                return args[0].reshape(args[1])
            if base in WRITTEN_OUT:
                self.notes.append("written out")
                return _as_returned(func, WRITTEN_OUT[base](named))
            if self.floating is not torch.float64 or changes:
                raise
            out = _map(
                func(*_map(args, torch.float32), **_map(kwargs, torch.float32)), self.floating
            )
            self.notes.append(f"{func} in float32: {text}")
        return out if changes else _map(out, self.floating)


class _Name:
    __slots__ = ("_name", "_ops")

    def __init__(self, ops: Operators, name: str) -> None:
        self._ops, self._name = ops, name

    def __getattr__(self, part: str) -> _Name:
        return _Name(self._ops, f"{self._name}.{part}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ops.call(self._name, args, kwargs)


def overload(name: str) -> Any:
    """The operator of a full name. Raises LookupError when this torch has none."""
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise LookupError(
            f"operator {name} does not exist in torch {torch.__version__}; a custom one comes "
            "with --import MODULE"
        )
    return found


def invoke(ops: Operators, name: str, named: Mapping[str, Any]) -> Any:
    """The operator with arguments by schema name, handed over by position where the schema takes
    them so.
    """
    schema = overload(name)._schema
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    last = max(
        (k for k, a in enumerate(schema.arguments) if not a.kwarg_only and a.name in named),
        default=-1,
    )
    for k, argument in enumerate(schema.arguments):
        if argument.kwarg_only:
            if argument.name in named:
                kwargs[argument.name] = named[argument.name]
        elif k <= last:
            args.append(named.get(argument.name, argument.default_value))
    unknown = set(named).difference(a.name for a in schema.arguments)
    if unknown:
        raise TypeError(
            f"{name} takes no argument {', '.join(sorted(unknown))} in torch {torch.__version__}"
        )
    return ops.call(name, args, kwargs)


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors of nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _map(value: Any, floating: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return widened(value, floating)
    if isinstance(value, torch.dtype):
        return widened(value, floating)
    if isinstance(value, dict):
        return {k: _map(v, floating) for k, v in value.items()}
    return type(value)(_map(v, floating) for v in value) if type(value) in (list, tuple) else value


def _rounds(value: Any) -> bool:
    return bool(value.is_floating_point() or value.is_complex())


def _as_returned(func: Any, made: list[Any]) -> Any:
    """A written-out operator's results in the place of the operator's own; those that only its
    backward needs are missing.
    """
    return made[0] if len(func._schema.returns) == 1 else tuple(made)


_CONTRACTIONS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "mv",
    "addmv",
    "dot",
    "linear",
    "matmul",
    "einsum",
    "_int_mm",
    "_scaled_mm",
)
_SUMS = (
    "sum",
    "mean",
    "norm",
    "var",
    "std",
    "prod",
    "softmax",
    "logsumexp",
    "trace",
    "loss",
    "embedding_dense",
    "dist",
    "index_add",
    "scatter_add",
)


def reduction_length(base: str, named: Mapping[str, Any]) -> int:
    """About how many terms one element of the operator's result is summed from; 1 when it does not
    sum.
    """
    shapes = {
        k: v.shape
        for k, v in named.items()
        if isinstance(v, torch.Tensor) and _rounds(v) and v.dim()
    }
    if not shapes:
        return 1
    first = next(iter(shapes.values()))
    if base in _CONTRACTIONS:
        return int(shapes.get("mat1", shapes.get("batch1", shapes.get("mat", first)))[-1])
    if "attention" in base and "query" in shapes and "key" in shapes:
        return int(max(shapes["query"][-1], shapes["query"][-2], shapes["key"][-2]))
    if "conv" in base and "weight" in shapes:
        weight = shapes["weight"]
        own = math.prod(weight) // max(
            1, weight[1 if named.get("transposed") and "backward" not in base else 0]
        )
        return int(
            max(
                own,
                math.prod(first) // max(1, first[1])
                if "backward" in base and len(first) > 1
                else 1,
            )
        )
    if "rnn" in base or "lstm" in base or "gru" in base:
        return int(first[-1])
    if not any(word in base for word in _SUMS):
        return 1
    dims = named.get("dim")
    dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if (
        isinstance(dims, (list, tuple))
        and dims
        and all(-len(first) <= d < len(first) for d in dims)
    ):
        return int(math.prod(first[d] for d in dims))
    if "normalized_shape" in named and "backward" not in base:
        return math.prod(named["normalized_shape"])
    if "norm" in base and len(first) > 1:
        return int(
            math.prod(first)
            // max(1, first[1] if "batch" in base or "group" in base else first[-1])
        )
    return int(math.prod(first))


# Fused operators written out: each rounds once, a correct device that rounds in between must not
# fail for it.


def _attention(named: Mapping[str, Any]) -> list[Any]:
    query, key, value = named["query"], named["key"], named["value"]
    mask = named.get("attn_mask", named.get("attn_bias"))
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 3 else 1
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scale = named.get("scale")
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if named.get("is_causal"):
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf
        )
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(
        query.dtype
    )
    weights = weights.masked_fill(
        (scores == -math.inf).all(-1, keepdim=True), 0
    )  # a row that may see nothing is zero, not NaN
    return [
        weights @ value,
        scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(-1),
    ]


def _normalised(
    x: Any, dims: tuple[int, ...], eps: float, *, centred: bool = True
) -> tuple[Any, Any, Any]:
    mean = x.mean(dims, keepdim=True) if centred else torch.zeros((), dtype=x.dtype)
    inverse = torch.rsqrt((x - mean).pow(2).mean(dims, keepdim=True) + eps)
    return (x - mean) * inverse, mean, inverse


def _scaled(y: Any, weight: Any, bias: Any) -> Any:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _layer_norm(named: Mapping[str, Any]) -> list[Any]:
    x, count = named["input"], len(named["normalized_shape"])
    y, mean, inverse = _normalised(
        x, tuple(range(x.dim() - count, x.dim())), named.get("eps", 1e-5)
    )
    return [_scaled(y, named.get("weight"), named.get("bias")), mean, inverse]


def _rms_norm(named: Mapping[str, Any]) -> list[Any]:
    x, count, eps = named["input"], len(named["normalized_shape"]), named.get("eps")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y, _, inverse = _normalised(x, tuple(range(x.dim() - count, x.dim())), eps, centred=False)
    return [_scaled(y, named.get("weight"), None), inverse]


def _group_norm(named: Mapping[str, Any]) -> list[Any]:
    x = named["input"]
    y, mean, inverse = _normalised(
        x.reshape(x.shape[0], named.get("group", named.get("num_groups")), -1),
        (-1,),
        named.get("eps", 1e-5),
    )
    channel = (1, -1, *([1] * (x.dim() - 2)))
    weight, bias = (
        p if p is None else p.reshape(channel) for p in (named.get("weight"), named.get("bias"))
    )
    return [_scaled(y.reshape(x.shape), weight, bias), mean[..., 0], inverse[..., 0]]


def _erf(named: Mapping[str, Any]) -> list[Any]:
    """As vector kernels of 32 bits compute it, to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    x = named["self"]
    if not x.is_floating_point() or x.dtype.itemsize > 4:
        return [torch.erf(x)]
    size = x.float().abs()
    t = 1 / (1 + 0.3275911 * size)
    terms = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    return [torch.copysign(1 - terms * torch.exp(-size * size), x.float()).to(x.dtype)]


def _gelu(named: Mapping[str, Any]) -> list[Any]:
    x = named["self"]
    if named.get("approximate", "none") != "none":
        return [torch.nn.functional.gelu(x, approximate=named["approximate"])]
    return [(0.5 * x * (1 + _erf({"self": x * math.sqrt(0.5)})[0]))]


WRITTEN_OUT: dict[str, Callable[[Mapping[str, Any]], list[Any]]] = {
    "erf": _erf,
    "special_erf": _erf,
    "gelu": _gelu,
    "scaled_dot_product_attention": lambda named: _attention(named)[:1],
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "native_layer_norm": _layer_norm,
    "layer_norm": lambda named: _layer_norm(named)[:1],
    "_fused_rms_norm": _rms_norm,
    "rms_norm": lambda named: _rms_norm(named)[:1],
    "native_group_norm": _group_norm,
    "group_norm": lambda named: _group_norm(named)[:1],
}


@contextlib.contextmanager
def reference_rules() -> Iterator[None]:
    """References are computed here: without the modes that simulate a device, without autocast, in
    full matmul precision.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    precision = torch.get_float32_matmul_precision()
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


class _Calls(TorchDispatchMode):  # type: ignore[misc]
    """Names of the operators that run, each once. Views and new tensors are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(zip((a.name for a in func._schema.arguments), args)) | (kwargs or {})
        if kind(func, named) not in (VIEW, CREATION):
            self.names[str(func)] = None
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    on = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(on)


def _synchronize(device: Any) -> None:
    module = getattr(torch, torch.device(device).type, None)
    if module is not None and torch.device(device).type != "cpu" and hasattr(module, "synchronize"):
        module.synchronize()


# ---- judging

RHO, Z, RHO_16, Z_16 = 5.0, 14.0, 2.0, 8.0
_SENTINEL = 0.9


@dataclass
class Figures:
    """How far a result of the device is from the reference. local: worst error over its own noise
    floor; score > 1 fails.

    counts: elements whose absolute error exceeds 1e-1 .. 1e-8. where, why: the worst element, and
    what was found, in words.
    """

    numel: int = 0
    least: float = math.inf
    greatest: float = -math.inf
    worst: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * 8)
    ulp: float = 0.0
    nan: int = 0
    inf: int = 0
    local: float = 0.0
    score: float = 0.0
    why: str = ""
    dtypes: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)

    def join(self, other: Figures) -> None:
        """Takes in the figures of another result of the same call."""
        self.numel += other.numel
        self.least, self.greatest = min(self.least, other.least), max(self.greatest, other.greatest)
        self.worst, self.ulp = max(self.worst, other.worst), max(self.ulp, other.ulp)
        self.counts = [a + b for a, b in zip(self.counts, other.counts)]
        self.nan, self.inf = self.nan + other.nan, self.inf + other.inf
        if other.score > self.score or not self.why:
            self.why = other.why
        self.local, self.score = max(self.local, other.local), max(self.score, other.score)
        self.dtypes, self.shapes = self.dtypes + other.dtypes, self.shapes + other.shapes


def unit_roundoff(dtype: Any) -> float:
    """Largest relative error of rounding to nearest in a floating or complex dtype."""
    return float(torch.finfo(dtype).eps / 2)


def measure(output: Any, wide: Any, floors: Sequence[Any], *, length: int = 1) -> Figures:
    """Judge what a device made against the CPU.

    output: CPU tensor of any dtype. wide: the same computed in float64. floors: the same computed
    in output's own dtype, one
    or several right ways. length: largest number of terms that one element is summed from. All of
    one shape.
    Source: the error of the device over the largest error of the floors (2-norm), at least half a
    unit in the last place and
    0.3 sqrt(length) u; and the worst element over the rounding of its row and column.
    """
    if output.numel() == 0:
        return Figures()
    if not _rounds(output):
        return _exact(output, wide, floors)
    kind = output.dtype
    u, big = unit_roundoff(kind), float(torch.finfo(kind).max)
    tiny = float(torch.finfo(kind).tiny)
    y, r, *ws = (_flat(t) for t in (output, wide, *floors))
    ws = ws or [r]
    found = Figures(numel=output.numel())
    finite = r.isfinite()
    if bool(finite.any()):
        found.least, found.greatest = float(r[finite].min()), float(r[finite].max())
    limit = _SENTINEL * big
    fine = (y.abs() < limit) & (r.abs() < limit)
    for w in ws:
        fine &= w.abs() < limit
    # A NaN or Inf that the CPU makes too, in either dtype, is no mismatch.
    wrong = ~fine & ~_same(y, r, limit) & ~((y.abs() < limit) & (r.abs() < limit))
    for w in ws:
        wrong &= ~_same(y, w, limit)
    wrong &= ~(
        y.isfinite() & ((y - r).abs() <= 0.01 * r.abs())
    )  # on both sides of the bound for great numbers
    found.nan = int((wrong & (y.isnan() | r.isnan())).sum())
    found.inf = int(wrong.sum()) - found.nan
    counted = y.isfinite() & r.isfinite() & ~wrong
    error = torch.where(counted, y - r, 0.0).abs()
    found.worst = float(error.max())
    found.counts = [int((error > 10.0**-k).sum()) for k in range(1, 9)]
    found.ulp = _ulp(output, wide)
    zero = torch.zeros((), dtype=torch.float64)
    y, r = torch.where(fine, y, zero), torch.where(fine, r, zero)
    # Beyond 1e150 a square overflows.
    scale = max(1.0, float(r.abs().max()) / 1e100, float(y.abs().max()) / 1e100)
    e, fs, r = (y - r) / scale, [(torch.where(fine, w, zero) - r) / scale for w in ws], r / scale
    last = output.shape[-1] * (2 if output.is_complex() else 1) if output.dim() > 1 else y.numel()
    size, own = float(r.norm()), max(float(f.norm()) for f in fs)
    accumulate = 2.0**-53 if kind in (torch.float64, torch.complex128) else 2.0**-24
    smallest = 0.5 * tiny / scale * math.sqrt(y.numel())  # numbers below may be flushed to zero
    floor = max(own, 0.5 * u * size, 0.3 * math.sqrt(max(length, 1)) * accumulate * size, smallest)
    rho = float(e.norm()) / floor
    spread = torch.zeros_like(r)
    for f in fs:
        square = (f * f).reshape(-1, last)
        spread = torch.maximum(
            spread,
            torch.maximum(square.mean(1, keepdim=True), square.mean(0, keepdim=True))
            .sqrt()
            .reshape(-1),
        )
    rms = size / math.sqrt(r.numel())
    # The third of the floors holds for single elements too: the CPU may have hit a tensor exactly.
    spread += u * r.abs() + 1e-3 * u * rms + tiny / scale
    ratio = e.abs() / spread
    at = int(ratio.argmax())
    z = float(ratio[at])
    rho_limit, z_limit = (RHO_16, Z_16) if u > 1e-5 else (RHO, Z)
    found.local = rho
    mismatch = found.nan + found.inf
    found.score = math.inf if mismatch else max(rho / rho_limit, z / z_limit)
    if mismatch:
        at = int(wrong.to(torch.uint8).argmax())
    index = _index(at, output)
    y, r = _flat(output), _flat(wide)
    seen = f"at {index} device {float(y[at]):.9g}, CPU {float(r[at]):.9g}"
    found.why = (
        f"{mismatch} elements are NaN or Inf on one side; {seen}"
        if mismatch
        else f"error {rho:.3g} x its floor, worst element {z:.3g} x; {seen}"
    )
    return found


def _exact(output: Any, wide: Any, floors: Sequence[Any]) -> Figures:
    wrong = output != wide.to(output.dtype)
    for floor in floors:
        wrong &= output != floor.to(output.dtype)
    y, r = output.to(torch.float64), wide.to(torch.float64)
    error = torch.where(wrong, (y - r).abs(), 0.0)
    count = int(wrong.sum())
    found = Figures(
        output.numel(),
        float(r.min()),
        float(r.max()),
        float(error.max()),
        [int((error > 10.0**-k).sum()) for k in range(1, 9)],
    )
    found.local = found.score = math.inf if count else 0.0
    if count:
        at = int(wrong.reshape(-1).to(torch.uint8).argmax())
        index = _index(at, output)
        found.why = (
            f"{count} of {output.numel()} elements differ; at {index} device "
            f"{y.reshape(-1)[at]:.17g}, CPU {r.reshape(-1)[at]:.17g}"
        )
    return found


def _flat(t: Any) -> Any:
    return (
        torch.view_as_real(t.resolve_conj().to(torch.complex128))
        if t.is_complex()
        else t.to(torch.float64)
    ).reshape(-1)


def _same(a: Any, b: Any, limit: float) -> Any:
    return ((a.abs() >= limit) & (b.abs() >= limit) & (a.signbit() == b.signbit())) | (
        a.isnan() & b.isnan()
    )


def _index(at: int, output: Any) -> list[int]:
    at = at // 2 if output.is_complex() else at
    return (
        [int(i) for i in torch.unravel_index(torch.tensor(at), output.shape)]
        if output.dim()
        else []
    )


_ORDERED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _ulp(output: Any, wide: Any) -> float:
    """Largest distance in representable numbers between the output and the reference rounded to its
    dtype, where both are finite.
    """
    if output.is_complex():
        output, wide = (
            torch.view_as_real(output.resolve_conj()),
            torch.view_as_real(wide.resolve_conj().to(torch.complex128)),
        )
    a, b = output.contiguous().reshape(-1), wide.to(output.dtype).contiguous().reshape(-1)
    keep = a.to(torch.float64).isfinite() & b.to(torch.float64).isfinite()
    size = a.element_size()
    places = []
    for t in (a, b):
        bits = t.view(_ORDERED[size])[keep].to(torch.int64)
        places.append(torch.where(bits < 0, -(1 << (8 * size - 1)) - bits, bits))
    one, two = places
    if not one.numel():
        return 0.0
    # Of unlike signs the distance may not fit into int64.
    far = torch.where(
        (one < 0) == (two < 0),
        (one - two).to(torch.float64),
        one.to(torch.float64) - two.to(torch.float64),
    )
    return float(far.abs().max())


# ---- what kinds of operators there are

VIEW, RANDOM, CREATION, PLAIN = "view", "random", "creation", "plain"
_CREATE = (
    "arange",
    "eye",
    "empty",
    "full",
    "linspace",
    "logspace",
    "ones",
    "zeros",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "range",
)
_POINTED = {
    "argmax": 0, "argmin": 0, "max.dim": 1, "min.dim": 1, "topk": 1, "sort": 1, "argsort": 0,
    "kthvalue": 1, "median.dim": 1, "nanmedian.dim": 1, "mode": 1, "cummax": 1, "cummin": 1,
    "max_pool2d_with_indices": 1, "max_pool3d_with_indices": 1, "adaptive_max_pool2d": 1,
    "adaptive_max_pool3d": 1,
}  # fmt: skip
_STATISTICS_WRITERS = ("batch_norm", "instance_norm")


def kind(func: Any, named: Mapping[str, Any]) -> str:
    """Does the operator draw random numbers, make a tensor from nothing, only look at another's
    memory, or compute?

    named: its arguments by schema name; only their presence and plain values count.
    """
    schema = func._schema
    base = schema.name.partition("::")[2]
    if torch.Tag.nondeterministic_seeded in func.tags and _draws(schema, named):
        return RANDOM
    if (
        base in _CREATE
        or base.startswith(("new_", "empty_"))
        or (base.endswith("_like") and base.removesuffix("_like") in (*_CREATE, "empty"))
    ):
        return CREATION
    if not any("Tensor" in str(a.type) for a in schema.arguments if a.name in named):
        return CREATION
    aliases = [r.alias_info for r in schema.returns]
    if aliases and all(a is not None and not a.is_write for a in aliases):
        return VIEW
    # Composite operators that change the shape, and copies of views that functionalisation makes.
    return (
        VIEW if base in ("_reshape_alias", "_unsafe_view", "alias", "lift", "lift_fresh") else PLAIN
    )


def _draws(schema: Any, named: Mapping[str, Any]) -> bool:
    named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()} | dict(
        named
    )
    if "dropout_p" in named:
        return bool(named["dropout_p"])
    return (
        bool(named.get("p", named.get("dropout", 1)))
        and named.get("train", named.get("training", True)) is not False
    )


def written(func: Any, named: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that the operator writes."""
    names = [
        a.name
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and named.get(a.name) is not None
    ]
    base = func._schema.name.partition("::")[2]
    takes_statistics = any(word in base for word in _STATISTICS_WRITERS) and "backward" not in base
    if takes_statistics and named.get("training", named.get("train", named.get("use_input_stats"))):
        names += [
            n
            for n in ("running_mean", "running_var")
            if named.get(n) is not None and n not in names
        ]
    return names


def results(func: Any, out: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator made by slot: "output.0", "output.1.0" of a list, and "mutated.NAME" for
    what it wrote.
    """
    wrote = written(func, named)
    made: dict[str, Any] = {}
    returns = (
        [out]
        if len(func._schema.returns) == 1
        else list(out)
        if isinstance(out, (list, tuple))
        else []
    )
    for k, (value, declared) in enumerate(zip(returns, func._schema.returns)):
        if declared.alias_info is not None and declared.alias_info.is_write:
            continue
        if isinstance(value, (bool, int, float, complex)):
            made[f"output.{k}"] = torch.as_tensor(
                value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64
            )
        elif isinstance(value, torch.Tensor):
            made[f"output.{k}"] = value
        else:
            made.update(
                {
                    f"output.{k}.{i}": t
                    for i, t in enumerate(value or ())
                    if isinstance(t, torch.Tensor)
                }
            )
    for name in wrote:
        value = named[name]
        made.update(
            {f"mutated.{name}": value}
            if isinstance(value, torch.Tensor)
            else {f"mutated.{name}.{i}": t for i, t in enumerate(value)}
        )
    return made


# ---- one test


class Skipped(Exception):
    """There is nothing to compare; the text says why."""


class Wrong(Exception):
    """The device made something of another form than the CPU; the text says what."""


class Check:
    """The fixture `check`: runs what a test names, writes its row and fails when the device is
    further off than rounding explains.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings, self.name = settings, name
        self.data = Data(settings.folder / "data.safetensors")

    def __call__(self, op: str, sample: int | None, /, **arguments: Any) -> None:
        """One operator. arguments: by schema name, tensors as `tensor(...)`; "state.DEVICE": state
        of that generator before it.
        """
        self._tested(op, lambda: self._operator(op, sample, arguments))

    def gradient(
        self, op: str, sample: int | None, grads: Mapping[int, Tensor], /, **arguments: Any
    ) -> None:
        """The operator and its backward. grads: output number -> gradient that came in; {}: drawn
        at random for the first output.
        """
        self._tested(f"{op} (backward)", lambda: self._gradient(op, sample, grads, arguments))

    def module(
        self, name: str, run: Callable[..., dict[str, Any]], sample: int | None, /, **arguments: Any
    ) -> None:
        """A module written as a function of (operators, its tensors by name), which returns its
        outputs by slot.
        """
        self._tested(name, lambda: self._module(run, sample, arguments))

    # ---- what is run

    def _operator(self, op: str, sample: int | None, arguments: dict[str, Any]) -> Row:
        func = overload(op)
        states = {
            k.removeprefix("state."): v for k, v in arguments.items() if k.startswith("state.")
        }
        arguments = {k: v for k, v in arguments.items() if not k.startswith("state.")}
        with reference_rules():
            elements = self._elements(sample, full=torch.Tag.pointwise in func.tags)
            built = _built(arguments, elements)
            state = {k: elements.of(f"state.{k}", v) for k, v in states.items() if sample in v.data}

        def run(ops: Operators, given: dict[str, Any]) -> dict[str, Any]:
            with torch.no_grad(), _generators(state, self.settings.seed):
                return results(func, invoke(ops, op, given), given)

        sort = kind(func, arguments)
        if sort == RANDOM:
            row = self._random(
                run, built, repeated=torch.device(self.settings.device).type in state
            )
        elif sort in (VIEW, CREATION):
            row = self._structure(run, built, filled="empty" not in op)
        else:
            row = self._three_ways(run, built, func)
        return row.with_note(_made_up(elements))

    def _gradient(
        self, op: str, sample: int | None, grads: Mapping[int, Tensor], arguments: dict[str, Any]
    ) -> Row:
        func = overload(op)
        with reference_rules():
            elements = self._elements(sample, full=False)
            built = _built({**arguments, **{f"grad.{k}": v for k, v in grads.items()}}, elements)

        def run(ops: Operators, given: dict[str, Any]) -> dict[str, Any]:
            named = {k: v for k, v in given.items() if not k.startswith("grad.")}
            incoming = {
                int(k.removeprefix("grad.")): v for k, v in given.items() if k.startswith("grad.")
            }
            copied = bool(written(func, named))  # a leaf must not be written
            leaves: dict[str, Any] = {}

            def leaf(name: str, value: Any) -> Any:
                if isinstance(value, list):
                    return [leaf(f"{name}.{k}", item) for k, item in enumerate(value)]
                if (
                    not isinstance(value, torch.Tensor)
                    or not _rounds(value)
                    or any(word in name for word in ("mask", "running", "bias_mask"))
                ):
                    return value
                leaves[name] = value.detach().requires_grad_()
                return leaves[name].clone() if copied else leaves[name]

            with torch.enable_grad(), _generators({}, self.settings.seed):
                named = {k: leaf(k, v) for k, v in named.items()}
                made = dict(enumerate(results(func, invoke(ops, op, named), named).values()))
                usable = {k: t for k, t in made.items() if t.requires_grad}
                chosen = {k: g.to(usable[k].dtype) for k, g in incoming.items() if k in usable}
                if not chosen:
                    chosen = {
                        k: _drawn_gradient(t, self.settings.seed)
                        for k, t in list(usable.items())[:1]
                    }
                if not chosen:
                    raise Skipped("its results have no gradient")
                found = torch.autograd.grad(
                    [usable[k] for k in chosen],
                    list(leaves.values()),
                    list(chosen.values()),
                    allow_unused=True,
                )
            return {f"grad.{name}": g for name, g in zip(leaves, found) if g is not None}

        return self._three_ways(run, built, func, backward=True).with_note(_made_up(elements))

    def _module(
        self, run: Callable[..., dict[str, Any]], sample: int | None, arguments: dict[str, Any]
    ) -> Row:
        with reference_rules():
            elements = self._elements(sample, full=False)
            built = _built(arguments, elements)

        def call(ops: Operators, given: dict[str, Any]) -> dict[str, Any]:
            with torch.no_grad():
                return run(ops, **given)

        return self._three_ways(call, built).with_note(_made_up(elements))

    # ---- how it is compared

    def _three_ways(
        self, run: Run, built: Built, func: Any = None, *, backward: bool = False
    ) -> Row:
        notes: list[str] = []
        with reference_rules():
            given, calls = built.make(), _Calls()
            # A test of a backward or a module rests on several operators.
            with calls if func is None or backward else contextlib.nullcontext():
                working, trouble = _tried(run, Operators(), given)
            ops = Operators(floating=torch.float64)
            wide, failed = _tried(run, ops, built.make(floating=torch.float64))
            if wide is None and working is not None:
                ops = Operators(floating=torch.float32)
                wide, _ = _tried(run, ops, built.make(floating=torch.float32))
                notes.append(f"reference in float32: {failed}")
            if wide is None and working is not None:
                wide, notes = working, [f"reference in its own dtype: {failed}"]
            notes += ops.notes
            floors = [working]
            with _without_onednn():
                floors.append(_tried(run, Operators(), built.make())[0])
            steps = Operators(stepwise=True)
            floors.append(_tried(run, steps, built.make())[0] if not backward else None)
            if not steps.wrote_out:
                floors.pop()
        try:
            made, seconds = self._on_device(run, built)[1:]
        except Skipped:
            raise
        except Exception as error:
            if working is None and wide is None:
                raise Skipped(f"the CPU raises as the device does: {trouble}") from error
            raise
        if wide is None:
            raise Skipped(f"no reference: the CPU raised {trouble}")
        figures = Figures()
        with reference_rules():
            picks = _picks(func, built.make()) if func is not None and not backward else {}
            for slot, value in made.items():
                value = value.detach().to("cpu")
                if (
                    slot not in wide
                ):  # what only the operator's own backward reads, where a reference was written out
                    notes.append(f"{slot} has no reference")
                    continue
                right, form = wide[slot], (working or wide)[slot]
                if value.shape != right.shape or (
                    working is not None and value.dtype != form.dtype
                ):
                    raise Wrong(f"{slot}: device made {_said(value)}, CPU {_said(form)}")
                others = [
                    f[slot]
                    for f in floors
                    if f is not None and slot in f and f[slot].shape == value.shape
                ]
                if slot in picks:
                    value, right, others = (
                        picks[slot](value),
                        picks[slot](right),
                        [picks[slot](o) for o in others],
                    )
                figures.join(_named(slot, value, measure(value, right, others, length=ops.length)))
            missing = [slot for slot in wide if slot not in made]
        if missing:
            raise Wrong(f"the device made no {', '.join(missing)}")
        return Row(figures, seconds, "; ".join(dict.fromkeys(notes)), tuple(calls.names))

    def _structure(self, run: Run, built: Built, *, filled: bool) -> Row:
        """Views and new tensors: the same elements in the same layout, in memory of the same
        owner.
        """
        with reference_rules():
            there = built.make()
            right = run(Operators(), there)
        given, made, seconds = self._on_device(run, built)
        figures = Figures()
        with reference_rules():
            for slot, value in made.items():
                other = right[slot]
                if _laid(value, given) != _laid(other, there):
                    raise Wrong(
                        f"{slot}: device made {_laid(value, given)}, CPU {_laid(other, there)}"
                    )
                if filled:
                    figures.join(_named(slot, value, measure(value.to("cpu"), other, [other])))
        return Row(figures, seconds, "compared structurally")

    def _random(self, run: Run, built: Built, *, repeated: bool) -> Row:
        """repeated: the state of the device's generator before the call is known; CPU states give
        the same numbers again.
        """
        with reference_rules():
            right = run(Operators(), built.make())
        _, made, seconds = self._on_device(run, built)
        figures = Figures()
        exact = repeated and torch.device(self.settings.device).type == "cpu"
        with reference_rules():
            for slot, value in made.items():
                value, other = value.to("cpu"), right[slot]
                if value.shape != other.shape or value.dtype != other.dtype:
                    raise Wrong(f"{slot}: device made {_said(value)}, CPU {_said(other)}")
                if exact:
                    figures.join(_named(slot, value, measure(value, other, [other])))
                    continue
                far = kolmogorov_smirnov(value, other)
                least, greatest = (
                    (float(t) for t in other.to(torch.float64).aminmax())
                    if other.numel()
                    else (0.0, 0.0)
                )
                alike = Figures(
                    value.numel(),
                    least,
                    greatest,
                    local=far,
                    score=far,
                    why=f"distributions differ by {far:.3g} times what chance makes",
                )
                figures.join(_named(slot, value, alike))
        return Row(
            figures,
            seconds,
            "compared from the recorded random state" if exact else "compared structurally",
        )

    def _on_device(self, run: Run, built: Built) -> tuple[dict[str, Any], dict[str, Any], float]:
        with reference_rules():
            given = built.make(self.settings.device)
            ops = Operators(self.settings.device)
            _synchronize(self.settings.device)
        began = time.perf_counter()
        made = run(ops, given)
        _synchronize(self.settings.device)
        return given, made, time.perf_counter() - began

    def _elements(self, sample: int | None, *, full: bool) -> Elements:
        return Elements(self.settings, self.data, self.name, sample, full=full)

    # ---- the row

    def _tested(self, op: str, run: Callable[[], Row]) -> None:
        cells: dict[str, Any] = {"name": self.name, "op_name": op, "device": self.settings.device}
        problem = ""
        try:
            row = run()
        except Skipped as reason:
            cells |= {"status": "skipped", "reason": str(reason)}
        except Wrong as reason:
            problem = str(reason)
            cells |= {"status": "fail", "reason": problem}
        except Exception as error:  # noqa: BLE001 - whatever an operator raises is what its row says
            problem = f"{type(error).__name__}: {str(error)[:500]}"
            cells |= {"status": "error", "reason": problem}
        else:
            failed = row.figures.score > 1
            problem = row.figures.why if failed else ""
            said = "; ".join(x for x in (problem, row.note) if x)
            cells |= row.cells() | {"status": "fail" if failed else "pass", "reason": said}
        if self.settings.table:
            append(self.settings.table, cells)
        if cells["status"] == "skipped":
            import pytest

            pytest.skip(cells["reason"])
        if problem:
            raise AssertionError(f"{op} on {self.settings.device}: {problem}")


Run = Callable[[Operators, dict[str, Any]], dict[str, Any]]


@dataclass
class Row:
    """What a test found. seconds: of the call on the device. calls: operators that ran, where there
    are several.
    """

    figures: Figures
    seconds: float
    note: str
    calls: tuple[str, ...] = ()

    def with_note(self, note: str) -> Row:
        """With one more remark, if there is any."""
        return replace(self, note="; ".join(x for x in (self.note, note) if x))

    def cells(self) -> dict[str, Any]:
        """Its figures by column. shape, dtype, least and greatest value are those of the
        results.
        """
        f = self.figures
        known = f.least <= f.greatest
        return {
            "dtype": "; ".join(dict.fromkeys(f.dtypes)),
            "shape": "; ".join(f.shapes),
            "min-val": repr(f.least) if known else "",
            "max-val": repr(f.greatest) if known else "",
            "max": repr(f.worst),
            **{f"1e-{k + 1}": n for k, n in enumerate(f.counts)},
            "ulp": f"{f.ulp:.17g}",
            "nan_mismatch": f.nan,
            "inf_mismatch": f.inf,
            "local_error": f"{f.local:.6g}",
            "time": f"{self.seconds:.6f}",
            "numel": f.numel,
            "calls": " ".join(self.calls),
        }


def _built(arguments: Mapping[str, Any], elements: Elements) -> Built:
    return Built(arguments, {name: elements.of(name, spec) for name, spec in specs_in(arguments)})


def _made_up(elements: Elements) -> str:
    return (
        f"elements were not kept, drawn in their range: {', '.join(elements.made_up)}"
        if elements.made_up
        else ""
    )


def _tried(run: Run, ops: Operators, given: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    try:
        return run(ops, given), ""
    except Skipped:
        raise
    except Exception as error:  # noqa: BLE001 - operators raise anything; the text is kept
        return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def _named(slot: str, value: Any, figures: Figures) -> Figures:
    figures.dtypes, figures.shapes = (
        [NAMES.get(value.dtype, str(value.dtype))],
        [str(list(value.shape))],
    )
    figures.why = f"{slot}: {figures.why}" if figures.why else ""
    return figures


def _said(value: Any) -> str:
    return f"{NAMES.get(value.dtype, value.dtype)} {list(value.shape)}"


def _laid(value: Any, given: Mapping[str, Any]) -> str:
    owners = [
        n
        for n, t in given.items()
        if any(
            t.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
            for t in tensors_in(t)
        )
    ]
    whose = f" of {owners[0]}" if owners and value.numel() else ""
    return f"{_said(value)} stride {list(value.stride())} offset {value.storage_offset()}{whose}"


def _drawn_gradient(like: Any, seed: int) -> Any:
    with reference_rules():
        generator = torch.Generator().manual_seed(seed)
        values = (
            torch.rand(math.prod(like.shape), generator=generator, dtype=torch.float64).reshape(
                like.shape
            )
            * 2
            - 1
        )
        # Rounded to 8 bits, so that every dtype holds the same.
        return values.to(torch.bfloat16).to(like.dtype).to(like.device)


@contextlib.contextmanager
def _generators(state: Mapping[str, Any], seed: int) -> Iterator[None]:
    """With generators in these states ("cpu", "cuda"); without any, the CPU's is seeded. Afterwards
    the CPU's is as before.
    """
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    for device, value in state.items():
        (torch if device == "cpu" else getattr(torch, device)).set_rng_state(value)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _picks(func: Any, given: Mapping[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """For results that are indices: what they point at, by slot; equal values may be pointed at in
    any order.
    """
    name = func._schema.name.partition("::")[2]
    place = _POINTED.get(f"{name}.{func._overloadname}", _POINTED.get(name))
    x = next(tensors_in(list(given.values())), None)
    if place is None or x is None:
        return {}
    dim = given.get("dim", -1 if name not in ("argmax", "argmin") else None)

    def pick(index: Any) -> Any:
        kept = index
        if "pool" in name:
            flat = x.flatten(-3 if "3d" in name else -2)
            index = index.flatten(-3 if "3d" in name else -2)
            axis = -1
        elif dim is None or x.dim() == 0:
            flat, index, axis = x.reshape(-1), index.reshape(-1), 0
        else:
            flat, axis = x, dim
            if index.dim() < x.dim():
                index = index.unsqueeze(dim)
        if index.numel() and not bool(((index >= 0) & (index < flat.shape[axis])).all()):
            raise Wrong("an index beyond its tensor")
        return flat.gather(axis, index).reshape(kept.shape)

    return {f"output.{place}": pick}


def kolmogorov_smirnov(a: Any, b: Any) -> float:
    """How far the distributions of two samples are apart, over what chance makes once in 10^9: 1
    and less is chance.

    Two-sample Kolmogorov-Smirnov statistic; its tail is 2 exp(-2 D^2 n m / (n + m)).
    """
    a, b = (_flat(t) for t in (a, b))
    if not a.numel():
        return 0.0
    a, b = a.sort().values, b.sort().values
    where = torch.cat((a, b))
    shares = [
        torch.searchsorted(t, where, right=True).to(torch.float64) / t.numel() for t in (a, b)
    ]
    distance = float((shares[0] - shares[1]).abs().max())
    return distance / math.sqrt(
        math.log(2e9) * (a.numel() + b.numel()) / (2.0 * a.numel() * b.numel())
    )


# ---- the table


def start_table(path: str) -> None:
    """A new csv with the column names only."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(_line(COLUMNS), encoding="utf-8")


def append(path: str, cells: Mapping[str, Any]) -> None:
    """Add a row, in one write: several processes may add to one file, and what crashes later loses
    nothing.
    """
    with Path(path).open("a", encoding="utf-8", newline="") as file:
        file.write(_line([_cell(cells.get(column, "")) for column in COLUMNS]))


def _line(cells: Sequence[Any]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def _cell(value: Any) -> str:
    text = str(value)
    text = (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    )
    try:
        float(text)
    except ValueError:
        return (
            "'" + text if text[:1] in ("=", "+", "-", "@") else text
        )  # else a spreadsheet takes it for a formula
    return text


# ---- pytest


def add_options(parser: Any, settings: Settings) -> None:
    """The options of `pytest`, with the defaults these tests were written with."""
    group = parser.getgroup("operators")
    group.addoption(
        "--device", default=settings.device, help="where the operators run: cpu, cuda:0, npu, ..."
    )
    group.addoption("--seed", type=int, default=settings.seed, help="of random elements")
    group.addoption(
        "--factory",
        choices=("load", "random", "special"),
        default=settings.factory,
        help="elements of the tensors",
    )
    group.addoption(
        "--cpu-init",
        action="store_true",
        default=settings.cpu_init,
        help="draw random elements on the CPU, the same for every device",
    )
    group.addoption(
        "--detail_compare_path", default="", metavar="CSV", help="write a row per test to this file"
    )
    group.addoption(
        "--import",
        dest="import_modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import it first: custom operators, a device",
    )


def configure(config: Any) -> None:
    """Before the first test: custom operators are imported, the device is there, the csv is
    begun.
    """
    import pytest

    option = config.option
    try:
        for module in option.import_modules:
            importlib.import_module(module)
        torch.empty(1, device=option.device)
    except Exception as error:
        raise pytest.UsageError(
            f"--device {option.device}, --import {option.import_modules}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if option.detail_compare_path and not hasattr(config, "workerinput"):
        # Workers of pytest-xdist are given the whole path and add their rows to the file that is
        # begun here.
        option.detail_compare_path = str(
            Path(config.invocation_params.dir, option.detail_compare_path)
        )
        start_table(option.detail_compare_path)


def check_for(request: Any) -> Check:
    """The fixture `check` of one test."""
    option = request.config.option
    settings = Settings(
        Path(request.path).parent,
        option.device,
        option.seed,
        option.factory,
        option.cpu_init,
        option.detail_compare_path,
    )
    return Check(settings, request.node.name.removeprefix("test_"))
