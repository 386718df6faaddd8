"""The operators of a run with their inputs, kept before an operator overwrites them, and run again
in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from whence.frameworks.operator_names import words
from whence.frameworks.torch_arrays import tensors_in
from whence.replay.dtype_policy import widened
from whence.workflows.probe.torch.trace import Key, Trace
from whence.workflows.probe.torch.wide import Wide

ATTENTION = "_scaled_dot_product"
DRAWS = 2
"""Number of times that the inputs of an operator are rounded differently."""
_SEED = 41


class Operands:
    """The inputs of one operator.

    exact: storages of tensors that are no result of arithmetic (parameters and buffers) and so
    contain no rounding error.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, exact: frozenset[int]) -> None:
        self.func, self.args, self.kwargs, self._exact = func, args, kwargs, exact

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The floating-point tensors among the arguments."""
        return [t for t in tensors_in([*self.args, *self.kwargs.values()]) if t.is_floating_point()]

    def named(self) -> dict[str, Any]:
        """The arguments by their names in the operator's schema."""
        names = [str(a.name) for a in self.func._schema.arguments if not a.kwarg_only]
        return {**dict(zip(names, self.args)), **self.kwargs}

    def numbers(self) -> list[float]:
        """Plain numbers among the arguments."""
        values = (*self.args, *self.kwargs.values())
        return [abs(float(v)) for v in values if isinstance(v, (int, float))]

    def in_float64(self, draw: int | None = None, unit: float | None = None) -> list[torch.Tensor]:
        """The operator's result in float64.

        draw: None for the inputs as they are; otherwise the seed of another rounding of the inputs:
        each element is multiplied by 1 + r, r uniform in -u..u, where u is the unit roundoff of the
        tensor (`unit` for all tensors if given). Raises what the operator raises.
        """
        generator = torch.Generator().manual_seed(_SEED + (draw or 0))

        def other(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            wide = widened(value, torch.float64)
            if draw is None or not value.is_floating_point() or self._is_exact(value):
                return wide.clone() if wide is value else wide
            u = torch.finfo(value.dtype).eps / 2 if unit is None else unit
            r = torch.rand(wide.shape, generator=generator, dtype=torch.float32) * 2 - 1
            return wide * (1 + u * r.to(wide))

        with torch.no_grad(), Wide([]):
            out = self.func(*tree_map(other, self.args), **tree_map(other, self.kwargs))
        return floating(out)

    def _is_exact(self, tensor: torch.Tensor) -> bool:
        return storage(tensor) in self._exact


class Reading(Trace):
    """A trace that calls `look(key, operands, results)` for each operator that computes
    floating-point tensors.

    The return value replaces the first result, unless it is None.
    """

    def __init__(self, model: Any, look: Callable[[Key, Operands, list[Any]], Any]) -> None:
        super().__init__(model, begin=1 << 60, change=self._looked)
        self._look = look
        self._exact = frozenset(storage(t) for t in (*model.parameters(), *model.buffers()))
        self._read: Operands | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._read = None
        if computes(func) and not _drops(func, args, kwargs):
            read = (args, kwargs)
            if func._schema.is_mutable:
                read = tree_map(_cloned, read)
            self._read = Operands(func, *read, self._exact)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _looked(self, key: Key, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        read = self._read
        results = floating(out)
        if read is None or not results or not results[0].numel() or not read.tensors:
            return out
        changed = self._look(key, read, results)
        if changed is None:
            return out
        if func._schema.is_mutable:
            results[0].copy_(changed)
            return out
        return changed if isinstance(out, torch.Tensor) else type(out)((changed, *out[1:]))


def computes(func: Any) -> bool:
    """Whether an operator does arithmetic; views, copies, new memory and random numbers do not."""
    if getattr(func, "is_view", False) or not isinstance(func, torch._ops.OpOverload):
        return False
    name = func._schema.name.partition("::")[2]
    if torch.Tag.nondeterministic_seeded in func.tags and not name.startswith(ATTENTION):
        return False
    return name not in _MOVES and not name.startswith(("empty", "new_", "slice_", "index"))


_MOVES = words("""
    _local_scalar_dense _unsafe_view arange bucketize cat clone constant_pad_nd copy copy_ detach_
    embedding expand_copy fill fill_ flip full full_like gather lift_fresh lift_fresh_copy
    masked_fill masked_fill_ masked_scatter one_hot ones ones_like pad repeat resize_ roll
    scalar_tensor scatter scatter_ select_scatter set_ sort stack topk tril tril_ triu triu_ where
    zero_ zeros zeros_like
""")
"""Operators that move numbers without computing."""


def _drops(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an attention draws random numbers (dropout) in this call."""
    names = [str(a.name) for a in func._schema.arguments]
    dropped = {**dict(zip(names, args)), **kwargs}.get("dropout_p")
    return bool(dropped)


def floating(out: Any) -> list[torch.Tensor]:
    """The floating-point tensors that an operator returned."""
    return [t for t in tensors_in([out]) if t.is_floating_point()]


def storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; the tensor itself when it has none."""
    try:
        return int(tensor.untyped_storage().data_ptr()) or -id(tensor)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
