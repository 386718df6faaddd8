"""Is a token that two runs choose differently a coin flip or a fault? And are logits further apart
than rounding takes them?

A token flips when the logits of two candidates change places: their difference must move by the gap
between them. If logits carry independent errors of standard deviation s, that difference carries
sqrt(2) s, so a gap of more than `LIMITS.flip` s (4.2 standard deviations of the difference) is not
closed by rounding. s is measured where both runs had the same tokens before them; the whole
vocabulary tells it, so the two candidates themselves hardly enter. Bit-equal logits are a
measurement too: they say that both runs compute alike. A fault must not be taken for the noise it
is measured by: what jumps out of what was measured before, or above what rounding can make at all,
joins no measurement, and behind a finding nothing is explained by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from whence.dtypes import is_half_roundoff
from whence.judge.limits import (
    ENOUGH_FOR_A_MEDIAN,
    LASTING_FACTOR,
    LASTING_TOKENS,
    LIMITS,
    U32,
)
from whence.judge.ties import closed_by
from whence.metrics.logits import LogitFigures

_BFLOAT16 = 2.0**-8


@dataclass(frozen=True, slots=True)
class Judged:
    """The judgement of one token's logits. noise: standard deviation of a logit that rounding
    explains, in logits; None if it is not known.

    off: whether the error of the logits exceeds its limit. flip: "" if both runs choose the same
    token, else "explained" or "unexplained". score: for a flip, the gap of the two logits over the
    gap that noise can close; for `off`, the error over its limit; the larger if both apply.
    """

    noise: float | None
    off: bool
    flip: str
    score: float


def most(unit_roundoff: float) -> float:
    """The largest relative error of logits that rounding alone may cause in a model that computes
    with this unit roundoff; inf for 0 (not known).
    """
    return LIMITS.root_output_room(unit_roundoff) if unit_roundoff else math.inf


def _limits(ceiling: float, usual: float | None, count: int) -> tuple[float, float]:
    """(limit of the error of one token, limit for several in a row). ceiling: error that rounding
    may cause; usual: median error of `count` tokens, None if not known.

    If most tokens are bitwise equal, both runs compute alike in any precision, and a token that is
    not equal has no noise to hide in.
    """
    if usual is None or count < ENOUGH_FOR_A_MEDIAN:
        return 2 * ceiling, math.inf
    if usual == 0.0:
        lone = 2 * (ceiling if math.isfinite(ceiling) else most(U32))
        return min(lone, most(_BFLOAT16)), math.inf
    floor = ceiling if math.isfinite(ceiling) else 0.0
    return max(LIMITS.whole * usual, 2 * floor), max(LASTING_FACTOR * usual, floor)


def judged(
    figures: Sequence[LogitFigures],
    unit_roundoff: float,
    noise_errors: Sequence[float] = (),
    faulty: Sequence[float] = (),
) -> list[Judged]:
    """Judge tokens in the order in which they were generated. Each must follow the same text in
    both runs.

    unit_roundoff: of the coarser dtype in which either model computes, 0 if it is not known (or
    quantised). noise_errors: relative errors of logits between runs of the reference, a lower bound
    of the noise. faulty: for a token whose logits a finding reaches, the unit roundoff of its
    arithmetic, else 0; such a token does not count as a measurement of noise, and rounding explains
    no different choice there.
    """
    errors = [f.rel_logit_err for f in figures]
    measured = [r for r in noise_errors if 0 <= r < math.inf]
    out: list[Judged] = []
    for n, token in enumerate(figures):
        fault = faulty[n] if faulty else 0.0
        ceiling = most(fault or unit_roundoff)
        usual = median(measured) if measured else None
        limit, lasts = _limit(errors[n:], ceiling, usual, len(measured))
        if is_half_roundoff(unit_roundoff):
            # Rounding moves each logit in its own way, never all by one factor, measured or not.
            small = max(usual or 0.0, unit_roundoff)
            if token.rest <= LASTING_FACTOR * small:
                limit = min(limit, LIMITS.whole * small)
        off = bool(token.nonfinite) or lasts or not errors[n] <= limit
        if not off and not fault:
            measured.append(errors[n])
        out.append(_judged(token, limit, usual, ceiling, off, bool(fault)))
    return out


def _limit(
    ahead: Sequence[float], ceiling: float, usual: float | None, count: int
) -> tuple[float, bool]:
    """(limit of the error of a token, whether it and those behind it are above that for several in
    a row). ahead: the errors from it on; the others as in `_limits`.
    """
    lone, lasting = _limits(ceiling, usual, count)
    ahead = ahead[:LASTING_TOKENS]
    lasts = len(ahead) == LASTING_TOKENS and ahead[0] > lasting and median(ahead) > lasting
    return (lasting if lasts else lone), lasts


def _judged(
    token: LogitFigures, limit: float, usual: float | None, ceiling: float, off: bool, fault: bool
) -> Judged:
    """What one token's figures say. usual, ceiling: as `_limits` has them. fault: it has one."""
    error = token.rel_logit_err
    if off or fault:
        rounding = usual if usual is not None else ceiling
    else:
        rounding = max(error, usual or 0.0)
    noise = rounding * token.scale if math.isfinite(rounding) else None
    score = math.inf if token.nonfinite or math.isnan(error) else error / limit
    if token.agree:
        return Judged(noise, off, "", score)
    by = _gap(token, noise)
    flip = "explained" if by <= 1 and not fault else "unexplained"
    return Judged(noise, off, flip, max(by, score) if off and by > 1 else by)


def _gap(token: LogitFigures, noise: float | None) -> float:
    """The gap of two candidates over the gap that noise closes."""
    closed = closed_by(noise) if noise is not None else math.inf
    if token.nonfinite or (token.gap and not closed):
        return math.inf
    return token.gap / closed if closed else 0.0
