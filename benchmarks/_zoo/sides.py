"""One side of a pair: a model, what it is given, and the program that drives it."""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Inputs = dict[str, Tensor]
Drive = Callable[[nn.Module, Inputs], Any]


class NotHere(Exception):
    """A way, a fault or a dtype has no place in this model."""


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model: inputs named by a digit by position, the others by name."""
    places = [value for name, value in inputs.items() if name.isdigit()]
    return model(*places, **{k: v for k, v in inputs.items() if not k.isdigit()})


def tensors(value: Any) -> list[Tensor]:
    """The floating tensors in what a model returns, in order; caches count as nothing."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def first(value: Any) -> Tensor:
    """The first floating tensor of what a model returns: its scores or hidden states."""
    return tensors(value)[0]


@dataclass
class Side:
    """drive: runs the model and returns what both sides must agree in. around: a context in which
    the model is driven (autocast, a gradient mode). touched: names of modules that a way changed.
    recipe: how it is trained.
    """

    model: nn.Module
    inputs: Inputs
    drive: Drive = call
    around: Callable[[], contextlib.AbstractContextManager[Any]] = torch.no_grad
    touched: set[str] = field(default_factory=set)
    traits: frozenset[str] = frozenset()
    recipe: Any = None

    def copied(self) -> Side:
        """The same side with a model of its own."""
        return Side(
            copy.deepcopy(self.model),
            dict(self.inputs),
            self.drive,
            self.around,
            set(self.touched),
            self.traits,
            self.recipe,
        )

    def to(self, dtype: torch.dtype) -> Side:
        """The same side in another dtype."""
        side = self.copied()
        side.model.to(dtype)
        side.inputs = {
            k: v.to(dtype) if v.is_floating_point() else v for k, v in side.inputs.items()
        }
        return side

    def run(self) -> Any:
        """Drive the model as its user would."""
        with self.around():
            return self.drive(self.model, self.inputs)

    def only(self, name: str) -> nn.Module:
        """The module of that name."""
        return self.model.get_submodule(name)


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the module `name`."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module.train(model.training))


def numbers(name: str, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Normal numbers that depend on `name` alone."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return random.standard_normal(shape).astype(np.float32)


def normal(name: str, *shape: int) -> Tensor:
    """`numbers` as a tensor."""
    return torch.from_numpy(np.asarray(numbers(name, *shape)))


def ids(name: str, rows: int, length: int, vocabulary: int) -> Tensor:
    """Tokens that depend on `name` alone."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return torch.from_numpy(random.integers(5, vocabulary, (rows, length)))


KEPT = ("A_log", "inv_freq", "D", "slopes")


@torch.no_grad()
def fill(model: nn.Module) -> nn.Module:
    """Give every parameter numbers by its name, of the size of usual initialisations."""
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if last in KEPT:
            continue
        value = normal(name, *parameter.shape)
        if parameter.dim() < 2:
            is_scale = last in ("weight", "gamma") or ("norm" in last and "bias" not in last)
            value = 1 + 0.1 * value if is_scale else 0.1 * value
        elif "embed" in name or "wte" in name or "shared.weight" in name:
            value = 0.5 * value
        else:
            value = value / max(1, int(np.prod(parameter.shape[1:]))) ** 0.5
            if parameter.dim() == 3 and "conv" not in name:  # experts: [experts, out, in]
                value = normal(name, *parameter.shape) / parameter.shape[-1] ** 0.5
        parameter.copy_(value)
    for name, buffer in model.named_buffers():
        last = name.rpartition(".")[2]
        if last == "running_mean":
            buffer.copy_(0.1 * normal(name, *buffer.shape))
        elif last == "running_var":
            buffer.copy_(0.5 + normal(name, *buffer.shape).abs())
    return model.eval()


NARROW = {torch.float32, torch.bfloat16, torch.float16}


class Widely(TorchFunctionMode):
    """Casts to any narrower floating dtype go to float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "grouped_mm" in getattr(func, "__name__", "") and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **(kwargs or {}))
        kwargs = {k: _wide(v) for k, v in (kwargs or {}).items()}
        if getattr(func, "__name__", "") in ("float", "half", "bfloat16") and args:
            func = Tensor.double
        return func(*map(_wide, args), **kwargs)


def _grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor, **_: Any) -> Tensor:
    ends = [0, *offs.tolist()]
    parts = [rows[a:b] @ w for a, b, w in zip(ends, ends[1:], weights)]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


@contextlib.contextmanager
def widely() -> Iterator[None]:
    """Everything is computed in float64 inside, whatever the model's code casts to."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widely():
            yield
    finally:
        torch.set_default_dtype(before)


def exact(side: Side) -> list[Tensor]:
    """What a side returns in float64. Buffers that are float32 for good (frequencies) are widened
    with the model.
    """
    with widely():
        return tensors(side.to(torch.float64).run())


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest relative 2-norm between two results; infinite where they do not match."""
    if len(one) != len(other) or not one:
        return float("inf")
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape:
            return float("inf")
        a, b = a.detach().double(), b.detach().double()
        finite = a.isfinite() & b.isfinite()
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        a, b = a[finite], b[finite]
        size = max(float(a.norm()), 1e-30)
        worst = max(worst, float((a - b).norm()) / size)
    return worst
