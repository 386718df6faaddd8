"""Quantised weights as a target holds them: codes and scales found among its parameters, or read
off the values, and checked.

A weight w quantised with scale s and zero point z has the code rint(w/s) + z. Given w, the codes
bound each scale: s lies between w/(c - z + 1/2) and w/(c - z - 1/2) for every weight that shares
it. So a wrong scale is told from wrong codes, and its size is known to within the width of that
interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from whence.dtypes import Array
from whence.judge.limits import (
    WEIGHT_FEW_SCALES,
    WEIGHT_FREE_CODES,
    WEIGHT_RULE_AGREES,
    WEIGHT_SCALE_TOLERANCE,
)
from whence.judge.policy import Scheme
from whence.judge.stored_codes import F64, Bools, Stored, norm

_SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4)


@dataclass(frozen=True, slots=True)
class Checked:
    """Is a stored weight the reference's, quantised? sentence: "" when it is. free: codes are not
    the nearest, but near.
    """

    sentence: str
    numbers: dict[str, float | None]
    free: bool = False


def check(reference: Array, found: Stored, *, declared: Scheme | None = None) -> Checked:
    """Are the codes the reference's weight, quantised with these scales, to within half a step?
    Says which scale or code is not.

    declared: the scheme it should be; codes of more bits, or scales for other parts, contradict it.
    rounding "free" lets codes lie up to one step off. Without a scheme, codes that are often not
    the nearest count as optimised (`free`).
    """
    contradiction = _contradiction(found, declared) if declared is not None else ""
    if contradiction:
        return Checked(contradiction, {})
    w = np.asarray(reference, dtype=np.float64).reshape(found.codes.shape)
    k = found.codes - found.zero if found.zero.any() else found.codes
    with np.errstate(divide="ignore", invalid="ignore"):
        t = w / found.scale
    if not found.scale.all():
        t = np.where(np.isfinite(t), t, np.where(w == 0, 0.0, np.inf))
    half = _half_steps(found)
    off = np.abs(t - k)
    error = norm(off * found.scale) if np.isfinite(off).all() else math.inf
    numbers: dict[str, float | None] = {"elements": 0.0, "of": float(w.size)}
    if 0 < error < math.inf:
        numbers["weight_sqnr_db"] = 20 * math.log10(norm(w) / error) if w.any() else None
    beyond, outward = _beyond(t, k, off, half, found)
    count = int(np.count_nonzero(beyond))
    numbers["elements"] = float(count)
    lenient = declared is None or declared.rounding == "free"
    said = _against_rule(w, found, k, numbers, lenient=lenient, beyond=count > 0)
    if not count or said:
        return Checked(said, numbers)
    said = _story(w, found, k, half, beyond, outward, numbers)
    if said:
        return Checked(said, numbers)
    near = bool((off[beyond] <= 2.5).all())
    if declared is not None and declared.rounding == "free":
        return (
            Checked("", numbers, True)
            if near
            else Checked(_codes_said(w, t, found, beyond, count), numbers)
        )
    if declared is None and near and count >= WEIGHT_FREE_CODES * w.size:
        return Checked("", numbers, True)
    return Checked(_codes_said(w, t, found, beyond, count), numbers)


def _beyond(t: F64, k: F64, off: F64, half: F64 | float, found: Stored) -> tuple[Bools, Bools]:
    """(codes further than half a step from where the weight is, codes at an end whose weight lies
    outside).
    """
    if bool((off <= half + 1e-3).all()):
        nowhere = np.zeros(off.shape, dtype=bool)
        return nowhere, nowhere
    tolerance = half + 1e-3 + 2 * found.u * np.abs(np.where(np.isfinite(t), t, 0.0))
    low, high = found.ends
    outward = ((found.codes >= high) & (t > k)) | ((found.codes <= low) & (t < k))
    if not found.where:  # codes read off values: the ends are whatever was reached
        axes = tuple(a for a in range(k.ndim) if found.scale.shape[a] == 1)
        outward = ((k >= k.max(axes, keepdims=True)) & (t > k)) | (
            (k <= k.min(axes, keepdims=True)) & (t < k)
        )
    # The ends are where values are clipped: a zero point that was rounded moves the range by up to
    # one step.
    return off > np.where(outward, tolerance + 0.5, tolerance), outward


def _contradiction(found: Stored, declared: Scheme) -> str:
    mine = found.scheme
    if mine.format != declared.format:
        return f"is stored as {mine}, declared is {declared}"
    if mine.format == "int" and mine.bits > declared.bits:
        return f"has codes of {mine.bits} bits, declared are {declared.bits}"
    # Equal scales everywhere are a finer scheme's special case.
    order = ("tensor", "channel", "group")
    if (mine.per, mine.axis, mine.group) != (declared.per, declared.axis, declared.group) and (
        found.where or order.index(mine.per) >= order.index(declared.per)
    ):
        # A single row, or one group a row, looks alike either way.
        if found.scale.size == 1 or (
            declared.per == "group" and mine.per == "channel" and found.shape[-1] == declared.group
        ):
            return ""
        return (
            f"has scales per {str(mine).partition('per ')[2]}, declared are scales per "
            f"{str(declared).partition('per ')[2]}"
        )
    if declared.symmetric and found.where and found.zero.any():
        return "has zero points, declared is a symmetric scheme"
    return ""


def _half_steps(found: Stored) -> F64 | float:
    if found.scheme.format == "int":
        return 0.5
    digits, least = (3, 2.0**-9) if found.scheme.format == "e4m3" else (2, 2.0**-16)
    _, exponent = np.frexp(np.abs(found.codes))
    spacing = np.where(
        found.codes == 0, least, np.maximum(np.ldexp(1.0, exponent - 1 - digits), least)
    )
    out: F64 = 0.5 * spacing
    return out


def _against_rule(
    w: F64, found: Stored, k: F64, numbers: dict[str, float | None], *, lenient: bool, beyond: bool
) -> str:
    """Scales that are not what the largest weight gives, in words, where the codes say that it
    chose them; "" otherwise.

    A scale is nearly always max|w| over the largest code, or over half the number of steps. Which
    one shows in the codes, which are made before anything can happen to the scale. lenient: scales
    that are all somewhat off, each by another factor, were fitted. beyond: some code is not the
    nearest; if all are, only a few scales that leave the rule of the others can be wrong.
    """
    if found.zero.any():
        return ""
    axes = tuple(a for a in range(w.ndim) if found.scale.shape[a] == 1)
    most = np.abs(w).max(axes, keepdims=True)
    high = float(1 << (found.scheme.bits - 1))
    if found.scheme.format == "int":
        tops: tuple[float, ...] = (high - 1, high - 0.5, high)
    else:
        tops = (found.ends[1],)
    size = np.where(most > 0, most, 1.0)

    def strays(top: float) -> tuple[F64, Bools]:
        ratio: F64 = np.where(most > 0, found.scale * top / size, 1.0)
        return ratio, np.abs(ratio - 1) > WEIGHT_SCALE_TOLERANCE + 4 * found.u

    if any(not strays(top)[1].any() for top in tops):
        return ""
    best, top = 0.0, 0.0
    for candidate in tops:
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(most > 0, w * (candidate / most), 0.0)
        made = np.clip(np.rint(t), -high, high - 1) if found.scheme.format == "int" else t
        share = float(
            np.mean(
                np.abs(made - k)
                <= (_half_steps(found) * 1.01 if found.scheme.format != "int" else 0.5)
            )
        )
        if share > best:
            best, top = share, candidate
    if best < WEIGHT_RULE_AGREES:
        return ""
    ratio, off = strays(top)
    even = bool(off.any()) and float(np.ptp(ratio[off])) <= WEIGHT_SCALE_TOLERANCE + 8 * found.u
    if not off.any() or (
        float(off.mean()) > WEIGHT_FEW_SCALES and (not beyond or (lenient and not even))
    ):
        return ""

    def fits(scale: F64) -> Bools:
        out: Bools = np.abs(scale * top / size - 1) <= WEIGHT_SCALE_TOLERANCE
        return out

    return _moved(found, off, fits, numbers) or _times(found, off, ratio[off], numbers)


def _moved(
    found: Stored, wrong: Bools, fits: Callable[[F64], Bools], numbers: dict[str, float | None]
) -> str:
    """ "scales shifted by +1 channel" when scales moved back that far fit, else ""."""
    if found.scale.size <= 2 or np.ptp(found.scale) == 0:
        return ""
    many = int(np.count_nonzero(wrong))
    for axis in (a for a in range(wrong.ndim) if found.scale.shape[a] > 2):
        for by in _SHIFTS:
            back = int(np.count_nonzero(wrong & fits(np.roll(found.scale, -by, axis))))
            # The rows at the ends may have been filled in another way.
            if back > max(2, 0.9 * many - abs(by)):
                what = (
                    "group" if found.scheme.per == "group" and axis == wrong.ndim - 2 else "channel"
                )
                numbers["shift"] = float(by)
                plural = "s" if abs(by) > 1 else ""
                return (
                    f"scales shifted by {by:+d} {what}{plural} ({many} of {wrong.size} are "
                    "not their own; moved back they are)"
                )
    return ""


def _times(found: Stored, off: Bools, values: F64, numbers: dict[str, float | None]) -> str:
    """ "scale x1.02 in row 17", for scales that are `values` times what they should be."""
    middle = float(np.median(values))
    numbers["scale"] = middle
    even = (
        float(np.abs(values / middle - 1).max()) <= 0.25 * abs(middle - 1) + WEIGHT_SCALE_TOLERANCE
    )
    if not even:
        return (
            f"scales x{float(values.min()):.4g} to x{float(values.max()):.4g} of what they "
            f"should be in {_named(off, found)}"
        )
    whole = int(np.count_nonzero(off)) >= 0.9 * off.size
    return f"scale x{middle:.4g} in {'the whole tensor' if whole else _named(off, found)}"


def _story(
    w: F64,
    found: Stored,
    k: F64,
    half: F64 | float,
    beyond: Bools,
    outward: Bools,
    numbers: dict[str, float | None],
) -> str:
    """A wrong scale or zero point in words, "" when the codes themselves are what differs."""
    axes = tuple(a for a in range(w.ndim) if found.scale.shape[a] == 1)
    inside, outside = (
        np.abs(k) - half - 1e-3,
        np.abs(k) + np.where(outward, half + 1.0, half) + 1e-3,
    )
    size, agree = np.abs(w), (np.sign(w) * np.sign(k) > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = (size / outside).max(axes, keepdims=True)
        most = np.where(inside > 0, np.where(agree, size / inside, 0.0), np.inf).min(
            axes, keepdims=True
        )
    wrong: Bools = np.asarray(beyond.any(axes, keepdims=True))
    feasible = (least <= most * (1 + 1e-6)) & (most > 0) & np.isfinite(most)

    def fits(scale: F64) -> Bools:
        slack = WEIGHT_SCALE_TOLERANCE
        out: Bools = (scale >= least * (1 - slack)) & (scale <= most * (1 + slack))
        return out

    shifted = _moved(found, wrong, fits, numbers)
    if shifted:
        return shifted
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = found.scale / np.sqrt(least * np.where(np.isfinite(most), most, least))
    off = wrong & feasible & ~fits(found.scale)
    if int(np.count_nonzero(off)) >= 0.9 * int(np.count_nonzero(wrong)):
        return _times(found, off, ratio[off], numbers)
    with np.errstate(invalid="ignore"):
        shift = np.rint(
            np.nanmedian(
                np.where(found.scale != 0, w / np.where(found.scale == 0, 1.0, found.scale), 0.0)
                - k,
                axes,
                keepdims=True,
            )
        )
    still = np.abs(
        w / np.where(found.scale == 0, 1.0, found.scale) - k - shift
    ) > half + 1e-3 + 2 * found.u * np.abs(k)
    moved_by = wrong & (shift != 0) & ~((still & ~outward).any(axes, keepdims=True))
    if moved_by.any() and int(np.count_nonzero(moved_by)) >= 0.9 * int(np.count_nonzero(wrong)):
        by = float(np.median(shift[moved_by]))
        numbers["zero_point"] = by
        return f"zero point off by {by:+.0f} in {_named(moved_by, found)}"
    return ""


def _named(which: Bools, found: Stored) -> str:
    """ "row 17", "rows 3, 5, 9 ... (12 of 64)", "row 3, group 1"."""
    at = np.argwhere(which)
    if found.scheme.per == "tensor" and which.size == 1:
        return "the whole tensor"
    if found.scheme.per == "group":
        inside = [int(i[-2]) for i in at]
        touched = list(dict.fromkeys(int(i[0]) for i in at))
        if len(at) == 1:
            return f"row {touched[0]}, group {inside[0]}"
        many = f"{len(at)} of {which.size} groups"
        return (
            f"row {touched[0]} ({many})"
            if len(touched) == 1
            else f"rows {', '.join(map(str, touched[:4]))}{' ...' if len(touched) > 4 else ''} "
            f"({many})"
        )
    axis = found.scheme.axis
    rows = [int(i[axis]) for i in at]
    what = "row" if axis == 0 else "channel"
    if len(rows) == 1:
        return f"{what} {rows[0]}"
    return (
        f"{what}s {', '.join(map(str, rows[:4]))}{' ...' if len(rows) > 4 else ''} "
        f"({len(rows)} of {which.size})"
    )


def _codes_said(w: F64, t: F64, found: Stored, beyond: Bools, count: int) -> str:
    at = int(np.argmax(beyond))
    index = tuple(int(i) for i in np.unravel_index(at, found.shape))
    wanted = (t + found.zero).reshape(-1)[at]
    return (
        f"{count} of {w.size} codes are not the reference's weight to within half a step; first "
        f"at {list(index)}: "
        f"code {found.codes.reshape(-1)[at]:g} where the weight {w.reshape(-1)[at]:.6g} is at "
        f"{wanted:.4g}"
    )


def looks_like(found: Stored, checked: Checked) -> Scheme:
    """The scheme to declare for a weight as it was found."""
    return replace(found.scheme, rounding="free" if checked.free else "nearest")
