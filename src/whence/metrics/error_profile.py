"""Profile of the error of one pair of tensors: its distribution over sizes, over the reference's
values and over the places of the tensor.

All results have a bounded size. Histogram and heatmap use every element; the points of the scatter
plot are a sample. There are no thresholds and no judgements.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whence.dtypes import Array
from whence.metrics.numpy_pass import wide

F64 = npt.NDArray[np.float64]

POINTS = 600
WORST = 10
_QUANTILES = 128
_SIDE = (40, 80)  # blocks of a heatmap at most, along either axis
_MOST = 1 << 24  # elements; of larger tensors only so many, from the first rows, are used
_BINS_A_DECADE = 4


class Heat(NamedTuple):
    """Root mean square error over blocks of (rows, channels): `values` is at most 40 x 80, NaN
    where a block has no finite element.

    by_row, by_channel: sums of the squared error of every row and every channel.
    """

    values: F64
    by_row: F64
    by_channel: F64


class Closely(NamedTuple):
    """The error profile. zeros: number of exactly equal elements. edges, counts: histogram of
    |error| > 0. magnitude: (n, 2) of (|reference|, |error|). quantiles: (k, 2) of (magnitude of a
    standard normal, |error|). worst: flat indices, the largest error first. looked: number of
    elements used.
    """

    looked: int
    zeros: int
    edges: F64
    counts: npt.NDArray[np.int64]
    magnitude: F64
    quantiles: F64
    heat: Heat | None
    worst: npt.NDArray[np.int64]
    not_finite: tuple[int, int]


def closely(reference: Array, target: Array) -> Closely:
    """The error profile of target - reference.

    reference, target: same shape, any dtype; for complex tensors the magnitude of the difference.
    Errors are computed in float64 over elements that are finite on both sides. Of tensors with more
    than 2^24 elements only the first rows are used (`looked`).
    """
    shape = reference.shape
    last = shape[-1] if len(shape) > 1 else max(reference.size, 1)
    rows = max(1, min(reference.size, _MOST) // max(last, 1))
    ref, tgt = (wide(side.reshape(-1)[: rows * last]) for side in (reference, target))
    fine = np.isfinite(ref) & np.isfinite(tgt)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(fine, np.abs(tgt - ref), np.nan)
    finite, sizes = error[fine], np.abs(ref[fine])
    moved = finite[finite > 0]
    edges, counts = _histogram(moved)
    rank = np.where(_odd(ref, tgt), np.inf, np.nan_to_num(error, nan=-1.0))
    worst = np.argpartition(rank, -WORST)[-WORST:] if rank.size > WORST else np.arange(rank.size)
    worst = worst[np.argsort(rank[worst])[::-1]]
    worst = worst[rank[worst] > 0]
    return Closely(
        int(ref.size),
        int(finite.size - moved.size),
        edges,
        counts,
        _scatter(sizes, finite),
        _quantiles(finite),
        _heat(error, len(shape), last),
        worst.astype(np.int64),
        (int((~np.isfinite(ref)).sum()), int((~np.isfinite(tgt)).sum())),
    )


def _odd(ref: Array, tgt: Array) -> npt.NDArray[np.bool_]:
    """Mask of elements that are not finite on some side and differ."""
    equal = (ref == tgt) | (np.isnan(ref) & np.isnan(tgt))
    out: npt.NDArray[np.bool_] = ~(np.isfinite(ref) & np.isfinite(tgt)) & ~equal
    return out


def _histogram(moved: F64) -> tuple[F64, npt.NDArray[np.int64]]:
    """Bins of a quarter decade each, over the range of the errors."""
    if not moved.size:
        return np.zeros(0), np.zeros(0, np.int64)
    logs = np.log10(moved)
    low, high = math.floor(float(logs.min())), math.ceil(float(logs.max()) + 1e-9)
    count = max(1, (high - low)) * _BINS_A_DECADE
    counts, edges = np.histogram(logs, bins=count, range=(low, max(high, low + 1)))
    return 10.0**edges, counts


def _scatter(sizes: F64, error: F64) -> F64:
    """(n, 2), n <= POINTS: evenly spaced elements, and those with the largest errors."""
    if error.size <= POINTS:
        return np.stack((sizes, error), 1)
    some = np.linspace(0, error.size - 1, POINTS * 4 // 5).astype(np.int64)
    top = np.argpartition(error, -POINTS // 5)[-POINTS // 5 :]
    positions = np.union1d(some, top)
    return np.stack((sizes[positions], error[positions]), 1)


def _quantiles(error: F64) -> F64:
    """(k, 2): quantiles of |N(0, 1)| and of |error|, denser towards the tail."""
    if error.size < 8:
        return np.zeros((0, 2))
    tail = np.geomspace(0.5 / error.size, 0.5, _QUANTILES // 2)
    share = np.unique(np.concatenate((np.linspace(0.02, 0.5, _QUANTILES // 2), 1 - tail)))
    normal = NormalDist()
    expected = [normal.inv_cdf((1 + float(p)) / 2) for p in share]
    return np.stack((expected, np.quantile(error, share)), 1)


def _heat(error: F64, dims: int, last: int) -> Heat | None:
    if dims < 2 or last < 2 or error.size < 2 * last:
        return None
    grid = error.reshape(-1, last)
    square, finite = np.nan_to_num(grid * grid), np.isfinite(grid).astype(np.float64)
    by_row, by_channel = square.sum(1), square.sum(0)
    for axis, largest in enumerate(_SIDE):
        size = -(-grid.shape[axis] // largest)
        starts = np.arange(0, grid.shape[axis], size)
        square, finite = (
            np.add.reduceat(square, starts, axis),
            np.add.reduceat(finite, starts, axis),
        )
    with np.errstate(invalid="ignore", divide="ignore"):
        return Heat(np.sqrt(square / finite), by_row, by_channel)


_HOLDS = 0.9

_LEAST = 8  # places; with fewer, a quarter of the axis is only one or two of them

_SHARE = 0.25


def concentrated(energy: npt.NDArray[np.float64]) -> tuple[int, int, float] | None:
    """(first, last, share) of the shortest range of places that holds 90 % of `energy`; None where
    that range is longer than a quarter of the axis.

    energy: 1-D, sums of squared errors by place, finite and not negative. share: of the total
    energy in the range, at least 0.9.
    """
    total = float(energy.sum())
    if energy.size < _LEAST or not total > 0 or not np.isfinite(total):
        return None
    sums = np.concatenate(((0.0,), np.cumsum(energy)))
    ends = np.searchsorted(sums, sums[:-1] + _HOLDS * total * (1 - 1e-12))
    lengths = np.where(ends < sums.size, ends - np.arange(energy.size), energy.size + 1)
    first = int(lengths.argmin())
    length = int(lengths[first])
    if length > _SHARE * energy.size:
        return None
    return first, first + length - 1, float(sums[first + length] - sums[first]) / total
