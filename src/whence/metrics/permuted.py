"""Checks whether two tensors hold the same values in another order. Then the difference is one of
layout (a transpose, a reordered batch), not of accuracy.
"""

from __future__ import annotations

import numpy as np

from whence import _kernels, dtypes
from whence.dtypes import Array
from whence.metrics.accumulators import Accumulators, F, I
from whence.metrics.numpy_pass import CHUNK, flat

_CODE_OF_WIDTH = {1: 6, 2: 11, 4: 13, 8: 9}


def candidates(a: Accumulators) -> list[int]:
    """Rows of pairs whose statistics agree although the elements do not: they deserve a check."""
    f, i = a.floats, a.ints
    different = (
        (i[:, I["values_differ"]] > 0)
        | (i[:, I["inf_mismatch"]] > 0)
        | (i[:, I["nan_mismatch"]] > 0)
    )
    if not different.any():
        return []
    for candidates, right in (("r_finite", "t_finite"), ("r_nan", "t_nan"), ("r_inf", "t_inf")):
        different &= i[:, I[candidates]] == i[:, I[right]]
    extremes = (f[:, F["r_min"]] == f[:, F["t_min"]]) & (f[:, F["r_max"]] == f[:, F["t_max"]])
    different &= extremes | ~a.signed  # complex sides have magnitudes as extremes
    with np.errstate(invalid="ignore"):
        different &= ~(np.abs(f[:, F["r_sq"]] - f[:, F["t_sq"]]) > 1e-9 * f[:, F["r_sq"]])
    return [int(k) for k in np.flatnonzero(different)]


def is_permutation(reference: Array, target: Array) -> bool:
    """Whether both tensors hold the same multiset of elements. Compares checksums of the mixed
    bits, or of float64 values when the dtypes differ.

    The answer is wrong with a probability of 2^-64.
    """
    common: type[np.float64] | type[np.complex128] | None = None
    if dtypes.of(reference) is not dtypes.of(target):
        common = np.complex128 if "c" in (reference.dtype.kind, target.dtype.kind) else np.float64
    return _checksum(reference, common) == _checksum(target, common)


def _checksum(array: Array, common: type[np.float64] | type[np.complex128] | None) -> int:
    compiled, total = _kernels.compiled, 0
    for start in range(0, array.size, 4 * CHUNK):
        part = flat(array, start, start + 4 * CHUNK)
        if common is not None:  # + 0 makes -0 into 0; integers beyond 2^53 are rounded
            with np.errstate(invalid="ignore"):  # a signalling NaN
                part = part.astype(common) + 0.0
        part = np.ascontiguousarray(part)
        code = _CODE_OF_WIDTH.get(part.itemsize)
        if compiled is not None and code is not None:
            total += compiled.describe(part.__array_interface__["data"][0], part.size, code, 0)[12]
        else:
            total += _kernels.checksum(part.view(np.uint8), part.itemsize)
    return total % (1 << 64)
