"""Operators that choose among scores (top-k, argmax, sort): records their scores and choices, and
replays a run with prescribed choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from whence.frameworks.operator_names import CHOOSES
from whence.frameworks.torch_arrays import NAMES
from whence.replay import allowed_operators

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_DISTINCT = {"topk", "sort", "argsort"}
_POOLS = {
    "max_pool2d_with_indices": 2,
    "adaptive_max_pool2d": 2,
    "max_pool3d_with_indices": 3,
    "adaptive_max_pool3d": 3,
}
_HANDS_ON = {"_to_copy", "to", "clone", "contiguous", "type_as", "convert_element_type"}


@dataclass(frozen=True, slots=True)
class SeenChoices:
    """What an operator chose in one run.

    scores: [rows, n], of this `dtype`. own: [rows, k], the indices that the operator chose. used:
    the indices prescribed instead, else equal to `own`. shape: of the rows. ordered, distinct: as
    for `judge.ties.follow`. length: terms of the longest sum before the operator.
    """

    operator: str
    scores: F64
    own: I64
    used: I64
    shape: tuple[int, ...]
    dtype: str
    ordered: bool
    distinct: bool
    length: int


@dataclass
class Choices:
    """Records, and may override, every choice among scores in one run.

    told: place in the program -> indices to choose instead, [rows, k], -1 where the operator
    chooses by itself. seen: place -> what was recorded. shown: operand (place, result) -> (place of
    the choice whose indices it holds, for each of its elements the position in [rows, k]); views
    and casts pass indices on.
    """

    told: Mapping[int, I64] = field(default_factory=dict)
    seen: dict[int, SeenChoices] = field(default_factory=dict)
    shown: dict[tuple[int, int], tuple[int, Any]] = field(default_factory=dict)

    def made(
        self, place: int, base: str, operation: Any, named: Mapping[str, Any], out: Any, length: int
    ) -> Any:
        """Returns the results of a choosing operator: its own, or the prescribed indices with the
        scores at these indices.
        """
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        number = CHOOSES[base]
        x = named.get("self")
        if number >= len(results) or not isinstance(x, torch.Tensor) or x.is_complex():
            return out
        index = results[number]
        layout = _Layout(x, index, base, named.get("dim"), has_dim="dim" in named)
        scores, indices = layout.scores(), layout.rows(index)
        if indices is None or scores is None:
            return out
        used, forced = indices, self.told.get(place)
        if forced is not None and forced.shape == tuple(indices.shape):
            used = torch.where(torch.from_numpy(forced) < 0, indices, torch.from_numpy(forced))
        if not torch.equal(used, indices):
            results[number] = layout.back(used).to(index.dtype)
            if len(results) > 1:
                results[0] = layout.back(torch.gather(scores, 1, used))
        self.seen[place] = SeenChoices(
            base,
            scores.detach().to(torch.float64).numpy().copy(),
            indices.numpy().astype(np.int64),
            used.numpy().astype(np.int64),
            layout.shape,
            NAMES[x.dtype],
            bool(named.get("sorted", True)),
            base in _DISTINCT,
            length,
        )
        self.shown[place, number] = (
            place,
            layout.back(torch.arange(indices.numel()).reshape(indices.shape)),
        )
        return tuple(results) if len(results) > 1 else results[0]

    def passes(
        self,
        place: int,
        base: str,
        operation: Any,
        args: tuple[Any, ...],
        rerun: Callable[..., Any],
    ) -> None:
        """Follows indices through an operator that only rearranges or casts them.

        rerun: applies the same operator to another first argument.
        """
        operand = operation.args[0] if operation.args else None
        if not isinstance(operand, dict) or "op" not in operand:
            return
        choice = self.shown.get(tuple(operand["op"]))
        if choice is None:
            return
        if base in _HANDS_ON or operation.name == allowed_operators.CAST:
            self.shown[place, 0] = choice
        elif base in allowed_operators.VIEWS:
            moved = rerun(choice[1], *args[1:])
            if isinstance(moved, torch.Tensor):
                self.shown[place, 0] = choice[0], moved
            else:
                self.shown.update(((place, i), (choice[0], part)) for i, part in enumerate(moved))


class Integers:
    """A `Watch` that keeps every int32 and int64 tensor that a program computes; the indices that
    it chooses are among them.
    """

    def __init__(self) -> None:
        self.arrays: list[I64] = []

    def given(self, tensors: dict[str, Any]) -> None:
        """Ignores the inputs: the program did not compute them."""

    def runs(self, place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ignores the arguments: only results are kept."""

    def made(self, results: list[Any]) -> None:
        whole = (t for t in results if t.dtype in (torch.int64, torch.int32) and t.numel())
        self.arrays += [t.to(torch.int64).numpy().copy() for t in whole]


class _Layout:
    """Converts a choice along an axis to rows and back."""

    def __init__(self, x: Any, index: Any, base: str, dim: int | None, *, has_dim: bool) -> None:
        self.x, self.pooled = x, _POOLS.get(base, 0)
        flat = base in ("argmax", "argmin") and dim is None
        self.axis = None if flat else -1 if not has_dim else dim if dim is not None else -1
        self.index_shape = tuple(index.shape)
        self.squeezed = not flat and not self.pooled and index.dim() < x.dim()
        self.shape = () if flat else self._row_shape()

    def _row_shape(self) -> tuple[int, ...]:
        if self.pooled:
            return tuple(self.x.shape[: -self.pooled])
        shape = list(self.x.shape)
        if shape and self.axis is not None:
            del shape[self.axis]
        return tuple(shape)

    def scores(self) -> Any:
        """Returns the scores as [rows, n]; None when there is nothing to choose from."""
        if not self.x.numel():
            return None
        if self.axis is None or self.x.dim() == 0:
            return self.x.reshape(1, -1)
        if self.pooled:
            return self.x.flatten(-self.pooled).reshape(-1, self.x.shape[-self.pooled :].numel())
        return self.x.movedim(self.axis, -1).reshape(-1, self.x.shape[self.axis])

    def rows(self, index: Any) -> Any:
        """Returns the indices as [rows, k]; None when they do not have the shape of a choice."""
        if not index.numel():
            return None
        if self.axis is None or self.x.dim() == 0:
            return index.reshape(1, -1)
        if self.pooled:
            return index.flatten(-self.pooled).reshape(-1, index.shape[-self.pooled :].numel())
        index = index.unsqueeze(self.axis) if self.squeezed else index
        return index.movedim(self.axis, -1).reshape(-1, index.shape[self.axis])

    def back(self, rows: Any) -> Any:
        """Returns rows in the shape of the operator's results."""
        if self.axis is None or self.x.dim() == 0 or self.pooled:
            return rows.reshape(self.index_shape)
        shaped = rows.reshape(*self.shape, rows.shape[-1]).movedim(-1, self.axis)
        return shaped.squeeze(self.axis) if self.squeezed else shaped
