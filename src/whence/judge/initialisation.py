"""Recognises a parameter that still has its default initialisation: the checkpoint was not loaded.

Only where the reference does not look so itself: two models that were never trained say nothing.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.judge.limits import U32

F64 = npt.NDArray[np.float64]
_LEAST = 64  # elements that a statement about a distribution needs
_LEAST_NORMAL = 1024  # a normal one has no edge that would tell its width
_MOST = 1 << 16  # elements that are looked at
_NEAR = 1.63  # Kolmogorov-Smirnov, D sqrt(n): reached by chance once in 100 samples
_FAR = 3.0  # ... once in ten million
_UNRELATED = 4.0  # standard deviations of a correlation of independent numbers


def unlike(reference: Array, target: Array) -> str:
    """What the target's parameter holds in place of the reference's, in words, with the statistic
    that says so; "" where nothing does. Both of one shape; elements differ.
    """
    if not (dtypes.of(reference).is_floating and dtypes.of(target).is_floating):
        return ""
    a, b = (x.astype(np.float64).reshape(-1) for x in (reference, target))
    if a.size < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return ""
    if b.min() == b.max() and a.min() != a.max():
        if b[0] not in (0.0, 1.0):
            return ""
        # a parameter of zeros has a sentence of its own
        value = "all ones" if b[0] else "that"
        return f"{value} is what a layer is made with: not loaded?"
    if a.size < _LEAST or a.min() == a.max():
        return ""
    related = float(np.corrcoef(a, b)[0, 1])
    if not abs(related) * math.sqrt(a.size) < _UNRELATED:
        return ""
    words = f"nothing in common with the reference's (correlation {related:.1g})"
    made = _as_made(target.shape, b, dtypes.of(target))
    if not made or _as_made(reference.shape, a, dtypes.of(reference), _FAR):
        return words
    return f"{words}, and {made}, as a layer is made: not loaded?"


def _as_made(shape: tuple[int, ...], values: F64, kind: dtypes.DType, far: float = _NEAR) -> str:
    """The distribution of a framework's initialisation that values may be drawn from, in words; ""
    for none. far: how far from it, as D sqrt(n).
    """
    if len(shape) < 2:
        return ""
    field = math.prod(shape[2:])
    fan_in, fan_out = shape[1] * field, shape[0] * field
    sample = np.sort(values[:: max(1, values.size // _MOST)])
    room = 2 * max(kind.unit_roundoff or U32, U32)
    for bound, words in (
        (1 / math.sqrt(fan_in), "1/sqrt(fan in)"),
        (math.sqrt(6 / (fan_in + fan_out)), "sqrt(6/(fan in + fan out))"),
        (math.sqrt(6 / fan_in), "sqrt(6/fan in)"),
    ):
        largest = float(np.abs(values).max())
        # The largest of n numbers is that far below the bound once in e^20 samples.
        reaches = bound * (1 - 20 / values.size) <= largest <= bound * (1 + room)
        if reaches and _distance(sample, (sample / bound + 1) / 2) < far:
            return f"uniform up to {bound:.3g} = {words}"
    if values.size < _LEAST_NORMAL:
        return ""
    for sigma, words in (
        (1.0, ""),
        (0.02, ""),
        (math.sqrt(2 / (fan_in + fan_out)), " = sqrt(2/(fan in + fan out))"),
        (math.sqrt(2 / fan_in), " = sqrt(2/fan in)"),
    ):
        close = abs(float(values.std()) / sigma - 1) * math.sqrt(2 * values.size) < _UNRELATED
        if close and _distance(sample, _normal(sample / sigma)) < far:
            return f"normal with a deviation of {sigma:.3g}{words}"
    return ""


def _distance(ordered: F64, share: F64) -> float:
    """Kolmogorov-Smirnov: the largest gap between the shares below each number, that are seen and
    that are expected, times sqrt(n).
    """
    n = ordered.size
    steps = np.arange(1, n + 1) / n
    gap = max(float(np.max(steps - share)), float(np.max(share - (steps - 1 / n))))
    return gap * math.sqrt(n)


def _normal(values: F64) -> F64:
    """The share of a normal distribution below each number."""
    return np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in values.tolist()])
