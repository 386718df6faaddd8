"""Rounds activations as kernels of quantised models do: in blocks along the last axis, each with
one scale.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from whence.dtypes import Array
from whence.judge.limits import CODES_EXPLAINED, CODES_OUTLYING_ROW

F64 = npt.NDArray[np.float64]

BLOCKS = {
    "activations of 8 bits in blocks of 32": 32,  # ggml: Q8_0 and Q8_1
    "activations of 8 bits in blocks of 256": 256,  # ggml: Q8_K
    "activations of 8 bits by row": 0,  # dynamic int8
}
"""Candidates in words, and how many elements share a scale; 0 for a whole row."""

_TOP = 127
_LEAST = 1e-36  # below this the factor 127 / maximum would overflow; the block is then zeros
_FLOAT16 = 65520.0  # above this float16 has no finite number


def in_blocks(array: Array, *, width: int) -> Array:
    """The values that 8-bit codes in blocks of `width` stand for; unchanged where the last axis is
    not a multiple of `width`.

    array: real floating. A block's scale is its largest magnitude / 127; codes are rounded to the
    nearest. For blocks of 32 the scale is stored in float16, as ggml does (the codes are computed
    with the exact scale). Source: ggml-quants.c, quantize_row_q8_0_ref. A block with an element or
    a stored scale that is not finite has no codes: all of it is NaN.
    """
    last = array.shape[-1] if array.ndim else 0
    width = width or last
    if not last or last % width or array.dtype.kind in "iubc":
        return array
    # In float32, as the kernels do: the code of a value near the middle between two codes depends
    # on the last bit.
    blocks = array.astype(np.float32).reshape(-1, width)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    coded = largest / np.float32(_TOP) < (_FLOAT16 if width == 32 else np.inf)
    largest = np.where(coded, largest, np.float32(0))
    times = np.divide(np.float32(_TOP), largest, out=np.zeros_like(largest), where=largest > _LEAST)
    scale = largest / np.float32(_TOP)
    stored_scale = scale.astype(np.float16) if width == 32 else scale
    codes = np.rint(np.where(coded, blocks, np.float32(0)) * times)
    dequantised = np.where(
        coded, codes.astype(np.float64) * stored_scale.astype(np.float64), np.nan
    )
    out: Array = dequantised.astype(array.dtype).reshape(array.shape)
    return out


def by_row(output: Array, right: Array) -> F64:
    """Relative 2-norm of output - right for every vector along the last axis; both of one shape.
    inf for a row that is not finite.
    """
    y, r = (x.astype(np.float64).reshape(-1, x.shape[-1] if x.ndim else 1) for x in (output, right))
    finite: npt.NDArray[np.bool_] = np.isfinite(np.concatenate([y, r], axis=1)).all(axis=1)
    y, r = y[finite], r[finite]
    size, error = np.linalg.norm(r, axis=1), np.linalg.norm(y - r, axis=1)
    out = np.full(len(finite), np.inf)
    out[finite] = np.divide(error, size, out=np.where(error > 0, np.inf, 0.0), where=size > 0)
    return out


def typical(errors: F64) -> float:
    """Root mean square of the errors."""
    return float(np.sqrt(np.mean(errors**2)))


def gain(plain: F64, coded: F64) -> float:
    """The factor by which the root mean square of the rows' errors falls; 0 where one row stays
    several times further off than rows were before. plain, coded: relative errors by row, without
    and with coarser codes.

    All rows count alike, so one row of giant activations does not stand for the others. Coarser
    codes do not explain a fault in a single row.
    """
    if not coded.size or not np.isfinite(coded).all():
        return 0.0
    usual, remaining = typical(plain), typical(coded)
    if float(coded.max()) > CODES_OUTLYING_ROW * usual:
        return 0.0
    ratio = usual / remaining if remaining else np.inf
    return ratio if float(coded.max()) <= usual else min(ratio, CODES_EXPLAINED / 2)
