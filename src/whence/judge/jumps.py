"""How near to a jump rounding may carry an argument across it: what `judge.ties` is for choices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from whence.judge.limits import FLOOR_SUM, LIMITS, U32

F64 = npt.NDArray[np.float64]


def reach(
    wide: F64, exact: Sequence[F64], drawn: Sequence[F64], size: F64, u: float, terms: int
) -> F64:
    """The distance from a jump up to which rounding may carry each argument across it.

    wide: the arguments in wide arithmetic. exact: in the target's working dtype on its own inputs;
    drawn: the same on inputs perturbed by one rounding. size: magnitude of the operands from which
    the arguments were computed. u: unit roundoff of the working dtype. terms: of the longest sum
    before. If the working dtype gives every argument exactly, the reach is 0: a correct run falls
    on the same side.
    """
    if all(np.array_equal(wide, array, equal_nan=True) for array in exact):
        return np.zeros_like(wide)
    square = np.zeros_like(wide)
    for array in (*exact, *drawn):
        with np.errstate(invalid="ignore"):
            square += np.nan_to_num(np.abs(array - wide), posinf=0.0) ** 2
    off = np.sqrt(square / (len(exact) + len(drawn)))
    last = wide.shape[-1] if wide.ndim > 1 else max(wide.size, 1)
    rows = off.reshape(-1, last)
    by_row = np.sqrt((rows * rows).mean(1, keepdims=True))
    noise = np.maximum(np.broadcast_to(by_row, rows.shape).reshape(wide.shape), off)
    size = np.where(np.isfinite(size), size, 0.0)
    sums = FLOOR_SUM * math.sqrt(terms) * max(u, U32) * float(np.median(size)) if terms > 1 else 0.0
    return np.asarray(LIMITS.flip * np.maximum(np.maximum(noise, u * size), sums))
