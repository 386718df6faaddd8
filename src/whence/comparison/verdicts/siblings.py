"""Compares modules of the same kind within a run: a precision loss that only one of them has is
a fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from whence import align, judge
from whence.comparison.verdicts.call_replays import CallReplays
from whence.dtypes import is_half_roundoff
from whence.frameworks.operator_names import CHOOSES, base_name
from whence.judge.limits import STRUCTURE_ELEMENTS
from whence.results import Confidence, Evidence, Verdict, VerdictKind


def blame_those_that_stand_out(
    verdicts: dict[tuple[int, int], Verdict], replays: CallReplays
) -> None:
    """Make a suspect or a loss of precision at 16 bits a fault where siblings do without: what
    rounds inside in one layer is no property of the model's arithmetic.
    """
    candidates = [
        (call, verdict)
        for (call, segment), verdict in verdicts.items()
        if segment < 0 and _may_stand_out(verdict, replays, call)
    ]
    rho_of = _rho_by_scope(replays) if candidates else {}
    for call, verdict in candidates:
        own = replays.figures[call][verdict.slot]
        rho = own.rho
        siblings = rho_of[_form(replays, call, verdict.slot)]
        quiet = [other for other in siblings.values() if other < rho / judge.LIMITS.stands_out]
        if not quiet or 2 * len(quiet) < len(siblings):
            continue
        pair = replays.paired.pair(replays.paired.pair_of[call])
        fault = replays.cause(pair, [verdict.slot], own.score / judge.LIMITS.stands_out)
        others = f"{len(quiet)} others of its form" if len(quiet) > 1 else "another of its form"
        words = f"; {fault.words}" if fault.words else ""
        verdicts[call, -1] = verdict.replace(
            verdict=VerdictKind.INTRODUCED,
            confidence=Confidence.LIKELY,
            cause=fault.cause,
            operator=fault.operator,
            source=fault.source or verdict.source,
            reason=fault.words,
            sentence=f"introduced here: {rho:.3g} times this operator's own rounding, where "
            f"{others} in this run {'have' if len(quiet) > 1 else 'has'} {max(quiet):.3g} at most"
            f"{words}",
        )


def _may_stand_out(verdict: Verdict, replays: CallReplays, call: int) -> bool:
    """Is this the pass of a leaf that rounds more than most do, and whose rounding does not depend
    on what its numbers are?

    The weights of an attention, and what is chosen, round as their scores are spread.
    """
    is_close = verdict.verdict == VerdictKind.PRECISION or verdict.confidence == Confidence.SUSPECT
    own = replays.figures.get(call, {}).get(verdict.slot)
    if not is_close or own is None or verdict.evidence != Evidence.REPLAY or verdict.cause:
        return False
    limits, reference = judge.LIMITS, replays.paired.reference
    program = reference.programs.get(replays.paired.calls[call].program)
    refs = replays.paired.calls[call].refs
    count = next((reference.records[r.record].count for r in refs if r.slot == verdict.slot), 0)
    return (
        is_half_roundoff(own.u)
        and own.rho > limits.suspect * limits.rho_16
        and count >= STRUCTURE_ELEMENTS
        and program is not None
        and not any(_weighs_by_scores(op.name) for op in program.operations)
    )


def _weighs_by_scores(name: str) -> bool:
    return "attention" in name or "softmax" in name or base_name(name) in CHOOSES


def _rho_by_scope(replays: CallReplays) -> Mapping[Any, Mapping[str, float]]:
    """By form and module, the largest error in units of the operator's own rounding."""
    rho_of: dict[Any, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for call, figures in replays.figures.items():
        scope = replays.paired.calls[call].scope
        for slot, error in figures.items():
            of_form = rho_of[_form(replays, call, slot)]
            of_form[scope] = max(of_form[scope], error.rho)
    return rho_of


def _form(replays: CallReplays, call: int, slot: str) -> Any:
    """What outputs have in common that should round alike: the name of their module with its
    numbers starred, and one program; of a backward pass, the target's too, since a derivative that
    is written by hand rounds at every step, and torch's own once.
    """
    named = replays.paired.calls[call]
    own = ""
    if named.phase == "backward":
        pair = replays.paired.plan.pairs[replays.paired.pair_of[call]]
        own = replays.paired.target.calls[pair.target].program
    return align.starred(named.scope), named.op_type, slot, named.program, own
