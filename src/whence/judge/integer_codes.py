"""Codes of 8 bits that were rounded from something: quantised activations and weights, pixels, as
integers or as floats. They differ in steps.

A value v that is off by d rounds to another code with probability |d|: so the mean distance of the
codes, in steps, is that of the values they were rounded from. One step is what rounding at a
boundary makes; several, at one place, it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.judge.error_growth import PairError
from whence.judge.limits import CODE_BOUNDARY, CODE_LEVELS, CODES_BY_CHANCE
from whence.results import Measured

_MEAN = 0.8  # mean of |x| over the root mean square of x, of a normal distribution


def may_be_codes(dtype: str) -> bool:
    """Is this a type that codes have? That of 8 bits without a mantissa has scales."""
    return dtype in ("int8", "uint8") or 2.0**-4 <= dtypes.unit_roundoff(dtype) <= 2.0**-3


def are_codes(dtype: str, measured: Measured) -> bool:
    """Are these elements codes? Masks, of two values, are none."""
    if not may_be_codes(dtype):
        return False
    if dtypes.is_floating(dtype):
        return True
    low, high = (measured.values.get(f"reference_{end}") for end in ("min", "max"))
    return low is not None and high is not None and high - low >= CODE_LEVELS


def error_of_codes(dtype: str, measured: Measured) -> PairError | None:
    """The error of the values that were rounded to codes, relative to their spread; None where it
    cannot be told. dtype: of the codes; the steps of floats grow with them, the widest counts.

    u: what a few codes at a boundary amount to, so that two of them are not growth. coarse: what
    the steps themselves amount to, for whoever reads the codes. lone: of an element that is off by
    several steps.
    """
    values = measured.values
    mean, rms, largest, spread = (
        values.get(k) for k in ("mean_abs_err", "rmse", "max_abs_err", "reference_std")
    )
    count = values.get("compared")
    ends = (values.get("reference_min"), values.get("reference_max"))
    if mean is None or rms is None or largest is None or not spread or not count:
        return None
    top = max((abs(end) for end in ends if end is not None), default=0.0)
    step = 2 * dtypes.unit_roundoff(dtype) * top or 1.0
    lone = (largest - step) / spread if largest >= 2 * step else 0.0
    return PairError(
        mean / (_MEAN * spread),
        u=CODES_BY_CHANCE * step / (_MEAN * spread * count),
        lone=lone,
        codes=True,
        coarse=rms / spread,
    )


def beyond_boundaries(output: Array, copies: Sequence[Array]) -> int:
    """How many codes are not explained by values that lie at the boundary between two codes.

    copies: the same computation in several precisions and with inputs a rounding apart. Where they
    differ a value lies at a boundary, and output may be any of them. As many others may be one step
    off: the copies are a few draws of many.
    """
    if dtypes.of(output).name not in ("int8", "uint8"):
        return int(
            np.count_nonzero(
                np.logical_and.reduce([output != c.astype(output.dtype) for c in copies])
            )
        )
    stacked = np.stack([c.astype(np.int64) for c in copies])
    low, high, y = stacked.min(0), stacked.max(0), output.astype(np.int64)
    off = np.maximum(np.maximum(low - y, y - high), 0)
    wrong = int(np.count_nonzero(off))
    return wrong if off.max(initial=0) > 1 or wrong > np.count_nonzero(low < high) else 0


def at_boundaries(values: Array, reference: Array, target: Array, u: float) -> bool:
    """Are these codes of the same values, one step apart at most, and apart only where a value lies
    at the boundary between two codes?

    values: what was rounded, of the codes' shape. u: its unit roundoff. All values at which one
    code is paired with a certain other are then one number, but for rounding; of codes that were
    cut off or scaled otherwise they fill a range.
    """
    if not values.shape == reference.shape == target.shape or not dtypes.of(values).is_floating:
        return False
    a, b = reference.astype(np.int64), target.astype(np.int64)
    differing = a != b
    if np.abs(a - b).max(initial=0) > 1:
        return False
    x, lower = values[differing].astype(np.float64), np.minimum(a, b)[differing]
    for code in np.unique(lower):
        boundary = x[lower == code]
        if not np.ptp(boundary) <= CODE_BOUNDARY * u * np.abs(boundary).max():
            return False
    return True
