"""How well the values of a tensor would fit a floating-point format with fewer bits, with rounding
to nearest even.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array

_BLOCK = 1 << 16  # elements processed at once: in float64 they stay in the second-level cache


class FloatFormat(msgspec.Struct, frozen=True):
    """A format to try: a dtype's name, and whether values are scaled first so that the largest of
    the tensor becomes the largest finite number of the format (per-tensor scaling).
    """

    dtype: str
    is_scaled: bool = False

    @property
    def name(self) -> str:
        """ "float16", "float8_e4m3fn scaled"."""
        return f"{self.dtype} scaled" if self.is_scaled else self.dtype

    def overflows(self, magnitude: float) -> bool:
        """Whether a finite magnitude rounds past the format's largest number. In a scaled format
        none does.
        """
        return not self.is_scaled and magnitude >= _bounds(self.dtype).overflow


class Fit(msgspec.Struct, frozen=True, array_like=True):
    """Counts of finite elements of a tensor, rounded to nearest in a format.

    overflow: they round past the largest number of the format, to infinity, or to NaN or
    that number where the format has no infinity. zero: they are not
    zero and round to it. subnormal: they round to a subnormal number, which keeps fewer bits.
    """

    overflow: int
    zero: int
    subnormal: int

    def __add__(self, second: Fit) -> Fit:
        return Fit(
            self.overflow + second.overflow,
            self.zero + second.zero,
            self.subnormal + second.subnormal,
        )


class Extent(msgspec.Struct, frozen=True):
    """Magnitudes of a tensor's finite elements: the largest, the smallest that is not zero (0.0
    when there is none), how many are zero, and how many have the largest finite magnitude of the
    tensor's own dtype, where values that saturate gather. infinite: elements that are +-Inf.
    """

    largest: float
    smallest: float
    zeros: int
    saturated: int
    infinite: int


class _Bounds(msgspec.Struct, frozen=True):
    """Magnitudes at which rounding to a format changes its outcome. From `overflow` on the result
    is not finite; up to and including `zero` it is zero; below `normal` it is subnormal or zero.
    largest: the largest finite magnitude.
    """

    overflow: float
    largest: float
    normal: float
    zero: float


@functools.cache
def _bounds(dtype: str) -> _Bounds:
    info = ml_dtypes.finfo(dtypes.named(dtype).numpy)
    largest, tiny = float(info.max), float(info.smallest_subnormal)
    half_step = (largest - float(np.nextafter(info.max, info.dtype.type(0)))) / 2
    overflow = largest + half_step
    if (largest / (2 * half_step)) % 2 == 0:  # an even significand: the tie goes down
        overflow = float(np.nextafter(overflow, np.inf))
    return _Bounds(overflow, largest, float(info.smallest_normal) - tiny / 2, tiny / 2)


def extent(values: Array) -> Extent:
    """The extent of a tensor of any floating-point dtype and shape."""
    limit = dtypes.of(values).max_finite
    largest, smallest, zeros, saturated = 0.0, np.inf, 0, 0
    for magnitudes in _finite_magnitudes(values):
        nonzero = magnitudes[magnitudes > 0]
        zeros += magnitudes.size - nonzero.size
        if nonzero.size:
            largest = max(largest, float(nonzero.max()))
            smallest = min(smallest, float(nonzero.min()))
        if largest == limit:
            saturated += int(np.count_nonzero(magnitudes == limit))
    infinite = int(np.count_nonzero(np.isinf(values)))
    return Extent(largest, 0.0 if smallest == np.inf else smallest, zeros, saturated, infinite)


def fits(values: Array, formats: Sequence[FloatFormat], whole: Extent) -> list[Fit]:
    """How the finite elements of a tensor fit each of some formats.

    values: any floating-point dtype and shape. whole: their extent; a scaled format is scaled by
    its largest magnitude. The elements are compared, in float64, with the magnitudes at which
    rounding changes its outcome, so the counts are those of rounding every element.
    """
    limits = [_limits(form, whole.largest) for form in formats]
    counts = np.zeros((len(limits), 3), np.int64)
    for magnitudes in _finite_magnitudes(values):
        for row, limit in zip(counts, limits, strict=True):
            row += (
                np.count_nonzero(magnitudes >= limit.overflow),
                np.count_nonzero(magnitudes <= limit.zero),
                np.count_nonzero(magnitudes < limit.normal),
            )
    return [
        Fit(int(overflow), int(to_zero - whole.zeros), int(small - to_zero))
        for overflow, to_zero, small in counts
    ]


def _limits(form: FloatFormat, largest: float) -> _Bounds:
    """The bounds of a format, in units of the tensor before scaling."""
    bounds = _bounds(form.dtype)
    if not form.is_scaled:
        return bounds
    scale = largest / bounds.largest if largest else 1.0
    return _Bounds(math.inf, largest, bounds.normal * scale, bounds.zero * scale)


def _finite_magnitudes(values: Array) -> Iterator[npt.NDArray[np.float64]]:
    """Yields absolute values of the finite elements in float64, block by block."""
    flat = np.asarray(values).reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        magnitudes = np.abs(flat[start : start + _BLOCK].astype(np.float64))
        finite = np.isfinite(magnitudes)
        yield magnitudes if finite.all() else magnitudes[finite]
