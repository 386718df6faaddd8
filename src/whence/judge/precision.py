"""What printed text keeps of a tensor: its leading digits, and often only the elements at its
edges.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array, coarser
from whence.judge.limits import MASK_FILL
from whence.records import Record


def roundoff(reference: Record, target: Record) -> float:
    """Unit roundoff of a pair: that of the coarser dtype, or of the coarser print (half a last
    digit over the root mean square).

    0 when either dtype is an exact kind.
    """
    u = coarser(reference.dtype, target.dtype)
    return max(u, _of_print(reference), _of_print(target)) if u else 0.0


def _of_print(record: Record) -> float:
    figures = record.statistics
    if not record.quantum or figures is None or not figures.norm:
        return 0.0
    return record.quantum / 2 / (figures.norm / math.sqrt(figures.count))


def partly(reference: Record, target: Record) -> str:
    """What is missing of a pair of which only a part was printed, in words; "" when all of it is
    there.
    """
    printed = next((r for r in (reference, target) if r.whole), None)
    if printed is None:
        return ""
    if -1 in printed.whole:  # the text does not say how many there are
        return f"only the first {printed.count} elements were printed"
    return f"{printed.count} of {math.prod(printed.whole)} elements were printed"


def mask_fill(kind: dtypes.DType) -> float:
    """Magnitude from which on an element is the filling of a mask. Masks are filled with the
    smallest number of their dtype, which differs by dtype and swamps every norm. Floats of 8 bits
    are codes, and reach the ends of their range.
    """
    if kind.kind == "float" and kind.bits <= 8:
        return math.inf
    return MASK_FILL * (kind.max_finite or math.inf)


def filled_otherwise(reference: Array, target: Array) -> npt.NDArray[np.bool_]:
    """Which elements differ although rounding cannot: infinite on one side only, or the filling of
    a mask on both and another number, unless each is the lowest of its own dtype. Arrays of one
    shape, of floating dtypes that are not complex.
    """
    a, b = reference.astype(np.float64), target.astype(np.float64)
    are_lowest = (a == _lowest(reference)) & (b == _lowest(target))
    is_filling = is_mask_fill(reference) & is_mask_fill(target) & ~are_lowest
    differ: npt.NDArray[np.bool_] = (a != b) & (is_filling | np.isinf(a) | np.isinf(b))
    return differ


def _lowest(array: Array) -> float:
    """The lowest finite number of the array's dtype."""
    return -(dtypes.of(array).max_finite or math.inf)


def is_mask_fill(array: Array) -> npt.NDArray[np.bool_]:
    """Which elements are the filling of a mask, or infinite."""
    limit = mask_fill(dtypes.of(array))
    filled: npt.NDArray[np.bool_] = np.abs(array.astype(np.float64)) >= limit
    return filled
