"""Checks quantised weights: the codes and scales that a target stores among its parameters, or that
were read off the values of a weight.

A weight w quantised with scale s and zero point z has the code rint(w/s) + z. Given w, the codes
bound each scale: s lies between w/(c - z + 1/2) and w/(c - z - 1/2) for every weight that shares
it. So a wrong scale can be told from wrong codes, and its size is known to within the width of that
interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.judge.error_structure import norm
from whence.judge.limits import (
    U32,
    WEIGHT_FEW_SCALES,
    WEIGHT_FREE_CODES,
    WEIGHT_RULE_AGREES,
    WEIGHT_SCALE_TOLERANCE,
)
from whence.judge.policy import Scheme
from whence.judge.stored_codes import F64, Bools, Stored
from whence.records.quantised import Grid

_SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4)


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of the check whether a stored weight is the reference's weight, quantised. sentence:
    what is wrong, "" if nothing. free: the codes are near, but often not the nearest.
    """

    sentence: str
    numbers: dict[str, float | None]
    free: bool = False


def check(reference: Array, stored: Stored, *, declared: Scheme | None = None) -> Checked:
    """Check that the codes are the reference's weight, quantised with the stored scales, to within
    half a step, and say which scale or code is not.

    declared: the scheme that was declared; codes of more bits, or scales for other parts of the
    weight, contradict it. Its rounding "free" allows codes up to 2.5 steps off. Without a scheme,
    weights with many codes that are not the nearest count as optimised (`free`).
    """
    contradiction = _contradiction(stored, declared) if declared is not None else ""
    if contradiction:
        return Checked(contradiction, {})
    w = np.asarray(reference, dtype=np.float64).reshape(stored.codes.shape)
    k = stored.codes - stored.zero if stored.zero.any() else stored.codes
    with np.errstate(divide="ignore", invalid="ignore"):
        t = w / stored.scale
    if not stored.scale.all():
        t = np.where(np.isfinite(t), t, np.where(w == 0, 0.0, np.inf))
    half = _half_steps(stored)
    off = np.abs(t - k)
    error = norm(off * stored.scale) if np.isfinite(off).all() else math.inf
    numbers: dict[str, float | None] = {"elements": 0.0, "of": float(w.size)}
    if 0 < error < math.inf:
        numbers["weight_sqnr_db"] = 20 * math.log10(norm(w) / error) if w.any() else None
    beyond, outward = _beyond(t, k, off, half, stored)
    count = int(np.count_nonzero(beyond))
    numbers["elements"] = float(count)
    lenient = declared is None or declared.rounding == "free"
    sentence = _against_rule(w, stored, k, numbers, lenient=lenient, beyond=count > 0)
    if not count or sentence:
        return Checked(sentence, numbers)
    sentence = _story(w, stored, k, half, beyond, outward, numbers)
    if sentence:
        return Checked(sentence, numbers)
    near = bool((off[beyond] <= 2.5).all())
    if declared is not None and declared.rounding == "free":
        return (
            Checked("", numbers, True)
            if near
            else Checked(_codes_said(w, t, stored, beyond, count), numbers)
        )
    if declared is None and near and count >= WEIGHT_FREE_CODES * w.size:
        return Checked("", numbers, True)
    return Checked(_codes_said(w, t, stored, beyond, count), numbers)


def _beyond(t: F64, k: F64, off: F64, half: F64 | float, stored: Stored) -> tuple[Bools, Bools]:
    """(codes further than half a step from their weight, codes at an end of their range whose
    weight lies outside it).
    """
    if bool((off <= half + 1e-3).all()):
        nowhere = np.zeros(off.shape, dtype=bool)
        return nowhere, nowhere
    tolerance = half + 1e-3 + 2 * stored.u * np.abs(np.where(np.isfinite(t), t, 0.0))
    low, high = stored.ends
    outward = ((stored.codes >= high) & (t > k)) | ((stored.codes <= low) & (t < k))
    if not stored.where:  # codes read off values: the ends are the extremes that occur
        axes = tuple(a for a in range(k.ndim) if stored.scale.shape[a] == 1)
        outward = ((k >= k.max(axes, keepdims=True)) & (t > k)) | (
            (k <= k.min(axes, keepdims=True)) & (t < k)
        )
    # Values are clipped at the ends, and rounding a zero point moves the range by up to one step.
    return off > np.where(outward, tolerance + 0.5, tolerance), outward


def _contradiction(stored: Stored, declared: Scheme) -> str:
    scheme = stored.scheme
    if scheme.format != declared.format:
        return f"is stored as {scheme}, declared is {declared}"
    if scheme.format == "int" and scheme.bits > declared.bits:
        return f"has codes of {scheme.bits} bits, declared are {declared.bits}"
    # A finer scheme with equal scales everywhere is the declared, coarser one.
    order = ("tensor", "channel", "group")
    if (scheme.per, scheme.axis, scheme.group) != (
        declared.per,
        declared.axis,
        declared.group,
    ) and (stored.where or order.index(scheme.per) >= order.index(declared.per)):
        # A single row, or one group per row, looks the same either way.
        if stored.scale.size == 1 or (
            declared.per == "group"
            and scheme.per == "channel"
            and stored.shape[-1] == declared.group
        ):
            return ""
        return (
            f"has scales per {str(scheme).partition('per ')[2]}, declared are scales per "
            f"{str(declared).partition('per ')[2]}"
        )
    if declared.symmetric and stored.where and stored.zero.any():
        return "has zero points, declared is a symmetric scheme"
    return ""


def _half_steps(stored: Stored) -> F64 | float:
    if stored.scheme.format == "int":
        return 0.5
    digits, least = (3, 2.0**-9) if stored.scheme.format == "e4m3" else (2, 2.0**-16)
    _, exponent = np.frexp(np.abs(stored.codes))
    spacing = np.where(
        stored.codes == 0, least, np.maximum(np.ldexp(1.0, exponent - 1 - digits), least)
    )
    out: F64 = 0.5 * spacing
    return out


def _against_rule(
    w: F64, stored: Stored, k: F64, numbers: dict[str, float | None], *, lenient: bool, beyond: bool
) -> str:
    """Names scales that deviate from the rule that the other scales and the codes follow; "" for
    none.

    A scale is nearly always max|w| over the largest code, or over half the number of steps. The
    codes show which rule was used, because they are made before anything can happen to the stored
    scale. lenient: scales that all deviate by different factors count as fitted, not wrong. beyond:
    whether some code is not the nearest; without one, only a few scales that deviate from the rule
    of the others can be wrong.
    """
    if stored.zero.any():
        return ""
    axes = tuple(a for a in range(w.ndim) if stored.scale.shape[a] == 1)
    largest = np.abs(w).max(axes, keepdims=True)
    high = float(1 << (stored.scheme.bits - 1))
    if stored.scheme.format == "int":
        tops: tuple[float, ...] = (high - 1, high - 0.5, high)
    else:
        tops = (stored.ends[1],)
    size = np.where(largest > 0, largest, 1.0)

    def strays(top: float) -> tuple[F64, Bools]:
        ratio: F64 = np.where(largest > 0, stored.scale * top / size, 1.0)
        return ratio, np.abs(ratio - 1) > WEIGHT_SCALE_TOLERANCE + 4 * stored.u

    if any(not strays(top)[1].any() for top in tops):
        return ""
    best, top = 0.0, 0.0
    for candidate in tops:
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(largest > 0, w * (candidate / largest), 0.0)
        expected = np.clip(np.rint(t), -high, high - 1) if stored.scheme.format == "int" else t
        share = float(
            np.mean(
                np.abs(expected - k)
                <= (_half_steps(stored) * 1.01 if stored.scheme.format != "int" else 0.5)
            )
        )
        if share > best:
            best, top = share, candidate
    if best < WEIGHT_RULE_AGREES:
        return ""
    ratio, off = strays(top)
    even = bool(off.any()) and float(np.ptp(ratio[off])) <= WEIGHT_SCALE_TOLERANCE + 8 * stored.u
    if not off.any() or (
        float(off.mean()) > WEIGHT_FEW_SCALES and (not beyond or (lenient and not even))
    ):
        return ""

    def fits(scale: F64) -> Bools:
        out: Bools = np.abs(scale * top / size - 1) <= WEIGHT_SCALE_TOLERANCE
        return out

    return _moved(stored, off, fits, numbers) or _times(stored, off, ratio[off], numbers)


def _moved(
    stored: Stored, wrong: Bools, fits: Callable[[F64], Bools], numbers: dict[str, float | None]
) -> str:
    """ "scales shifted by +1 channel" when scales moved back that far fit, else ""."""
    if stored.scale.size <= 2 or np.ptp(stored.scale) == 0:
        return ""
    many = int(np.count_nonzero(wrong))
    for axis in (a for a in range(wrong.ndim) if stored.scale.shape[a] > 2):
        for by in _SHIFTS:
            back = int(np.count_nonzero(wrong & fits(np.roll(stored.scale, -by, axis))))
            # The rows at the ends may have been filled differently.
            if back > max(2, 0.9 * many - abs(by)):
                noun = (
                    "group"
                    if stored.scheme.per == "group" and axis == wrong.ndim - 2
                    else "channel"
                )
                numbers["shift"] = float(by)
                plural = "s" if abs(by) > 1 else ""
                return (
                    f"scales shifted by {by:+d} {noun}{plural} ({many} of {wrong.size} are "
                    "not their own; moved back they are)"
                )
    return ""


def _times(stored: Stored, off: Bools, values: F64, numbers: dict[str, float | None]) -> str:
    """ "scale x1.02 in row 17", for scales that are `values` times what they should be."""
    middle = float(np.median(values))
    numbers["scale"] = middle
    even = (
        float(np.abs(values / middle - 1).max()) <= 0.25 * abs(middle - 1) + WEIGHT_SCALE_TOLERANCE
    )
    if not even:
        return (
            f"scales x{float(values.min()):.4g} to x{float(values.max()):.4g} of what they "
            f"should be in {_named(off, stored)}"
        )
    whole = int(np.count_nonzero(off)) >= 0.9 * off.size
    return f"scale x{middle:.4g} in {'the whole tensor' if whole else _named(off, stored)}"


def _story(
    w: F64,
    stored: Stored,
    k: F64,
    half: F64 | float,
    beyond: Bools,
    outward: Bools,
    numbers: dict[str, float | None],
) -> str:
    """Names a wrong scale or zero point in words; "" when the codes themselves differ."""
    axes = tuple(a for a in range(w.ndim) if stored.scale.shape[a] == 1)
    inside, outside = (
        np.abs(k) - half - 1e-3,
        np.abs(k) + np.where(outward, half + 1.0, half) + 1e-3,
    )
    size, agree = np.abs(w), (np.sign(w) * np.sign(k) > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = (size / outside).max(axes, keepdims=True)
        smallest = np.where(inside > 0, np.where(agree, size / inside, 0.0), np.inf).min(
            axes, keepdims=True
        )
    wrong: Bools = np.asarray(beyond.any(axes, keepdims=True))
    feasible = (least <= smallest * (1 + 1e-6)) & (smallest > 0) & np.isfinite(smallest)

    def fits(scale: F64) -> Bools:
        slack = WEIGHT_SCALE_TOLERANCE
        out: Bools = (scale >= least * (1 - slack)) & (scale <= smallest * (1 + slack))
        return out

    shifted = _moved(stored, wrong, fits, numbers)
    if shifted:
        return shifted
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = stored.scale / np.sqrt(least * np.where(np.isfinite(smallest), smallest, least))
    off = wrong & feasible & ~fits(stored.scale)
    if int(np.count_nonzero(off)) >= 0.9 * int(np.count_nonzero(wrong)):
        return _times(stored, off, ratio[off], numbers)
    with np.errstate(invalid="ignore"):
        shift = np.rint(
            np.nanmedian(
                np.where(stored.scale != 0, w / np.where(stored.scale == 0, 1.0, stored.scale), 0.0)
                - k,
                axes,
                keepdims=True,
            )
        )
    remaining = np.abs(
        w / np.where(stored.scale == 0, 1.0, stored.scale) - k - shift
    ) > half + 1e-3 + 2 * stored.u * np.abs(k)
    moved_by = wrong & (shift != 0) & ~((remaining & ~outward).any(axes, keepdims=True))
    if moved_by.any() and int(np.count_nonzero(moved_by)) >= 0.9 * int(np.count_nonzero(wrong)):
        by = float(np.median(shift[moved_by]))
        numbers["zero_point"] = by
        return f"zero point off by {by:+.0f} in {_named(moved_by, stored)}"
    return ""


def _named(marked: Bools, stored: Stored) -> str:
    """ "row 17", "rows 3, 5, 9 ... (12 of 64)", "row 3, group 1"."""
    places = np.argwhere(marked)
    if stored.scheme.per == "tensor" and marked.size == 1:
        return "the whole tensor"
    if stored.scheme.per == "group":
        inside = [int(i[-2]) for i in places]
        touched = list(dict.fromkeys(int(i[0]) for i in places))
        if len(places) == 1:
            return f"row {touched[0]}, group {inside[0]}"
        many = f"{len(places)} of {marked.size} groups"
        return (
            f"row {touched[0]} ({many})"
            if len(touched) == 1
            else f"rows {', '.join(map(str, touched[:4]))}{' ...' if len(touched) > 4 else ''} "
            f"({many})"
        )
    axis = stored.scheme.axis
    rows = [int(i[axis]) for i in places]
    noun = "row" if axis == 0 else "channel"
    if len(rows) == 1:
        return f"{noun} {rows[0]}"
    return (
        f"{noun}s {', '.join(map(str, rows[:4]))}{' ...' if len(rows) > 4 else ''} "
        f"({len(rows)} of {marked.size})"
    )


def _codes_said(w: F64, t: F64, stored: Stored, beyond: Bools, count: int) -> str:
    place = int(np.argmax(beyond))
    index = tuple(int(i) for i in np.unravel_index(place, stored.shape))
    expected = (t + stored.zero).reshape(-1)[place]
    return (
        f"{count} of {w.size} codes are not the reference's weight to within half a step; first "
        f"at {list(index)}: "
        f"code {stored.codes.reshape(-1)[place]:g} where the weight {w.reshape(-1)[place]:.6g} "
        f"is at {expected:.4g}"
    )


def looks_like(stored: Stored, checked: Checked) -> Scheme:
    """The scheme that a user would declare for a weight as it is stored."""
    return replace(stored.scheme, rounding="free" if checked.free else "nearest")


def checked_codes(
    reference: Array | None, grid: Grid, array: Callable[[int], Array], record: int
) -> tuple[str, Scheme]:
    """(what is wrong with the codes of a weight, "" when nothing is, their scheme). reference: the
    float weight, None where it is not known. array: returns the elements of a record.
    """
    codes = grid.codes(array(record))
    scale, zero = grid.steps(array, codes.ndim)
    if grid.packed is not None:
        scheme = Scheme(grid.packed.bits, "group", 0, grid.packed.block, grid.zero < 0)
    elif scale.size == 1:
        scheme = Scheme(dtypes.named(grid.dtype).bits, "tensor", symmetric=not zero.any())
    else:
        axis, bits = int(np.argmax(scale.shape)), dtypes.named(grid.dtype).bits
        scheme = Scheme(bits, "channel", axis, symmetric=not zero.any())
    if reference is None:
        return "", scheme
    if grid.packed is not None:  # behind the columns the bytes hold anything
        wide: Array = grid.packed.blocks(grid.packed.plain(codes))
        return _against(grid.placed(reference), wide, scale, zero, scheme), scheme
    return _against(grid.placed(reference), codes, scale, zero, scheme), scheme


def _against(reference: Array, codes: Array, scale: F64, zero: F64, scheme: Scheme) -> str:
    """Describes what is wrong with a weight; "" when nothing is."""
    rest = scale, zero, scheme
    stored = _stored(reference, codes, *rest)
    checked = check(reference, stored)
    if not checked.sentence:
        return ""
    for axis in range(codes.ndim):
        if scale.size < 2 or axis == scheme.axis or codes.shape[axis] != scale.size:
            continue
        shape = [1] * codes.ndim
        shape[axis] = scale.size
        turned = zero.reshape(shape) if zero.size > 1 else zero
        along = _stored(reference, codes, scale.reshape(shape), turned, scheme)
        if not check(reference, along).sentence:
            return f"the scales are taken along axis {scheme.axis}, and are those of axis {axis}"
    if scheme.bits == 4 and codes.shape[-1] % 2 == 0:
        swapped: Array = codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1].reshape(codes.shape)
        if not check(reference, _stored(reference, swapped, *rest)).sentence:
            return "the two codes of each byte are swapped"
    return checked.sentence


def _stored(reference: Array, codes: Array, scale: F64, zero: F64, scheme: Scheme) -> Stored:
    rank = codes.ndim
    s, z = (x.reshape((1,) * rank) if x.ndim != rank else x for x in (scale, zero))
    wide = codes.astype(np.float64)
    return Stored(reference.shape, wide, s, z, scheme, U32, ("codes",))
