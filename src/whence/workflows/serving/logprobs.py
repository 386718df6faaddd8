"""Log-probabilities that an engine reports, against the reference's logits: which transform of
these gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from whence.judge.limits import LIMITS
from whence.workflows.serving.rows import Array

_NUCLEUS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
_KEPT = (1, 2, 5, 10, 20, 40, 50, 100)
_CLOSER = 0.05
"""Of the residual is left by the transform that explains it."""
_CLOSEST = 1e-3
"""A residual below is rounding: log-probabilities are reported with a few digits."""
_TEMPERATURES = np.exp(np.linspace(np.log(0.1), np.log(10.0), 400))


def log_softmax(logits: Array) -> Array:
    """Along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def transform_of(
    logits: Array, tokens: Sequence[int], logprobs: Sequence[float], noise: float
) -> tuple[float, str]:
    """(largest residual beyond rounding, what explains it), (0, "") where there is none.

    logits: the reference's, (tokens, vocabulary). noise: of a logit.
    """
    reported = np.asarray(logprobs, np.float64)
    chosen = np.arange(len(tokens)), np.asarray(tokens)
    residual = float(np.abs(log_softmax(logits)[chosen] - reported).max())
    if residual <= largest_residual(noise):
        return 0.0, ""
    best, words = residual, ""
    for name, left in _tried(logits, chosen, reported):
        if left < best:
            best, words = left, name
    is_explained = best <= max(_CLOSER * residual, largest_residual(noise))
    return residual, words if is_explained else ""


def largest_residual(noise: float) -> float:
    """Of log-probabilities that rounding explains. noise: of a logit."""
    return max(_CLOSEST, LIMITS.whole * noise)


def _tried(
    logits: Array, chosen: tuple[Array, Array], reported: Array
) -> Iterator[tuple[str, float]]:
    """(name of a transform, residual that it leaves)."""
    own = log_softmax(logits)[chosen]
    if len(own) > 2:
        yield "shifted by one token", float(np.abs(own[1:] - reported[:-1]).max())
        yield "shifted by one token", float(np.abs(own[:-1] - reported[1:]).max())
    yield "logits, not normalised", float(np.abs(logits[chosen] - reported).max())
    best, temperature = min(
        (float(np.abs(log_softmax(logits / t)[chosen] - reported).max()), t) for t in _TEMPERATURES
    )
    for fine in np.linspace(temperature * 0.98, temperature * 1.02, 81):
        left = float(np.abs(log_softmax(logits / fine)[chosen] - reported).max())
        best, temperature = min((best, temperature), (left, fine))
    yield f"temperature {temperature:.3g}", best
    ranked = np.sort(logits, -1)[:, ::-1]
    for count in _KEPT:
        if count < logits.shape[-1]:
            kept = np.where(logits >= ranked[:, count - 1 : count], logits, -np.inf)
            yield f"top-k {count}, renormalised", _left(kept, chosen, reported)
    shares = np.cumsum(np.exp(log_softmax(ranked)), -1)
    for share in _NUCLEUS:
        last = (shares < share).sum(-1, keepdims=True)
        kept = np.where(logits >= np.take_along_axis(ranked, last, -1), logits, -np.inf)
        yield f"top-p {share}, renormalised", _left(kept, chosen, reported)


def _left(kept: Array, chosen: tuple[Array, Array], reported: Array) -> float:
    away = np.abs(log_softmax(kept)[chosen] - reported)
    return float(np.nan_to_num(away, nan=np.inf).max())
