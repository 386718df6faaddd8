"""The band in which correct computations of the same numbers lie, and the place of a number in it.

The band is derived from computed results only: the exact result (the program in float64) and the
results of several correct ways of rounding (other kernels, other threads, every operator off by one
rounding). Without an exact result, the mean of the ways replaces it. A deviation estimated from n
ways follows Student's t with n degrees of freedom, so that few ways give a wider band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.judge import noise_model
from whence.judge.limits import FLOOR_SUM, LIMITS, U32

F64 = npt.NDArray[np.float64]
_OVERFLOWED = 0.01
"""Largest relative distance from the exact result of a right number where a way overflows."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of an array in a band. score: above 1, the array lies outside. z: distance of the
    worst element in standard deviations; limit_z: its limit; index: of that element. rho: 2-norm of
    the distance over that of the deviation; error: 2-norm of the distance from the centre.
    mismatches: number of elements that are NaN or infinite on one side only.
    """

    score: float
    z: float = 0.0
    limit_z: float = 0.0
    rho: float = 0.0
    index: tuple[int, ...] = ()
    error: float = 0.0
    mismatches: int = 0

    @property
    def is_inside(self) -> bool:
        """Whether rounding explains the distance."""
        return self.score <= 1


@dataclass(frozen=True)
class Band:
    """The range of results of correct computations. centre: the exact result or the mean of the
    ways; deviation: standard deviation of each element, > 0; degrees: degrees of freedom of the
    deviation. is_exact: whether the centre is the exact result. alike: whether elements of a row or
    column round alike, so that the deviation is estimated from all of them. ways: float64, (ways,
    *shape).
    """

    centre: F64
    deviation: F64
    degrees: int
    is_exact: bool
    alike: bool = False
    ways: F64 = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def limit_z(self) -> float:
        """The limit of z: the largest distance of any element of a correct array, in deviations."""
        if self.alike:
            return LIMITS.whole_z
        # the rate of false alarms, split over both sides and all elements
        alarms = noise_model.FALSE_ALARMS / (2 * max(self.centre.size, 1))
        score = NormalDist().inv_cdf(1 - alarms)
        return max(noise_model.student(score, self.degrees), LIMITS.whole)

    @property
    def halfwidth(self) -> F64:
        """The largest distance from the centre of each element of a correct array."""
        return self.limit_z * self.deviation

    def place(self, value: dtypes.Array, resolution: float = 0.0) -> Placed:
        """The place of an array, of the centre's shape, in the band. resolution: half a unit of the
        last printed digit, 0 for numbers that were not printed.
        """
        if value.shape != self.centre.shape:
            return Placed(math.inf, mismatches=self.centre.size)
        y = _wide(value)
        right = self._right_fill(y)
        fine = np.isfinite(y) & np.isfinite(self.centre)
        wrong = ~(fine | right)
        distance = np.where(fine & ~right, np.abs(y - np.where(fine, self.centre, 0.0)), 0.0)
        distance = np.maximum(distance - resolution, 0.0)
        z = distance / self.deviation
        error = _norm(distance)
        rho = error / _norm(np.where(fine, self.deviation, 0.0)) if fine.any() else 0.0
        place = int(np.argmax(wrong if wrong.any() else z)) if z.size else 0
        worst = float(z.max(initial=0.0))
        # the worst element relative to all others: if all are noisier, one may be too
        outlying = worst / max(1.0, rho) if self.alike else worst
        score = max(outlying / self.limit_z, rho / min(self.limit_z, self._limit_rho))
        return Placed(
            math.inf if wrong.any() else score,
            worst,
            self.limit_z,
            rho,
            tuple(int(i) for i in np.unravel_index(place, y.shape)) if z.size else (),
            error,
            int(np.count_nonzero(wrong)),
        )

    @property
    def _limit_rho(self) -> float:
        score = NormalDist().inv_cdf(1 - noise_model.FALSE_ALARMS / 2)
        return max(LIMITS.whole, noise_model.student(score, self.degrees))

    def _right_fill(self, y: F64) -> npt.NDArray[np.bool_]:
        """Boolean array, True for a NaN or infinity that the exact result or one of the ways has
        too, and for a right number where a way overflows.
        """
        right = _same_fill(y, self.centre)
        for way in self.ways:
            right |= _same_fill(y, way)
        overflowed = (
            ~np.isfinite(self.ways).all(axis=0) if len(self.ways) else np.zeros(y.shape, bool)
        )
        with np.errstate(invalid="ignore"):
            near = np.abs(y - self.centre) <= _OVERFLOWED * np.abs(self.centre)
        near &= np.isfinite(self.centre)
        out: npt.NDArray[np.bool_] = right | (overflowed & near)
        return out


def band(
    exact: dtypes.Array | None,
    ways: Sequence[dtypes.Array],
    unit_roundoff: float,
    *,
    smallest: float = 0.0,
    alike: bool = False,
) -> Band:
    """The band around an exact result (if not None) from several ways of rounding, all of one
    shape. unit_roundoff: of the dtype of the numbers. smallest: magnitude below which numbers may
    be flushed to zero. alike: see `Band`. Raises ValueError without an exact result if there are
    fewer than two ways.
    """
    rows = np.stack([_wide(way) for way in ways]) if ways else np.zeros((0, 0))
    if exact is None:
        if len(ways) < 2:
            raise ValueError("a band needs an exact result or two ways of rounding")
        with np.errstate(invalid="ignore"):
            centre = rows.mean(axis=0)
        degrees = len(ways) - 1
        # a further way differs from this mean by its own deviation and by that of the mean
        factor = math.sqrt((1 + 1 / len(ways)) * len(ways) / degrees)
    else:
        centre, degrees, factor = _wide(exact), max(len(ways), 1), 1.0
    if not len(rows):
        rows = np.zeros((0, *centre.shape))
    with np.errstate(invalid="ignore", over="ignore"):
        off = rows - centre
        off = np.where(np.isfinite(off), off, 0.0)
    square = (off * off).mean(axis=0) * factor**2 if len(off) else np.zeros(centre.shape)
    if alike:
        square = np.maximum(square, _of_rows_and_columns(square))
    size = np.where(np.isfinite(centre), np.abs(centre), 0.0)
    floor = unit_roundoff * (size if alike else size / 2) + smallest + 1e-300
    if alike and size.size:
        floor = floor + 1e-3 * unit_roundoff * _norm(size) / math.sqrt(size.size)
    deviation = np.sqrt(square) + floor
    # an element that is 0 in every way does not show how it rounds; those beside it do
    still = (square == 0) & (size == 0)
    if not alike and still.any() and not still.all():
        deviation = np.where(still, np.maximum(floor, np.median(deviation[~still])), deviation)
    return Band(centre, deviation, degrees, exact is not None, alike, rows)


def with_sums(band: Band, moved: F64, terms: int, dtype: str) -> Band:
    """The band, widened by the rounding of sums of `terms` terms in any order. moved: deviation of
    the exact result if every input is off by one rounding of the dtype that accumulates the sums.
    """
    accumulate = 2.0**-53 if dtype in ("float64", "complex128") else U32
    size = np.where(np.isfinite(band.centre), np.abs(band.centre), 0.0)
    added = FLOOR_SUM * math.sqrt(max(terms, 1)) * np.hypot(moved, accumulate * size)
    return Band(
        band.centre,
        np.hypot(band.deviation, added),
        band.degrees,
        band.is_exact,
        band.alike,
        band.ways,
    )


def _of_rows_and_columns(square: F64) -> F64:
    if square.size == 0:
        return square
    rows = square.reshape(-1, square.shape[-1] if square.ndim else 1)
    means = np.maximum(rows.mean(1, keepdims=True), rows.mean(0, keepdims=True))
    return np.broadcast_to(means, rows.shape).reshape(square.shape)


def _same_fill(a: F64, b: F64) -> npt.NDArray[np.bool_]:
    both: npt.NDArray[np.bool_] = (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (a == b))
    return both


def _wide(array: dtypes.Array) -> F64:
    if np.iscomplexobj(array):
        return np.stack([array.real, array.imag], axis=-1).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(array).astype(np.float64)


def _norm(x: F64) -> float:
    flat = x.reshape(-1)
    top = float(np.abs(flat).max(initial=0.0))
    return top * math.sqrt(float(np.einsum("i,i->", flat / top, flat / top))) if top > 0 else 0.0
