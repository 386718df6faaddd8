"""Finds how the channels of one tensor are permuted in another, and writes the permutation as a
dims expression.

The rows of a weight show where a fused or rearranged layer keeps each output channel. Rows are
matched by their bytes, so the permutation is exact; it also applies to the bias and the
activations.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.align import dims as ex
from whence.dtypes import Array

Order = npt.NDArray[np.int64]
# ways to split an axis in three that are tried before the indices are listed one by one
_MOST_GRIDS = 4000


def common(reference: Array, target: Array) -> tuple[Array, Array]:
    """Both tensors in the coarser of their floating dtypes."""
    a, b = dtypes.of(reference), dtypes.of(target)
    if a.name == b.name or not (a.is_floating and b.is_floating):
        return reference, target
    with np.errstate(over="ignore", invalid="ignore"):
        if (a.unit_roundoff or 0) > (b.unit_roundoff or 0):
            return reference, target.astype(reference.dtype)
        return reference.astype(target.dtype), target


def located(reference: Array, source: Array) -> Order | None:
    """For every row of `reference` (n, k) the index of the row of `source` (m, k) with the same
    bytes, -1 where there is none.

    Equal rows are taken in order. None where row lengths or dtypes differ, or where at most half of
    the rows are found.
    """
    if (
        reference.ndim != 2
        or source.ndim != 2
        or reference.shape[1] != source.shape[1]
        or not reference.size
    ):
        return None
    reference, source = common(reference, source)
    if reference.dtype != source.dtype:
        return None
    places: defaultdict[bytes, list[int]] = defaultdict(list)
    for index, row in enumerate(np.ascontiguousarray(source)):
        places[row.tobytes()].append(index)
    for positions in places.values():
        positions.reverse()
    out = np.full(len(reference), -1, np.int64)
    for index, row in enumerate(np.ascontiguousarray(reference)):
        equal = places.get(row.tobytes())
        if equal:
            out[index] = equal.pop()
    return out if 2 * np.count_nonzero(out >= 0) > len(out) else None


def completed(order: Order, extent: int) -> Order | None:
    """A permutation with its unknown places filled by the simplest rule that all known places
    follow; None when no rule does.

    order: -1 where a row was not found (it differs between the runs), for at most half of them.
    extent: of the axis that the places index.
    """
    is_known = order >= 0
    if is_known.all():
        return order
    first, n = int(np.argmax(is_known)), len(order)
    start = int(order[first]) - first
    for rule in _simple(extent, n, start):
        if len(rule) == n and np.array_equal(rule[is_known], order[is_known]):
            return rule
    return None


def _simple(extent: int, n: int, start: int) -> Iterator[Order]:
    """Simple permutations of n places: a contiguous range, blocks at equal distances, or an axis
    split in two or three and transposed.
    """
    if 0 <= start <= extent - n:
        yield np.arange(start, start + n)
    if extent > n:
        for blocks in _divisors(n):
            if extent % blocks == 0:
                step, length = extent // blocks, n // blocks
                grid = np.arange(extent).reshape(blocks, step)
                for offset in range(0, step - length + 1, math.gcd(step, length)):
                    yield grid[:, offset : offset + length].reshape(-1)
        return
    for _, _, order in _turned(extent):
        yield order


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _turned(n: int) -> Iterator[tuple[tuple[int, int, int], tuple[int, int, int], Order]]:
    """Yields (extents of the axis split in three, their new order, places) for every transposition
    of a split axis, the coarsest splits first.
    """
    grids = [(a, b, n // a // b) for a in _divisors(n) for b in _divisors(n // a)]
    grids = sorted((g for g in grids if sum(x > 1 for x in g) >= 2), key=lambda g: sorted(g)[1])
    for grid in itertools.islice(grids, _MOST_GRIDS):
        places = np.arange(n).reshape(grid)
        for turn in ((1, 0, 2), (0, 2, 1), (2, 1, 0)):
            moved = places.transpose(turn).reshape(-1)
            if not np.array_equal(moved[: n // 2], np.arange(n // 2)):
                yield grid, turn, moved


def taken(of: ex.Node, shape: tuple[int, ...], axis: int, order: Order) -> ex.Node:
    """The expression that takes the indices `order` along `axis` of a tensor, in its simplest form.
    shape: the shape of `of`.
    """
    axis %= len(shape)
    extent, n = shape[axis], len(order)
    if n == extent and np.array_equal(order, np.arange(n)):
        return of
    steps = np.diff(order)
    if n and (steps == 1).all():
        return _cut(of, len(shape), axis, int(order[0]), int(order[-1]) + 1)
    low, high = int(order.min()), int(order.max()) + 1
    blocks = _blocks(order, extent, of, shape, axis)
    if blocks is not None:
        return blocks
    if high - low == n:
        part = _cut(of, len(shape), axis, low, high) if n < extent else of
        for grid, turn, places in _turned(n):
            if np.array_equal(places + low, order):
                return _rearranged(part, len(shape), axis, grid, turn)
    return ex.Take(
        of, tuple(int(i) for i in order), axis - len(shape) if axis == len(shape) - 1 else axis
    )


def _blocks(
    order: Order, extent: int, of: ex.Node, shape: tuple[int, ...], axis: int
) -> ex.Node | None:
    """Stretches of one length at one distance: the same part of every group of an axis."""
    breaks = np.flatnonzero(np.diff(order) != 1)
    length = int(breaks[0]) + 1 if breaks.size else len(order)
    if len(order) % length or breaks.size == 0:
        return None
    starts = order.reshape(-1, length)[:, 0]
    step = int(starts[1] - starts[0])
    if (
        step <= length
        or extent % step
        or extent // step != len(starts)
        or (np.diff(starts) != step).any()
    ):
        return None
    if (
        not np.array_equal(order.reshape(-1, length), starts[:, None] + np.arange(length))
        or int(starts[0]) + length > step
    ):
        return None
    names = _letters(len(shape))
    letter = names[axis]
    whole, split = [*names], [*names]
    whole[axis], split[axis : axis + 1] = f"(g {letter})", ["g", letter]
    out = ex.Rearrange(of, f"{' '.join(whole)} -> {' '.join(split)}", (("g", extent // step),))
    part = _cut(out, len(shape) + 1, axis + 1, int(starts[0]), int(starts[0]) + length)
    return ex.Rearrange(part, f"{' '.join(split)} -> {' '.join(whole)}")


def _rearranged(
    of: ex.Node, dims: int, axis: int, grid: tuple[int, int, int], turn: tuple[int, int, int]
) -> ex.Node:
    letters = _letters(dims)
    parts = ["h", "p", "d"]
    alive = [i for i in range(3) if grid[i] > 1]
    names, turned = [*letters], [*letters]
    names[axis] = f"({' '.join(parts[i] for i in alive)})"
    turned[axis] = f"({' '.join(parts[i] for i in turn if i in alive)})"
    lengths = tuple((parts[i], grid[i]) for i in alive[:-1])
    return ex.Rearrange(of, f"{' '.join(names)} -> {' '.join(turned)}", lengths)


def _letters(dims: int) -> list[str]:
    return [("i", "j", "k", "l", "m", "n", "o", "q")[axis] for axis in range(dims)]


def _cut(of: ex.Node, dims: int, axis: int, start: int, stop: int) -> ex.Node:
    if axis == dims - 1 and dims > 1:
        return ex.Cut(of, (..., slice(start, stop)))
    return ex.Cut(of, (*[slice(None)] * axis, slice(start, stop)))
