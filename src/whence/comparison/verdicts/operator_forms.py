"""What a verdict from two dumps cannot know by sizes: another form of an operator, other
arguments.
"""

from __future__ import annotations

import math
from typing import Any

from whence import judge
from whence.align import is_cache
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.records import Call
from whence.records.slots import input_name, is_input, is_output
from whence.results import GUILTY, CallPair, CauseKind, Confidence, Evidence, Verdict, VerdictKind

_SHOWN = 40  # characters of an argument
Verdicts = dict[tuple[int, int], Verdict]


def formed(verdicts: Verdicts, errors: PairErrors) -> Verdicts:
    """The verdicts, with calls guilty that computed another form of their operator than the
    reference, and what their arguments say.
    """
    out, paired = dict(verdicts), errors.paired
    for key, verdict in verdicts.items():
        pair = paired.plan.pairs[verdict.pair]
        call, other = paired.calls[pair.reference], paired.target.calls[pair.target]
        if (
            key[1] < 0
            and verdict.evidence == Evidence.TWO_DUMPS
            and verdict.verdict not in (*GUILTY, VerdictKind.IDENTICAL)
        ):
            verdict = _by_form(verdict, call, errors)
        if (
            verdict.verdict == VerdictKind.INTRODUCED
            and verdict.evidence != Evidence.REPLAY
            and (missing := not_passed(pair, call))
        ):
            verdict = verdict.replace(
                verdict=VerdictKind.STRUCTURAL,
                cause=CauseKind.INPUT,
                sentence=f"{missing}; {verdict.sentence.removeprefix('introduced here: ')}",
            )
        if verdict.verdict in GUILTY and (said := _arguments(call, other)):
            verdict = verdict.replace(sentence=f"{verdict.sentence}; {said}")
        out[key] = verdict
    return out


def not_passed(pair: CallPair, call: Call) -> str:
    """Which input of the reference's call the target's was not given, in words; "" when it was
    given all.
    """
    missing = [input_name(slot) for slot in pair.only_reference if is_input(slot)]
    here = {r.slot for r in call.slots("input")}
    missing = [
        name for name in missing if f"input.{name}" in here and not is_cache(f"input.{name}")
    ]
    if not missing:
        return ""
    names = " and ".join(f"`{name}`" for name in missing[:3])
    return f"{names} {'is' if len(missing) == 1 else 'are'} not passed in the target"


def _by_form(verdict: Verdict, call: Call, errors: PairErrors) -> Verdict:
    paired = errors.paired
    slots = paired.slots[verdict.pair].values()
    inputs = [s for s in slots if is_input(s.reference_slot)]
    outputs = [s for s in slots if is_output(s.reference_slot)]
    if len(inputs) != 1 or len(outputs) != 1 or not judge.forms_of(call.op_type):
        return verdict
    given, made = (paired.arrays(slot) for slot in (inputs[0], outputs[0]))
    if given is None or made is None:
        return verdict
    found = judge.told_apart(call.op_type, (given[0], made[0]), (given[1], made[1]))
    if found is None:
        return verdict
    return verdict.replace(
        verdict=VerdictKind.INTRODUCED,
        confidence=Confidence.LIKELY,
        cause=CauseKind.SEMANTIC,
        slot=outputs[0].reference_slot,
        score=None,
        numbers={
            **verdict.numbers,
            "e_in": errors.of(inputs[0]).value,
            "e_out": errors.of(outputs[0]).value,
        },
        sentence=f"computed by {found.target} where the reference computes by {found.reference}: "
        f"of {found.parts} elements at which "
        f"these part, {found.agree} are those of {found.target}",
    )


def _arguments(call: Call, other: Call) -> str:
    """Arguments that are no tensors and differ, in words."""
    differ = [
        f"argument {name.removeprefix('input.')}: {_shown(mine)} against "
        f"{_shown(other.arguments[name])}"
        for name, mine in call.arguments.items()
        if name in other.arguments and not _same(mine, other.arguments[name])
    ]
    more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
    return f"{', '.join(differ[:3])}{more}"


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        return one == two or (math.isnan(one) and math.isnan(two))
    return bool(one == two)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
