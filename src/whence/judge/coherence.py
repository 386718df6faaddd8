"""One factor or one constant between two tensors in 16 bits: what no rounding makes.

Rounding moves each number by at most half of the distance between its neighbours. So if the target
is the reference times c, every element says between which bounds c lies, and all of them have a
number in common; if rounding moved the elements each by itself, a handful have none. Where more
rounding lies on top, what counts is how much of the difference one number explains.

A scalar that was kept in 16 bits is such a factor too, and a few in a row make a larger one: up to
`COHERENT_EFFECT` nothing is said. Of one row alone neither, up to `COHERENT_ROW`: a gate that is
computed from its row carries more.
"""

from __future__ import annotations

import math
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
)

F64 = npt.NDArray[np.float64]
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
    """Bounds that every element sets to the number. neutral: the one that changes nothing; size:
    the unit of its effect.
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
    """The one factor or constant that all elements of a pair differ by, or all of some slices along
    an axis beside which the others differ by rounding alone; None for none.

    Pairs of one shape, real, one side of 16 bits and the other of no fewer; others have none. What
    is not finite, and what is zero on both sides, is not looked at.
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
    """Of very many elements every n-th row: these are evidence enough."""
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
    """Is one number behind all of the difference?"""
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
    """The number by least squares, where it explains nearly all of the difference; else NaN."""
    e = t - g
    by = g if kind.is_factor else np.ones_like(g)
    slope = float((e * by).sum() / (by * by).sum())
    remaining = float(np.linalg.norm(e - slope * by))
    return kind.neutral + slope if remaining <= COHERENT_REST * np.linalg.norm(e) else math.nan


def _in_slices(g: F64, kind: _Kind, differing: Flags) -> Coherence | None:
    """Does one number change some slices along an axis, and rounding alone the others?"""
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
        # Slices of few elements would be chosen by how these are off.
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
    """Are there enough elements that tell, not the same one many times?"""
    return len(np.unique(g[differing])) >= COHERENT_ELEMENTS


def _places(noun: str, places: npt.NDArray[np.int64], of: int) -> str:
    if len(places) == 1:
        return f"{noun} {places[0]} of {of} is"
    consecutive = places[-1] - places[0] + 1 == len(places)
    words = f"{places[0]} to {places[-1]}" if consecutive else ", ".join(map(str, places[:4]))
    return f"{noun}s {words}{'' if consecutive or len(places) <= 4 else ', ...'} of {of} are"
