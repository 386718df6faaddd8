"""The band in which correct computations of the same numbers lie, and where a number lies in it.

The band comes from evidence alone: the exact result (the program in float64), and what the program
gives in several correct ways of rounding: other kernels, other threads, every operator off by one
rounding. Without an exact result the mean of the ways stands for it. A deviation that is known from
n ways follows Student's t with n degrees of freedom, so that few ways allow more.
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
"""Relative distance from the exact result up to which a number is right though a way overflows."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where an array lies in a band. score: over 1 is beyond it. z: deviations of the worst
    element, and limit_z what it may have; index: of that element. error: 2-norm of the distance
    from the centre. mismatches: elements that are NaN or infinite on one side alone.
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
        """Does rounding explain the distance?"""
        return self.score <= 1


@dataclass(frozen=True)
class Band:
    """What correct computations give. centre: the exact result or the mean of the ways; deviation:
    standard deviation of each element, > 0; degrees: ways that it is known from. is_exact: is the
    centre the exact result? alike: elements of a row or a column round alike, so that all of these
    tell the deviation. ways: as float64, (ways, *shape).
    """

    centre: F64
    deviation: F64
    degrees: int
    is_exact: bool
    alike: bool = False
    ways: F64 = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def limit_z(self) -> float:
        """Deviations that the worst element of a correct array stays below."""
        if self.alike:
            return LIMITS.whole_z
        # half a false alarm on each side, at any of so many elements
        alarms = noise_model.FALSE_ALARMS / (2 * max(self.centre.size, 1))
        score = NormalDist().inv_cdf(1 - alarms)
        return max(noise_model.student(score, self.degrees), LIMITS.whole)

    @property
    def halfwidth(self) -> F64:
        """How far an element of a correct array may be from the centre."""
        return self.limit_z * self.deviation

    def place(self, value: dtypes.Array, resolution: float = 0.0) -> Placed:
        """Where an array of the shape of the centre lies. resolution: half of the last digit that
        its numbers are printed with.
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
        # the worst element beside the others: where all are noisier, one may be too
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
        """Elements that are not an ordinary number where the exact result or one of the ways gives
        the same, and those that are right where a way overflows.
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
    """The band of an exact result, or None, and ways of rounding, all of one shape. unit_roundoff:
    of the dtype that the numbers are given in. smallest: magnitude below which numbers may be
    flushed to zero. Raises ValueError without an exact result and two ways.
    """
    rows = np.stack([_wide(way) for way in ways]) if ways else np.zeros((0, 0))
    if exact is None:
        if len(ways) < 2:
            raise ValueError("a band needs an exact result or two ways of rounding")
        with np.errstate(invalid="ignore"):
            centre = rows.mean(axis=0)
        degrees = len(ways) - 1
        # a further way strays from the mean of these by its own deviation and by that of the mean
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
    return Band(centre, np.sqrt(square) + floor, degrees, exact is not None, alike, rows)


def with_sums(band: Band, moved: F64, terms: int, dtype: str) -> Band:
    """The band with what sums of so many terms add in any order. moved: deviation of the exact
    result where every input is off by one rounding of the dtype that sums are made in.
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
