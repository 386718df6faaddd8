"""How far apart two tensors are: 0 if equal, 1.4 if unrelated. No verdict uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array

F64 = npt.NDArray[np.float64]

# `distance` up to which two tensors may be one: 8-bit quantised runs reach 0.07, unrelated tensors
# have 1.4
AGREES = 0.3
CLEARLY = 0.3  # the best candidate has at most this share of the second's distance
CLOSE = 0.1  # `typical_distance` that noise of any kernel, also one of 8 bits, keeps below
_SENTINEL = 1e30  # masks are filled with less than minus this
_RESEMBLES = 1 << 16  # elements looked at to tell whether two tensors are one
_TYPICAL = 1 << 13  # elements looked at for typical ones
_QUANTILES = (0.5, 0.9)


def distance(reference: Array, target: Array) -> float:
    """Relative 2-norm of the difference over what is finite in both, or the share of integers that
    differ; inf where shapes clash.

    Sentinels of masks count as not finite; inf where they, NaN or infinities are in other places.
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
    """How far apart two tensors of one shape are: |a - b| over |a|, at the median or the 90 %
    quantile of each, whichever is further.

    Unlike `distance`, a few giant elements do not decide, nor a fault in a few: where no name says
    which calls are paired, a tensor that a fault changed must still be the nearest. Where most
    elements are 0, 2-norms are taken instead. Of integers and bool: the share that differs. inf
    where most are not finite on one side. Over a regular sample where they are large.
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
    """Are these, element by element, one tensor but for an error? A sample is looked at."""
    if reference.shape != target.shape:
        return False
    step = max(reference.size // _RESEMBLES, 1)
    return distance(reference.reshape(-1)[::step], target.reshape(-1)[::step]) < AGREES


def clear_best(distances: Sequence[float]) -> int | None:
    """The candidate that agrees and is much nearer than others that differ from it; or None."""
    best = min(range(len(distances)), key=lambda i: distances[i])
    nearest = distances[best]
    others = [d for d in distances if not math.isclose(d, nearest, rel_tol=1e-6, abs_tol=1e-12)]
    return best if nearest < AGREES and nearest <= CLEARLY * min(others, default=math.inf) else None
