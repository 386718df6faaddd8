"""Selects the elements of two tensors that must be equal: those of the positions, or of the row,
that both runs share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from whence.workflows.probe.torch.outputs import same_bits

Pair = tuple[torch.Tensor, torch.Tensor]
Shape = tuple[int, ...]


class Region:
    """Selects the elements that must be equal from a tensor of the base run and of a variant.

    This base class selects every element. whole: an output without an axis of positions or rows
    must be equal too.
    """

    whole = True

    def pair(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """The elements of both tensors that must be equal; None when that is unknown.

        twin: shape of the same tensor in a run with another number of rows or positions, None for
        that of the variant.
        """
        return (base, variant) if base.shape == variant.shape else None

    def moving(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """The elements of both tensors that may differ; None without any."""
        return None


EVERYTHING = Region()


def closest(pairs: Iterable[Pair]) -> Pair:
    """The pair with the smallest distance, for candidates of which nothing else tells the right
    one.
    """
    return min(pairs, key=lambda pair: _distance(*pair))


class Turned(Region):
    """Every element, for an image that is transformed in the variant: an output stays or is
    transformed as well.

    turn: the transformation of the last axis.
    """

    def __init__(self, turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._turn = turn

    def pair(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """Both tensors, the first transformed when that agrees better."""
        if base.shape != variant.shape:
            return None
        if base.ndim < 3 or same_bits(base, variant):
            return base, variant
        return closest([(base, variant), (self._turn(base), variant)])


class Axis(NamedTuple):
    """An axis that counts rows or positions, with `times` elements for each."""

    number: int
    times: int


def axes(shape: Shape, twin: Shape, extent: int, extent_of_twin: int) -> list[Axis] | None:
    """The axes whose size changes with the extent; None when one changes in another way."""
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
    """Positions start..stop of a sequence of `extent`; in the variant they start at `at`.

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
        """Both tensors cut in every axis of positions; scores are cut in both the query and the key
        axis.
        """
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
        """The later positions, in the first axis of positions."""
        found = self._axes(base, variant, twin)
        stop = self.start + self.count
        if not found or base.shape != variant.shape or stop >= self.extent:
            return None
        rest = found[0].number, stop, self.extent - stop
        return base.narrow(*rest), variant.narrow(*rest)


class Row(Region):
    """Row `row` of a batch of `extent` rows; in the variant it is row `at`."""

    whole = False

    def __init__(self, extent: int, twin_extent: int, row: int = 0, at: int = 0) -> None:
        self.extent, self.twin_extent, self.row, self.at = extent, twin_extent, row, at

    def pair(self, base: torch.Tensor, variant: torch.Tensor, twin: Shape | None) -> Pair | None:
        """The row in both tensors.

        When an axis combines rows with something else, both orders are tried: elements of one row
        agree far better than those of different rows.
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
        """The next row, when both batches have the same size."""
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
