"""Recognises differences that rounding cannot cause: one row, one channel, a constant factor, a
shift.

Rounding at one place changes everything that depends on it, each element by a different amount. One
factor or constant on everything, a channel that is far off among channels that agree, or elements
at another place each point to a single mistake.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.judge.limits import (
    COHERENT_EFFECT,
    COHERENT_ELEMENTS,
    COHERENT_REST,
    COHERENT_ROW,
    COHERENT_SLICES,
    PATTERN_CLOSER,
    PATTERN_EFFECT,
    PATTERN_ELEMENTS,
    PATTERN_ELEMENTS_ONE_NUMBER,
    PATTERN_FAR,
    PATTERN_FAR_SLICES,
    PATTERN_REST,
    PATTERN_SLICES,
    PATTERN_STRAY,
    PATTERN_VARIED,
)

# One factor or one constant between two 16-bit tensors: rounding never causes that.
#
# Rounding moves each number by at most half of the distance between its neighbours. So if the
# target is the reference times c, every element gives bounds for c, and all these intervals have a
# common point. If rounding moved the elements independently, already a handful of intervals have
# none. Where further rounding is added, the share of the difference that one number explains
# decides.
#
# A scalar stored in 16 bits is such a factor too, and a few in sequence make a larger one: effects
# up to `COHERENT_EFFECT` are not reported. For a single row the limit is `COHERENT_ROW`: a gate
# computed from that row carries more.

Flags = npt.NDArray[np.bool_]
_BITS = 16
_MOST = 1 << 23  # elements


class Coherence(NamedTuple):
    """words: the number and what it changes. effect: |factor - 1|, or the constant in units of the
    tensor's root mean square.
    """

    words: str
    effect: float


class _Kind(NamedTuple):
    """The bounds that each element sets to a factor or constant. neutral: the value that changes
    nothing. size: the unit of its effect.
    """

    low: F64
    high: F64
    neutral: float
    size: float

    @property
    def is_factor(self) -> bool:
        return self.neutral == 1.0

    def effect(self, number: float) -> float:
        return abs(number - self.neutral) / self.size

    def in_words(self, what: str, number: float, how: str) -> Coherence:
        change = f"multiplied by {number:.3g}" if self.is_factor else f"shifted by {number:+.3g}"
        return Coherence(f"{what} {change}{how}", self.effect(number))


def coherent(reference: Array, target: Array) -> Coherence | None:
    """The one factor or constant by which all elements of a pair differ, or all elements of some
    slices along an axis while the others differ by rounding alone; None for none.

    Only for real pairs of one shape, one side of 16 bits and the other of no fewer. Elements that
    are not finite, or zero on both sides, are ignored.
    """
    kinds = [dtypes.of(a) for a in (reference, target)]
    if (
        reference.shape != target.shape
        or not all(k.is_floating and k.kind != "complex" for k in kinds)
        or min(k.bits for k in kinds) != _BITS
    ):
        return None
    g, t = (_thinned(a).astype(np.float64) for a in (reference, target))
    looked_at = np.isfinite(g) & np.isfinite(t) & ((g != 0) | (t != 0))
    half_g, half_t = (
        np.where(looked_at, _half_step(x, k), 0.0) for x, k in zip((g, t), kinds, strict=True)
    )
    g, t = np.where(looked_at, g, 0.0), np.where(looked_at, t, 0.0)
    size = math.sqrt(float((g * g).mean())) if g.size else 0.0
    differing = np.abs(t - g) > half_g + half_t
    if not size or np.count_nonzero(differing) < COHERENT_ELEMENTS:
        return None
    for kind in (_factors(g, t, half_g, half_t), _constants(g, t, half_g, half_t, size)):
        coherence = _everywhere(g, t, kind, differing) or _in_slices(g, kind, differing)
        if coherence is not None:
            return coherence
    return None


def _thinned(array: Array) -> Array:
    """Every n-th row of a very large tensor, which is enough evidence."""
    if array.size <= _MOST or array.ndim < 2:
        return array
    rows: Array = array.reshape(-1, array.shape[-1])
    return rows[:: -(-array.size // _MOST)]


def _half_step(x: F64, kind: dtypes.DType) -> F64:
    """Half the distance between neighbouring numbers of a dtype, around x."""
    smallest_normal = -13 if kind.name == "float16" else -125  # as an exponent of frexp
    exponent = np.maximum(np.frexp(np.abs(x))[1], smallest_normal)
    half: F64 = np.ldexp(kind.unit_roundoff or 0.0, exponent - 1)
    return half


def _factors(g: F64, t: F64, half_g: F64, half_t: F64) -> _Kind:
    sign = np.where(g < 0, -1.0, 1.0)
    size, other = np.abs(g), t * sign
    with np.errstate(divide="ignore", invalid="ignore"):
        below, above = other - half_t, other + half_t
        low = below / np.where(below >= 0, size + half_g, size - half_g)
        high = above / np.where(above >= 0, size - half_g, size + half_g)
    is_known = size > half_g
    return _Kind(
        np.where(is_known, low, -np.inf),
        np.where(is_known, high, np.inf),
        1.0,
        1.0,
    )


def _constants(g: F64, t: F64, half_g: F64, half_t: F64, size: float) -> _Kind:
    room = half_g + half_t
    return _Kind(t - g - room, t - g + room, 0.0, size)


def _everywhere(g: F64, t: F64, kind: _Kind, differing: Flags) -> Coherence | None:
    """The number that explains all of the difference; None without one."""
    low, high = float(kind.low.max()), float(kind.high.min())
    rows = int(np.count_nonzero(differing.reshape(-1, g.shape[-1] if g.ndim else 1).any(1)))
    if not _has_enough(g, differing):
        return None
    if low <= high:
        number, is_exact = (low + high) / 2, True
    else:
        number, is_exact = _explains(g, t, kind), False
    least = COHERENT_EFFECT if rows > 1 else COHERENT_ROW if is_exact else math.inf
    if not kind.effect(number) >= least:
        return None
    return kind.in_words(
        "everything is", number, ", but for one rounding of each" if is_exact else ""
    )


def _explains(g: F64, t: F64, kind: _Kind) -> float:
    """The number fitted by least squares, if it explains nearly all of the difference; else NaN."""
    e = t - g
    by = g if kind.is_factor else np.ones_like(g)
    slope = float((e * by).sum() / (by * by).sum())
    remaining = float(np.linalg.norm(e - slope * by))
    return kind.neutral + slope if remaining <= COHERENT_REST * np.linalg.norm(e) else math.nan


def _in_slices(g: F64, kind: _Kind, differing: Flags) -> Coherence | None:
    """The number that changes some slices along an axis while the others differ by rounding alone;
    None without one.
    """
    rows = g.reshape(-1, g.shape[-1])
    views = [(g.shape, axis) for axis in reversed(range(g.ndim))]
    if g.ndim > 2:
        views.append((rows.shape, 0))
    for shape, axis in views:
        low, high, moved, values = (
            np.moveaxis(x.reshape(shape), axis, 0).reshape(shape[axis], -1)
            for x in (kind.low, kind.high, differing, g)
        )
        bad = (low.max(1) > kind.neutral) | (high.min(1) < kind.neutral)
        of = len(bad)
        # With few elements per slice, slices would be selected by their own rounding errors.
        if of < COHERENT_SLICES or low.shape[1] < COHERENT_ELEMENTS:
            continue
        if not 0 < np.count_nonzero(bad) <= of // 2:
            continue
        least, most = float(low[bad].max()), float(high[bad].min())
        number = (least + most) / 2
        is_one = least <= most and kind.effect(number) >= COHERENT_EFFECT
        if is_one and _has_enough(values[bad], moved[bad]):
            noun = "channel" if axis == len(shape) - 1 else "row"
            what = _places(noun, np.flatnonzero(bad), of)
            return kind.in_words(what, number, ", and the others by nothing but rounding")
    return None


def _has_enough(g: F64, differing: Flags) -> bool:
    """Whether enough elements with distinct values differ, and not one value many times."""
    return len(np.unique(g[differing])) >= COHERENT_ELEMENTS


def _places(noun: str, places: npt.NDArray[np.int64], of: int) -> str:
    if len(places) == 1:
        return f"{noun} {places[0]} of {of} is"
    consecutive = places[-1] - places[0] + 1 == len(places)
    words = f"{places[0]} to {places[-1]}" if consecutive else ", ".join(map(str, places[:4]))
    return f"{noun}s {words}{'' if consecutive or len(places) <= 4 else ', ...'} of {of} are"


F64 = npt.NDArray[np.float64]

MAX_SLICES, MAX_WORK = 1024, 1 << 28


@dataclass(frozen=True, slots=True)
class Sight:
    """What the elements of a pair show. typical: median over rows of their relative error. pattern:
    in words, "" for none. effect: of the one number that explains the difference in 16 bits, where
    that is the pattern (`judge.coherent`).
    """

    typical: float
    pattern: str = ""
    effect: float = 0.0


def sight(reference: Array, target: Array, u: float, room: float) -> Sight | None:
    """Look for patterns in a pair of one shape. u: its unit roundoff. room: the relative error that
    rounding may cause. None where nothing can be said.

    Rows that are far off or in another place count as patterns only in dtypes finer than 16 bits:
    in 16 bits, routing by near ties can cause them.
    """
    if (
        reference.shape != target.shape
        or not reference.size
        or any(dtypes.of(a).kind == "complex" for a in (reference, target))
    ):
        return None
    g, t = reference.astype(np.float64), target.astype(np.float64)
    finite = np.isfinite(g) & np.isfinite(t)
    g, t = np.where(finite, g, 0.0), np.where(finite, t, 0.0)
    with np.errstate(over="ignore"):
        size, error = float(np.linalg.norm(g)), float(np.linalg.norm(t - g))
    if not size or not error or not math.isfinite(size + error):
        return None
    typical = _typical(g, t)
    if (coherence := coherent(reference, target)) is not None:
        return Sight(typical, *coherence)
    pattern = _one_number(g, t, room) if g.size >= PATTERN_ELEMENTS_ONE_NUMBER else ""
    if not pattern and not dtypes.is_half_roundoff(u):
        pattern = _but_for_a_bias(g, t, room)
    if g.size >= PATTERN_ELEMENTS and not pattern:
        fine = not dtypes.is_half_roundoff(u)
        pattern = _moved(g, t, room, fine) or _slices(g, t, room, fine)
    return Sight(typical, pattern)


def _typical(g: F64, t: F64) -> float:
    rows, others = (x.reshape(-1, x.shape[-1] if x.ndim else 1) for x in (g, t))
    sizes = np.linalg.norm(rows, axis=1)
    floor = 0.1 * math.sqrt(float((sizes * sizes).mean()))
    return float(np.median(np.linalg.norm(others - rows, axis=1) / np.maximum(sizes, floor)))


def _one_number(g: F64, t: F64, room: float) -> str:
    """Describes one factor on everything, or one constant added; "" for neither."""
    mean, spread = float(g.mean()), float(g.std())
    if spread <= PATTERN_VARIED * abs(mean):
        return ""
    if pattern := _one_factor(g, t, room):
        return pattern
    e, size = t - g, float(np.linalg.norm(g))
    shift = float(np.median(e))
    alike = float(np.median(np.abs(e - shift))) <= PATTERN_STRAY * abs(shift)
    if shift and alike and _is_explained(g, e, e - shift, shift * math.sqrt(g.size) / size, room):
        return f"{shift:+.3g} is added to everything"
    return ""


def _one_factor(g: F64, t: F64, room: float) -> str:
    large = np.abs(g) >= max(float(np.median(np.abs(g))), 1e-300)
    if not large.any():
        return ""
    ratio = t[large] / g[large]
    factor = float(np.median(ratio))
    alike = float(np.median(np.abs(ratio - factor))) <= PATTERN_STRAY * abs(factor - 1)
    if factor != 1 and alike and _is_explained(g, t - g, t - factor * g, factor - 1, room):
        return f"everything is multiplied by {factor:.4g}"
    return ""


def _is_explained(g: F64, e: F64, remainder: F64, effect: float, room: float) -> bool:
    """Whether little of an error remains, and that is rounding or the effect is no rounding."""
    remaining = float(np.linalg.norm(remainder))
    return remaining <= PATTERN_REST * float(np.linalg.norm(e)) and (
        remaining <= room * float(np.linalg.norm(g)) or abs(effect) >= PATTERN_EFFECT
    )


def _but_for_a_bias(g: F64, t: F64, room: float) -> str:
    """Describes one factor on everything but a constant of each channel, as where a weight is wrong
    in front of a bias; "" for none.
    """
    for axis in dict.fromkeys((g.ndim - 1, min(1, g.ndim - 1))):
        around = tuple(k for k in range(g.ndim) if k != axis)
        if not around or g.size - g.shape[axis] < PATTERN_ELEMENTS_ONE_NUMBER:
            continue
        of_reference, of_target = (x - x.mean(around, keepdims=True) for x in (g, t))
        if pattern := _one_factor(of_reference, of_target, room):
            return f"{pattern}, but for a bias"
    return ""


def _slices(g: F64, t: F64, room: float, fine: bool) -> str:
    """Names a few channels or rows that are far off while the others are within rounding; "" for
    none.
    """
    for axis in reversed(range(g.ndim)):
        channel = axis == g.ndim - 1 or (axis == 1 and g.ndim == 4)
        count = g.shape[axis]
        if count < PATTERN_SLICES or not (channel or fine) or g.size // count < 4:
            continue
        around = tuple(k for k in range(g.ndim) if k != axis)
        power, error = (g * g).sum(around), ((t - g) ** 2).sum(around)
        relative = np.sqrt(error / np.maximum(power, power.mean()))
        bad = relative > PATTERN_FAR * room
        background = (
            math.sqrt(float(error[~bad].sum()) / max(float(power[~bad].sum()), 1e-300))
            if not bad.all()
            else math.inf
        )
        if bad.any() and bad.sum() <= PATTERN_FAR_SLICES * count and background <= room:
            return (
                f"{_named('channel' if channel else 'row', np.flatnonzero(bad))} of {count} "
                f"{'is' if bad.sum() == 1 else 'are'} far off"
            )
    return ""


def _moved(g: F64, t: F64, room: float, fine: bool) -> str:
    """Names channels or rows that stand in the place of others; "" for none."""
    size, error = float(np.linalg.norm(g)), float(np.linalg.norm(t - g))
    for axis in reversed(range(g.ndim)):
        count = g.shape[axis]
        each = g.size // count
        if not 2 <= count <= MAX_SLICES or each < PATTERN_SLICES or count * g.size > MAX_WORK:
            continue
        a, b = (np.moveaxis(x, axis, 0).reshape(count, -1) for x in (g, t))
        distance = np.maximum((b * b).sum(1)[:, None] + (a * a).sum(1) - 2 * b @ a.T, 0.0)
        in_place, nearest = np.diagonal(distance), distance.argmin(1)
        moved = distance[np.arange(count), nearest] < PATTERN_CLOSER**2 * in_place
        channel = axis == g.ndim - 1
        if not moved.any() or (not channel and not fine and 2 * moved.sum() < count):
            continue
        remaining = float(np.linalg.norm(b - a[np.where(moved, nearest, np.arange(count))]))
        if (
            remaining <= PATTERN_REST * error
            and remaining <= max(room, PATTERN_STRAY * error / size) * size
        ):
            words = _named("channel" if channel else "row", np.flatnonzero(moved))
            return (
                f"{words} of {count} {'stands' if moved.sum() == 1 else 'stand'} in the place "
                "of others"
            )
    return ""


def _named(noun: str, places: npt.NDArray[np.int64]) -> str:
    if len(places) == 1:
        return f"{noun} {places[0]}"
    return (
        f"{len(places)} {noun}s "
        f"({', '.join(map(str, places[:4]))}{', ...' if len(places) > 4 else ''})"
    )
