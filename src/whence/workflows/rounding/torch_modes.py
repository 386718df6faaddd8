"""Modes in which torch computes a program differently but equally correctly: in float64 throughout,
or with every operator off by one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from whence.frameworks.operator_names import words
from whence.frameworks.torch_arrays import tensors_in
from whence.frameworks.torch_schema import PLAIN, RANDOM, kind
from whence.replay.module_arithmetic import Arithmetic

_EXACT = words("""
    _to_copy _unsafe_view abs alias amax amin argmax argmin argsort cat ceil chunk clamp
    clamp_max clamp_min clone constant_pad_nd copy cummax cummin detach embedding expand flip
    floor gather index index_select lift lift_fresh masked_fill masked_select max maximum min
    minimum neg nonzero permute relu repeat reshape roll round scatter select sign slice sort
    split squeeze stack take topk transpose tril triu trunc unbind unfold unsqueeze view where
    zeros_like
""")
"""Operators without rounding: their results are among their inputs, or whole numbers."""


class InFloat64(Arithmetic):
    """Computes in float64, whatever dtypes the code requests.

    Random numbers are drawn in the program's default dtype and then widened, so that they equal
    those of the normal program.
    """

    def __init__(self, drawn: torch.dtype) -> None:
        super().__init__(torch.float64, False, [], ())
        self._drawn = drawn
        self.is_narrow = False  # was something written that stays in a narrower dtype?

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and self._draws(func, args, kwargs):
            return self._drawn_narrow(func, args, kwargs)
        if isinstance(func, torch._ops.OpOverload):
            args, kwargs = self._widened(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _widened(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Widen arguments that were created before the program began, such as weights."""
        if func._schema.is_mutable:
            written = [a for a in args[:1] if isinstance(a, torch.Tensor)]
            self.is_narrow |= any(t.is_floating_point() and not _is_wide(t) for t in written)
            return args, kwargs
        if func._schema.name == "aten::view" and any(isinstance(a, torch.dtype) for a in args):
            return args, kwargs
        return tree_map(doubled, tuple(args)), tree_map(doubled, kwargs)

    def _draws(self, func: Any, args: Any, kwargs: Any) -> bool:
        return kind(func, _named(func, args, kwargs)) == RANDOM

    def _drawn_narrow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draw the program's own random numbers and widen them to float64, exactly."""
        narrow = [a.to(self._drawn) if _is_wide(a) else a for a in args]
        asked = kwargs.get("dtype")
        if asked is torch.float64 or (asked is None and _takes_default(func)):
            kwargs = {**kwargs, "dtype": self._drawn}
        drawn = func(*narrow, **kwargs)
        if func._schema.is_mutable and _is_wide(args[0] if args else None):
            return args[0].copy_(narrow[0])
        return tree_map(doubled, drawn)


class OffByOne(TorchDispatchMode):  # type: ignore[misc]
    """Adds an error of up to one unit roundoff to the result of every operator that rounds.

    The error is random; the unit roundoff is that of the result's dtype or of a coarser one.
    """

    def __init__(self, seed: int, coarser: float = 0.0) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._coarser = coarser

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
            return out
        base = func._schema.name.partition("::")[2]
        if base in _EXACT or kind(func, _named(func, args, kwargs)) != PLAIN:
            return out
        for tensor in tensors_in([out]):
            self._move(tensor)
        return out

    def _move(self, tensor: Any) -> None:
        if not tensor.is_floating_point() or tensor.device.type != "cpu":
            return
        unit = max(torch.finfo(tensor.dtype).eps / 2, self._coarser)
        drawn = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64)
        moved = (tensor.double() * (1 + unit * (2 * drawn - 1))).to(tensor.dtype)
        tensor.copy_(torch.where(moved.isfinite(), moved, tensor))


@contextmanager
def in_float64() -> Iterator[InFloat64]:
    """Run the program in float64, which is also the default dtype for new tensors."""
    default = torch.get_default_dtype()
    mode = InFloat64(default)
    torch.set_default_dtype(torch.float64)
    try:
        with mode:
            yield mode
    finally:
        torch.set_default_dtype(default)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Run operators on this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    positional = (a.name for a in func._schema.arguments if not a.kwarg_only)
    return {**dict(zip(positional, args)), **kwargs}


def _takes_default(func: Any) -> bool:
    """Whether an operator draws in the default dtype when none is requested; integer
    draws do not.
    """
    is_whole = func._schema.name.partition("::")[2].startswith(("randint", "randperm"))
    return not is_whole and any(a.name == "dtype" for a in func._schema.arguments)


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64


def doubled(value: Any) -> Any:
    """A floating-point tensor in float64; any other value unchanged."""
    is_narrow = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_narrow else value
