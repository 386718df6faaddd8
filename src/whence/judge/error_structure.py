"""Tests whether the difference to a replay in the same dtype has a structure. Rounding errors do
not depend on rows, channels or values; the error of a fault does.

d is the difference, r the wide replay, s the expected rounding error of each element. Every
statistic is an average of d / s, in which elements of all sizes count alike, with its standard
error. It comes with an effect relative to the tensor's size, since correct kernels are slightly
biased against each other.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from whence.dtypes import Array
from whence.judge.limits import STRUCTURE_BINS, STRUCTURE_CHANGED, STRUCTURE_ELEMENTS
from whence.judge.noise_model import normal_score

F64 = npt.NDArray[np.float64]
Ranges = npt.NDArray[np.intp]
_FEWEST_ROWS = 8
"""Number of rows or channels below which a spread between them means nothing."""
_FEWEST_IN_RANGE = 20
"""Number of elements in a range of values below which their average means nothing."""
_SAMPLE = 4096
"""Number of elements whose quantiles bound the ranges of values."""
_IN_CACHE = 1 << 14
"""Number of elements that are sorted into their ranges at once."""
_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure of d = output - working replay.

    slope, slope_error, clusters: one scale on all elements, its standard error between rows or
    between channels (whichever makes it less significant), and the number of these. row,
    row_effect: root mean square over rows of the z of the row's own scale (1 for noise), and of
    that scale. channel, channel_effect, channel_at: t of the most shifted channel over the rows,
    its shift, and its index. channel_rms: root mean square of that t over all channels, 1 for
    noise. rows, channels: their numbers. value, value_effect: z and shift of the most shifted of 24
    ranges of values. changed: number of elements that differ.
    """

    slope: float = 0.0
    slope_error: float = 0.0
    clusters: int = 0
    row: float = 0.0
    row_effect: float = 0.0
    channel: float = 0.0
    channel_effect: float = 0.0
    channel_at: int = -1
    channel_rms: float = 0.0
    rows: int = 0
    channels: int = 0
    value: float = 0.0
    value_effect: float = 0.0
    changed: int = 0

    @property
    def slope_z(self) -> float:
        """The slope in standard errors."""
        return abs(self.slope) / self.slope_error if self.slope_error > 0 else 0.0


class Basis:
    """r (1-D), the wide replay, in units of s (1-D, > 0), in rows of length `last`: what several
    differences are tested against, made once, for the first that is tested.
    """

    def __init__(self, r: F64, s: F64, last: int) -> None:
        self.r, self.s, self.last = r, s, last

    @functools.cached_property
    def parts(self) -> tuple[F64, F64, float, Ranges]:
        """r / s and its squares, in rows; the root mean square of r; `value_ranges(r)`."""
        x = (self.r / self.s).reshape(-1, self.last)
        return x, x * x, norm(self.r) / math.sqrt(self.r.size), value_ranges(self.r)


def structure(d: F64, basis: Basis) -> Structure:
    """Statistics of d (1-D), the difference to the working replay, against its basis."""
    changed, last = int(np.count_nonzero(d)), basis.last
    if d.size < STRUCTURE_ELEMENTS or changed <= STRUCTURE_CHANGED or last < 2 or d.size == last:
        return Structure(changed=changed)
    x, squares, rms, ranges = basis.parts
    power = float(squares.sum())
    if power == 0.0:
        return Structure(changed=changed)
    q = (d / basis.s).reshape(-1, last)
    product = q * x
    slope = float(product.sum()) / power
    residual = slope * squares
    slope_error, clusters = _clustered_error(
        np.subtract(product, residual, out=residual), slope, power
    )
    row, row_effect = _rows(product, squares)
    channel, channel_effect, place, channel_rms = _channels(q, d.reshape(-1, last), rms)
    value, value_effect = _by_value(q.reshape(-1), d, ranges, rms)
    return Structure(
        slope,
        slope_error,
        clusters,
        row,
        row_effect,
        channel,
        channel_effect,
        place,
        channel_rms,
        *q.shape,
        # Elements of a row that share a scale are not independent evidence about their values.
        value / max(1.0, row),
        value_effect,
        changed,
    )


def weaker(a: Structure, b: Structure) -> Structure:
    """For each statistic the less significant of two readings: a pattern counts only where both
    show it.
    """
    slope, row, channel, value = (
        min(a, b, key=operator.attrgetter(name)) for name in ("slope_z", "row", "channel", "value")
    )
    return Structure(
        slope.slope,
        slope.slope_error,
        slope.clusters,
        row.row,
        row.row_effect,
        channel.channel,
        channel.channel_effect,
        channel.channel_at,
        channel.channel_rms,
        channel.rows,
        channel.channels,
        value.value,
        value.value_effect,
        min(a.changed, b.changed),
    )


def beyond_own(structure: Structure, own: Structure, *, written_out: bool = False) -> Structure:
    """The structure in units of the patterns that the program's own rounding has (`own`, the
    structure of working - wide replay).

    A recurrence passes its rounding on from step to step, and nearly equal rows round alike. Their
    average then has the weight of fewer rows, by as much as `own` shows (an LSTM over 120 steps in
    float16: 5.9). Attention weights rounded to 16 bits no longer sum to one, so every row gets a
    scale of its own; code that rounds elsewhere gives other scales of the same size. Over n rows
    their ratio is below exp(3.1 / sqrt n) in 999 of 1000 cases (Fisher: half the logarithm of F(n,
    n) has the variance 1 / n). written_out: the replay rounds at more steps than the program does,
    so that the scales of its rows are not a measure.
    """
    memory = max(1.0, own.channel_rms)
    factor = math.exp(3.1 / math.sqrt(max(own.rows, 1)))
    is_own = structure.row <= factor * own.row and structure.row_effect <= factor * own.row_effect
    return replace(
        structure,
        channel=structure.channel / memory,
        value=structure.value / memory,
        row=0.0 if is_own and not written_out else structure.row,
    )


def norm(x: Array) -> float:
    """2-norm in float64 without BLAS, whose threads would spin for milliseconds on a busy
    machine.
    """
    wide = np.asarray(x, np.float64).reshape(-1)
    return math.sqrt(float(np.einsum("i,i->", wide, wide)))


def _clustered_error(residual: F64, slope: float, power: float) -> tuple[float, int]:
    """(standard error of a slope, number of clusters), with rows or channels as clusters, whichever
    makes the slope less significant: two rows may share a scale by chance.

    Source: Liang and Zeger (1986), the sandwich estimator. The residuals sum to zero, so the sums
    of the clusters are centred.
    """
    errors = []
    for axis in (0, 1):
        sums = residual.sum(axis)
        count = sums.size
        errors.append((norm(sums) * math.sqrt(count / (count - 1)) / power, count))
    return min(errors, key=lambda item: normal_score(slope / max(item[0], _TINY), item[1] - 1))


def _rows(product: F64, squares: F64) -> tuple[float, float]:
    """Root mean square over rows of the z of each row's own scale, and of that scale itself."""
    if product.shape[1] < _FEWEST_ROWS:
        return 0.0, 0.0
    weight = squares.sum(1)
    ok = weight > 0
    scale = product.sum(1)[ok] / weight[ok]
    spread = np.sqrt(np.einsum("ij,ij->i", product, product)[ok]) / weight[ok]
    moved = spread > 0
    if np.count_nonzero(moved) < 3:
        return 0.0, 0.0
    z = scale[moved] / spread[moved]
    return math.sqrt(float(np.minimum(z * z, 1e6).mean())), math.sqrt(float((scale * scale).mean()))


def _channels(q: F64, d: F64, rms: float) -> tuple[float, float, int, float]:
    """t of the most shifted channel, its shift over the tensor's root mean square, its index, and
    the root mean square of t over all channels.
    """
    n = q.shape[0]
    if n < _FEWEST_ROWS:
        return 0.0, 0.0, -1, 0.0
    common = float(np.einsum("ij,ij->", q, q)) / q.size
    t = np.abs(q.mean(0)) / _error(q.var(0, ddof=1), common, n)
    place = int(t.argmax())
    shift = abs(float(d[:, place].mean())) / rms
    return float(t[place]), shift, place, math.sqrt(float((t * t).mean()))


def _by_value(q: F64, d: F64, ranges: Ranges, rms: float) -> tuple[float, float]:
    if not ranges.size:
        return 0.0, 0.0
    counts = np.bincount(ranges, minlength=STRUCTURE_BINS)
    sums, squares = (np.bincount(ranges, x, STRUCTURE_BINS) for x in (q, q * q))
    known = counts >= _FEWEST_IN_RANGE
    n = np.where(known, counts, 2)
    mean = sums / n
    own = np.maximum(squares - n * mean * mean, 0.0) / (n - 1)
    z = np.where(known, np.abs(mean) / _error(own, float(squares.sum()) / q.size, n), 0.0)
    place = int(z.argmax())
    shift = abs(float(np.bincount(ranges, d, STRUCTURE_BINS)[place])) / n[place] / rms
    return float(z[place]), shift


def value_ranges(r: F64) -> Ranges:
    """For each element the index of its range of values, 0..23. The bounds are quantiles of a
    sample, so the ranges hold about equally many elements; equal values share a range. Empty where
    there are few elements.
    """
    if r.size < 40 * STRUCTURE_BINS:
        return np.empty(0, np.intp)
    sample = r
    if r.size > _SAMPLE:
        sample = r[np.random.default_rng(0).integers(r.size, size=_SAMPLE)]
    places = np.arange(1, STRUCTURE_BINS) * sample.size // STRUCTURE_BINS
    bounds, ranges = np.sort(sample)[places], np.empty(r.size, np.intp)
    for start in range(0, r.size, _IN_CACHE):
        part = r[start : start + _IN_CACHE]
        above, count = np.empty(part.size, np.bool_), np.zeros(part.size, np.uint8)
        for bound in bounds:
            count += np.greater(part, bound, out=above)
        ranges[start : start + _IN_CACHE] = count
    return ranges


def _error(own: F64, common: float, n: F64 | int) -> F64:
    """Standard errors of means of n elements with the variance `own`. The variance counts as at
    least half of that of all elements (`common`), because a group may be exact by chance.
    """
    variance = np.maximum(np.maximum(own, (own + common) / 2), _TINY)
    error: F64 = np.sqrt(variance / n)
    return error
