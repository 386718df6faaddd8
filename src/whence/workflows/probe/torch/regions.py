"""Which elements of two tensors must be equal: those of the positions, or of the row, that both
runs share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from whence.workflows.probe.torch.outputs import same_bits

Pair = tuple[torch.Tensor, torch.Tensor]
Shape = tuple[int, ...]


class Region:
    """Cuts what may not move out of a tensor of the base run and the same tensor of a variant: this
    one, every element.

    whole: an output that has no axis of positions or rows may not move either.
    """

    whole = True

    def pair(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """The elements of both that must be equal; None where nothing tells which they are.

        twin: shape of the same tensor in a run with another number of rows or positions, None for
        that of the variant.
        """
        return (base, variant) if base.shape == variant.shape else None

    def moving(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """The elements of both that may move; None where there are none."""
        return None


EVERYTHING = Region()


def closest(pairs: Iterable[Pair]) -> Pair:
    """The pair whose elements are least far apart: which is whose is not known otherwise."""
    return min(pairs, key=lambda pair: _distance(*pair))


class Turned(Region):
    """Every element, of an image that is turned in the variant: outputs stay, or turn with it.

    turn: what was done to the last axis.
    """

    def __init__(self, turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._turn = turn

    def pair(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """Both as they are, or the first turned: whichever agrees better."""
        if base.shape != variant.shape:
            return None
        if base.ndim < 3 or same_bits(base, variant):
            return base, variant
        return closest([(base, variant), (self._turn(base), variant)])


class Axis(NamedTuple):
    """An axis that counts rows or positions, `times` elements for each."""

    number: int
    times: int


def axes(shape: Shape, twin: Shape, extent: int, extent_of_twin: int) -> list[Axis] | None:
    """The axes that change with the extent; None where one changes in another way."""
    if len(shape) != len(twin):
        return None
    out = []
    for number, (size, other) in enumerate(zip(shape, twin)):
        if size == other:
            continue
        if size % extent or size // extent * extent_of_twin != other:
            return None
        out.append(Axis(number, size // extent))
    return out


class Positions(Region):
    """Positions start..stop of a sequence of `extent`, which in the variant begin at `at`.

    twin_extent: positions of the run that `twin` is of.
    """

    def __init__(
        self,
        extent: int,
        twin_extent: int,
        start: int,
        stop: int,
        at: int | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.whole = whole
        self.extent, self.twin_extent = extent, twin_extent
        self.start, self.count = start, stop - start
        self.at = start if at is None else at

    def _axes(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> list[Axis]:
        if twin is None and base.shape == variant.shape:  # no run with another extent
            return [Axis(n, 1) for n, size in enumerate(base.shape) if size == self.extent]
        shape = tuple(variant.shape) if twin is None else twin
        found = axes(tuple(base.shape), shape, self.extent, self.twin_extent)
        return found if found and all(axis.times == 1 for axis in found) else []

    def pair(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """Cut in every axis of positions: of scores, the queries and the keys alike."""
        found = self._axes(base, variant, twin)
        if not found:
            return (base, variant) if same_bits(base, variant) else None
        if any(self.at + self.count > variant.shape[axis.number] for axis in found):
            return None  # an axis that is as long as the sequence by chance
        for axis in found:
            base = base.narrow(axis.number, self.start, self.count)
            variant = variant.narrow(axis.number, self.at, self.count)
        return base, variant

    def moving(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """What comes after, in the first axis of positions."""
        found = self._axes(base, variant, twin)
        stop = self.start + self.count
        if not found or base.shape != variant.shape or stop >= self.extent:
            return None
        rest = found[0].number, stop, self.extent - stop
        return base.narrow(*rest), variant.narrow(*rest)


class Row(Region):
    """Row `row` of a batch of `extent`, which in the variant is row `at`."""

    whole = False

    def __init__(self, extent: int, twin_extent: int, row: int = 0, at: int = 0) -> None:
        self.extent, self.twin_extent, self.row, self.at = extent, twin_extent, row, at

    def pair(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """The row; where rows are folded into an axis with something else, the order is tried out:
        elements of one row agree far better than those of two.
        """
        shape = tuple(variant.shape) if twin is None else twin
        found = axes(tuple(base.shape), shape, self.extent, self.twin_extent)
        if found is None or len(found) != 1:
            return (base, variant) if same_bits(base, variant) else None
        number, times = found[0]
        first = _row(base, number, times, self.row), _row(variant, number, times, self.at)
        if times == 1 or same_bits(*first):
            return first
        last = (
            _row(base, number, times, self.row, outer=False),
            _row(variant, number, times, self.at, outer=False),
        )
        return closest([first, last])

    def moving(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """The row below, where the batch is as large in both runs."""
        if base.shape != variant.shape or self.row != self.at or self.row + 1 >= self.extent:
            return None
        return Row(self.extent, self.twin_extent, self.row + 1, self.at + 1).pair(
            base, variant, twin
        )


def _row(tensor: torch.Tensor, axis: int, times: int, row: int, outer: bool = True) -> torch.Tensor:
    count = tensor.shape[axis] // times
    sizes = (count, times) if outer else (times, count)
    return tensor.unflatten(axis, sizes).select(axis if outer else axis + 1, row)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if not (a.is_floating_point() or a.is_complex()):
        return float((a != b).sum())
    return float((a - b).abs().double().nan_to_num(nan=0.0, posinf=1e300).sum())
