"""Results on a grid of codes, in steps of it: is each the code of the right number, and how many
numbers lie beyond the codes there are?
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from whence.dtypes import Array
from whence.judge.limits import (
    BIAS_SCALE_TOLERANCE,
    CODE_NEAREST,
    CODE_NEXT,
    CODES_BY_TABLES,
    CODES_NOT_NEAREST,
    U32,
)
from whence.records.quantised import F64


class Steps(NamedTuple):
    """How codes lie to the numbers that they stand for.

    most: steps by which the worst is off; a half is rounding. share: of codes that are not the
    nearest, 0 for a few, which lie between two. elements: how many. worst: index of the worst.
    """

    most: float
    share: float
    elements: int
    worst: tuple[int, ...]

    @property
    def score(self) -> float:
        """In units of what rounding explains: above 1 it does not."""
        return max(self.most / CODE_NEXT, self.share / CODES_NOT_NEAREST)

    @property
    def score_of_tables(self) -> float:
        """The same of a kernel that looks exponentials up by their codes."""
        return self.most / CODES_BY_TABLES


def steps(produced: Array, right: Array, scale: F64, zero: F64, ends: tuple[float, float]) -> Steps:
    """produced: on the grid. right: the numbers before they are rounded to it, of the same shape.
    ends: smallest and largest code.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        codes = np.rint(produced.astype(np.float64) / scale + zero)
        exact = np.clip(right.astype(np.float64) / scale + zero, *ends)
        off = np.abs(codes - exact)
    off = np.where(np.isfinite(off), off, math.inf)
    if not off.size:
        return Steps(0.0, 0.0, 0, ())
    # a correct kernel adds in float32 what may be many steps
    tolerance = CODE_NEAREST + 64 * U32 * np.abs(exact)
    count = int(np.count_nonzero(off > tolerance))
    worst = np.unravel_index(int(np.argmax(off)), off.shape)
    share = count / off.size if count > 3 else 0.0
    return Steps(float(off.max()), share, count, tuple(int(k) for k in worst))


class Reach(NamedTuple):
    """What of a tensor its grid can hold. saturated: share of numbers more than half a step beyond
    the largest and the smallest that there is. used: the largest magnitude over the largest that
    there is.
    """

    saturated: float
    used: float


def reach(right: Array, scale: F64, zero: F64, ends: tuple[float, float]) -> Reach:
    """right: the numbers that are rounded to the grid."""
    values = right.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = values / scale + zero
    beyond = (codes > ends[1] + 0.5) | (codes < ends[0] - 0.5)
    low, high = ((end - zero) * scale for end in ends)
    largest = float(np.max(np.maximum(np.abs(low), np.abs(high)), initial=0.0))
    top = float(np.abs(values).max(initial=0.0))
    share = float(beyond.mean()) if beyond.size else 0.0
    return Reach(share, top / largest if largest else math.inf)


def bias_sentence(
    reference: Array | None, codes: Array, scale: F64, zero: F64, expected: F64 | None
) -> str:
    """What is wrong with a bias that is stored as codes, "" when nothing is.

    reference: the float bias, None where it is not known. scale: of the codes. expected: the scale
    of the input times that of the weight, by which sums of products are added to it.
    """
    if expected is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.broadcast_to(
                scale / expected, np.broadcast_shapes(scale.shape, expected.shape)
            )
        off = np.abs(ratio - 1) > BIAS_SCALE_TOLERANCE
        if off.any():
            worst = float(ratio.reshape(-1)[int(np.argmax(np.abs(ratio - 1)))])
            many = f" in {int(off.sum())} of {off.size} channels" if off.size > 1 else ""
            return (
                f"the scale of the bias is {worst:.4g} times the scale of the input times that of "
                f"the weight{many}: engines add its codes to sums of that scale"
            )
    if reference is None or reference.size != codes.size:
        return ""
    right = reference.astype(np.float64).reshape(codes.shape)
    values = (codes.astype(np.float64) - zero) * scale
    limit = (0.5 + 1e-3) * np.abs(scale) + 8 * U32 * np.abs(right)
    wrong = np.abs(values - right) > limit
    if not wrong.any():
        return ""
    size = float(right[wrong] @ right[wrong])
    factor = float(values[wrong] @ right[wrong]) / size if size else math.inf
    place = int(np.argmax(np.abs(values - right)))
    evenly = (
        np.abs(values - factor * right)[wrong] <= 4 * np.broadcast_to(limit, right.shape)[wrong]
    )
    if wrong.sum() > 1 and evenly.all():
        return f"the bias is {factor:.4g} times the reference's"
    return (
        f"{int(wrong.sum())} of {right.size} elements of the bias are not the reference's to "
        f"within half a step: [{place}] is {values.reshape(-1)[place]:.6g}, not "
        f"{right.reshape(-1)[place]:.6g}"
    )
