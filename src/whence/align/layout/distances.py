"""Distances between two tensors, used to pair and lay out tensors: 0 if equal, 1.4 if unrelated. No
verdict uses them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array

F64 = npt.NDArray[np.float64]

# Largest `distance` at which two tensors may be the same tensor: 8-bit quantised runs reach 0.07,
# unrelated tensors have 1.4.
AGREES = 0.3
CLEARLY = 0.3  # the best candidate has at most this share of the second's distance
CLOSE = 0.1  # `typical_distance` that noise of any kernel, also one of 8 bits, keeps below
_SENTINEL = 1e30  # elements of masks lie below minus this
_RESEMBLES = 1 << 16  # elements looked at to tell whether two tensors are one
_TYPICAL = 1 << 13  # elements looked at for typical ones
_QUANTILES = (0.5, 0.9)


def distance(reference: Array, target: Array) -> float:
    """Relative 2-norm of the difference over the elements that are finite in both; for integers the
    share of elements that differ; inf for different shapes.

    Fill values of masks count as not finite. The result is inf where non-finite elements lie at
    different places: more than 1 % of all elements, or any while less than half of the elements are
    finite in both.
    """
    if reference.shape != target.shape:
        return math.inf
    if not reference.size:
        return 0.0
    if reference.dtype.kind in "iub" or target.dtype.kind in "iub":
        return float(np.mean(reference != target))
    a, b = (_widened(x) for x in (reference, target))
    with np.errstate(all="ignore"):
        usable = [np.isfinite(x) & (np.abs(x) < _SENTINEL) for x in (a, b)]
        fine = usable[0] & usable[1]
        if not fine.all():
            parted = np.count_nonzero(usable[0] != usable[1])
            if (
                not fine.any()
                or 100 * parted > fine.size
                or (parted and 2 * np.count_nonzero(fine) < fine.size)
            ):
                return math.inf
            a, b = a[fine], b[fine]
        size, difference = float(np.linalg.norm(a)), float(np.linalg.norm(b - a))
    return difference / size if size else (0.0 if not difference else math.inf)


def _widened(x: Array) -> np.ndarray[Any, np.dtype[Any]]:
    return x.reshape(-1).astype(np.complex128 if dtypes.of(x).kind == "complex" else np.float64)


def typical_distance(a: Array, b: Array) -> float:
    """Typical relative difference of two tensors of one shape: the median of |a - b| over the
    median of |a|, or the same at the 90 % quantile, whichever is larger.

    Unlike `distance`, it ignores a few giant elements and a fault in a few elements: where calls
    are paired without names, a tensor that a fault changed must still be the nearest. Where most
    elements are 0, 2-norms replace the quantiles. For integers and bool: the share of elements that
    differ. inf where most elements are not finite on one side. Large tensors are sampled regularly.
    """
    if a.size == 0:
        return 0.0
    x, y = (_sampled(v) for v in (a, b))
    if a.dtype.kind in "iub" or b.dtype.kind in "iub":
        return float(np.mean(x != y))
    finite = np.isfinite(x) & np.isfinite(y)
    if 2 * np.count_nonzero(finite) < x.size:
        return (
            0.0
            if np.array_equal(x[~finite], y[~finite], equal_nan=True) and finite.any()
            else math.inf
        )
    x, y = x[finite], y[finite]
    differences, size = np.abs(x - y), np.abs(x)
    positions = [int(q * (x.size - 1)) for q in _QUANTILES]
    middle, high = np.partition(size, positions)[positions]
    if middle > 0:
        off = np.partition(differences, positions)[positions]
        return float(max(off[0] / middle, off[1] / high))
    whole = float(np.linalg.norm(x))
    return (
        float(np.linalg.norm(differences)) / whole
        if whole
        else (0.0 if not differences.any() else math.inf)
    )


def _sampled(array: Array) -> F64:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.size > _TYPICAL:
        # A stride that shares no factor with usual extents meets every row and column.
        stride = flat.size // _TYPICAL
        flat = flat[:: stride + 1 - stride % 2]
    return np.abs(flat).astype(np.float64) if flat.dtype.kind == "c" else flat.astype(np.float64)


def resembles(reference: Array, target: Array) -> bool:
    """Whether two tensors are the same tensor up to an error, by `distance` over a sample of
    elements.
    """
    if reference.shape != target.shape:
        return False
    step = max(reference.size // _RESEMBLES, 1)
    return distance(reference.reshape(-1)[::step], target.reshape(-1)[::step]) < AGREES


def clear_best(distances: Sequence[float]) -> int | None:
    """The index of the candidate that agrees (distance < AGREES) and is much nearer than every
    candidate at another distance; None without one.
    """
    best = min(range(len(distances)), key=lambda i: distances[i])
    nearest = distances[best]
    others = [d for d in distances if not math.isclose(d, nearest, rel_tol=1e-6, abs_tol=1e-12)]
    return best if nearest < AGREES and nearest <= CLEARLY * min(others, default=math.inf) else None
