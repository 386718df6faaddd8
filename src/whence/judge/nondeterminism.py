"""The run-to-run spread of the reference (A/A): what further runs of the same program, with the
same inputs, differ by.

It joins the noise budget. A target that is one more correct run is exchangeable with the further
ones, so the ratio of its error to theirs is about one; over d independent elements its square
follows F(d, d), and exceeds `Limits.spread` = 2 with probability 0.004 at d = 16 and below 1e-4 at
d = 32. More than one further run only lowers it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from whence.dtypes import Array
from whence.judge.limits import LIMITS
from whence.judge.replay_error import ReplayError, flat
from whence.results import CauseKind, Confidence, Measured, Verdict, VerdictKind

_PASS = (VerdictKind.NOISE, VerdictKind.INHERITED, VerdictKind.AMPLIFIED)


def elementwise(reference: Array, further: Iterable[Array]) -> Array:
    """max over the further runs of |further - reference|, element by element.

    reference, further: of one shape, any dtype. Returns float64 of that shape, or for complex input
    complex128 whose real and imaginary parts are those maxima of theirs. Elements that are NaN or
    infinite on either side have spread 0: a run that is NaN now and then explains nothing.
    """
    base = flat(reference)  # real and imaginary parts side by side
    spread = np.zeros(base.shape)
    for run in further:
        with np.errstate(invalid="ignore", over="ignore"):
            change = np.abs(flat(run) - base)
        spread = np.maximum(spread, np.where(np.isfinite(change), change, 0.0))
    parts: Array = spread.view(np.complex128) if np.iscomplexobj(reference) else spread
    return parts.reshape(reference.shape)


def flips(measured: Measured, count: int) -> int:
    """How many of `count` elements of an exact kind differ in a measured pair; all of them when
    that was not counted.
    """
    if measured.identical:
        return 0
    equal = measured.values.get("equal_count")
    return count if equal is None else count - int(equal)


def explain(verdict: Verdict, spread: float) -> Verdict:
    """The verdict of a region that does not repeat itself, its inputs being the same:
    `nondeterministic` where that explains it.

    spread: relative 2-norm between runs of the reference, of its outputs. What is identical, or
    blamed although the spread was part of its budget, or inherited from inputs that differ by more,
    stays what it is.
    """
    if verdict.verdict not in _PASS:
        return verdict
    e_out = verdict.numbers.get("e_out")
    if verdict.verdict != VerdictKind.NOISE and (e_out is None or e_out > LIMITS.spread * spread):
        return verdict
    return verdict.replace(
        verdict=VerdictKind.NONDETERMINISTIC,
        numbers={**verdict.numbers, "spread": spread if math.isfinite(spread) else None},
        sentence="does not repeat itself: on equal inputs, runs of the reference differ by "
        f"rel_l2 {spread:.2g}; {verdict.sentence}",
    )


def repeated(verdict: Verdict, pairs: Iterable[tuple[ReplayError, ReplayError]]) -> Verdict:
    """The verdict of a flagged replay, `nondeterministic` when a further run of the reference
    strays as far on its own inputs.

    pairs: per output, figures of the target and of the further run, each against the replay on its
    own inputs. Where the further run is beyond a limit itself, `limits.spread` times as much is
    allowed, statistic by statistic.
    """
    scores = []
    for target, further in pairs:
        if target.mismatch or target.integer_mismatch:
            return verdict
        parts = further.parts()
        scores += [
            value / (LIMITS.spread * parts[name] if parts[name] > 1 else 1.0)
            for name, value in target.parts().items()
        ]
    if not scores or not max(scores) <= 1:
        return verdict
    return verdict.replace(
        verdict=VerdictKind.NONDETERMINISTIC,
        confidence=Confidence.NONE,
        cause=CauseKind.UNKNOWN,
        score=max(scores),
        sentence="a further run of the reference strays as far from what its operators give on "
        f"its own inputs; {verdict.sentence}",
    )
