"""Recognises differences that rounding cannot make: one row, one channel, a constant factor, a
shift.

Rounding at one place reaches all that depends on it, each element by another amount. One factor or
one constant on everything, a channel that is far off among channels that agree, elements that stand
in another place: each of these is one mistake.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.judge.coherence import coherent
from whence.judge.limits import (
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

F64 = npt.NDArray[np.float64]

MAX_SLICES, MAX_WORK = 1024, 1 << 28


@dataclass(frozen=True, slots=True)
class Sight:
    """What the elements of a pair show. typical: the median over rows of their relative error.
    pattern: in words, "" for none; effect: of one number that explains the difference in 16 bits,
    which then is the pattern (`judge.coherent`).
    """

    typical: float
    pattern: str = ""
    effect: float = 0.0


def sight(reference: Array, target: Array, u: float, room: float) -> Sight | None:
    """Look at a pair of one shape. u: its unit roundoff; room: the relative error that rounding may
    make. None where nothing can be said.

    Rows that are far off, and rows in another place, are patterns only where routing by near ties
    is no reason: not in 16 bits.
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
    size, error = float(np.linalg.norm(g)), float(np.linalg.norm(t - g))
    if not size or not error:
        return None
    typical = _typical(g, t)
    if (coherence := coherent(reference, target)) is not None:
        return Sight(typical, *coherence)
    pattern = _one_number(g, t, room) if g.size >= PATTERN_ELEMENTS_ONE_NUMBER else ""
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
    """One factor on everything, or one constant added."""
    mean, spread = float(g.mean()), float(g.std())
    if spread <= PATTERN_VARIED * abs(mean):
        return ""
    e, size = t - g, float(np.linalg.norm(g))
    error = float(np.linalg.norm(e))

    def explains(remainder: F64, effect: float) -> bool:
        remaining = float(np.linalg.norm(remainder))
        return remaining <= PATTERN_REST * error and (
            remaining <= room * size or abs(effect) >= PATTERN_EFFECT
        )

    large = np.abs(g) >= max(float(np.median(np.abs(g))), 1e-300)
    ratio = t[large] / g[large]
    factor = float(np.median(ratio))
    alike = float(np.median(np.abs(ratio - factor))) <= PATTERN_STRAY * abs(factor - 1)
    if factor != 1 and alike and explains(t - factor * g, factor - 1):
        return f"everything is multiplied by {factor:.4g}"
    shift = float(np.median(e))
    alike = float(np.median(np.abs(e - shift))) <= PATTERN_STRAY * abs(shift)
    if shift and alike and explains(e - shift, shift * math.sqrt(g.size) / size):
        return f"{shift:+.3g} is added to everything"
    return ""


def _slices(g: F64, t: F64, room: float, fine: bool) -> str:
    """A few channels or rows far off, the others within what rounding makes."""
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
    """Channels or rows that stand in another place."""
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
