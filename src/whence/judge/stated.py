"""Tensors that face each other because the program says so: nothing tells how many operators lie between one and the next."""

from __future__ import annotations

import msgspec

from whence.judge.error_growth import Growth
from whence.judge.limits import LIMITS, Limits
from whence.results import Verdict

_SIXTEEN = 1e-5  # unit roundoffs of 16 bits and fewer lie above


def judge_stated(verdict: Verdict, growth: Growth, u: float, first: bool, limits: Limits = LIMITS) -> Verdict:
    """The verdict of such a pair after that of its growth, with room for what rounding in unseen operators may make.

    first: nothing before it is seen. The room is that of `Limits.otherwise`; at 16 bits only for the first, since growth from there on is
    judged in units of roundoffs that leave room themselves.
    """
    if verdict.verdict != "introduced" or growth.evidence not in ("two dumps", "statistics"):
        return verdict
    room = min(limits.otherwise * u, max(10 * u, 0.05)) if first or u < _SIXTEEN else 0.0
    if growth.e_out > room:
        if not first:
            return verdict
        sentence = f"differs by rel_l2 {growth.e_out:.2g}, {'' if room == 0 else f'more than {room:.2g}, '}and nothing before it is seen"
        return msgspec.structs.replace(verdict, sentence=sentence, numbers={**verdict.numbers, "e_in": None})
    sentence = f"differs by rel_l2 {growth.e_out:.2g}, within {room:.2g}, which rounding in operators that nobody labelled may make"
    return msgspec.structs.replace(verdict, verdict="noise", confidence="", score=None, sentence=sentence)
