"""What a verdict from two dumps cannot know by sizes: another form of an operator, other
arguments.
"""

from __future__ import annotations

import math
from typing import Any

from whence import dtypes, judge
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
        call, partner = paired.calls[pair.reference], paired.target.calls[pair.target]
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
        if verdict.verdict in GUILTY and (words := _arguments(call, partner)):
            verdict = verdict.replace(sentence=f"{words}; {verdict.sentence}")
        out[key] = verdict
    return out


def not_passed(pair: CallPair, call: Call) -> str:
    """Which input of the reference's call the target's was not given, in words; "" when it was
    given all.
    """
    missing = [input_name(slot) for slot in pair.only_reference if is_input(slot)]
    read = {r.slot for r in call.slots("input")}
    missing = [
        name for name in missing if f"input.{name}" in read and not is_cache(f"input.{name}")
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
    inputs_read, outputs_made = (paired.arrays(slot) for slot in (inputs[0], outputs[0]))
    if inputs_read is None or outputs_made is None:
        return verdict
    forms = judge.told_apart(
        call.op_type, (inputs_read[0], outputs_made[0]), (inputs_read[1], outputs_made[1])
    )
    if forms is None:
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
        sentence=f"computed by {forms.target} where the reference computes by {forms.reference}: "
        f"of {forms.parts} elements at which these "
        f"differ, {forms.agree} are those of {forms.target}",
    )


def _arguments(call: Call, partner: Call) -> str:
    """Arguments other than tensors that differ, in words. Dtypes follow the tensors of a run in
    another precision.
    """
    differ = [
        f"argument {input_name(name)} is {_shown(value)} in the reference, "
        f"{_shown(partner.arguments[name])} in the target"
        for name, value in call.arguments.items()
        if name in partner.arguments
        and not _same(value, partner.arguments[name])
        and not (_is_dtype(value) and _is_dtype(partner.arguments[name]))
    ]
    others = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
    return f"{', '.join(differ[:3])}{others}"


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and value in dtypes.DTYPES


def _same(reference: Any, target: Any) -> bool:
    if isinstance(reference, float) and isinstance(target, float):
        return reference == target or (math.isnan(reference) and math.isnan(target))
    return bool(reference == target)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
