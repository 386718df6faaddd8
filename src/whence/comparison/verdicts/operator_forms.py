"""Evidence beside the size of errors: other forms of an operator, lone tensors, arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from whence import dtypes, judge
from whence.align import is_cache
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.display import listed
from whence.records import Call, Run
from whence.records.marks import Mark, has_mark
from whence.records.slots import (
    input_name,
    is_drawn,
    is_input,
    is_of_child,
    is_output,
    is_param,
    is_written,
    param_name,
    split_child,
)
from whence.records.training import OPTIMIZER
from whence.results import GUILTY, CallPair, CauseKind, Confidence, Evidence, Verdict, VerdictKind

_SHOWN = 40  # characters of an argument
Verdicts = dict[tuple[int, int], Verdict]


def formed(verdicts: Verdicts, errors: PairErrors) -> Verdicts:
    """The verdicts, with calls guilty that compute another form of their operator than the
    reference. Sentences of guilty verdicts also name the arguments that differ.
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
        if _went_another_way(verdict, pair, call):
            words = (
                "the backward passes of the two runs read other tensors, and no program says more"
            )
            verdict = verdict.withdrawn(VerdictKind.UNDETERMINED, f"{words}; {verdict.sentence}")
        if verdict.verdict == VerdictKind.INTRODUCED:
            cause, missing = _missing(verdict, pair, paired)
            if missing:
                sentence = verdict.sentence.removeprefix("introduced here: ")
                verdict = verdict.replace(
                    verdict=VerdictKind.STRUCTURAL, cause=cause, sentence=f"{missing}; {sentence}"
                )
            elif verdict.evidence == Evidence.REPLAY and (words := _used_alone(pair, paired)):
                verdict = verdict.replace(sentence=f"{words}; {verdict.sentence}")
            elif verdict.evidence == Evidence.TWO_DUMPS and (words := _made_alone(verdict, paired)):
                verdict = verdict.replace(
                    cause=CauseKind.SEMANTIC, sentence=f"{words}; {verdict.sentence}"
                )
        if verdict.verdict in GUILTY and (words := _arguments(call, partner)):
            verdict = verdict.replace(sentence=f"{words}; {verdict.sentence}")
        out[key] = verdict
    return out


def _went_another_way(verdict: Verdict, pair: CallPair, call: Call) -> bool:
    """Whether a backward pass, guilty by size alone, reads a tensor in one run only. A checkpoint
    that repeats its forward pass causes this, for example.
    """
    lone = (*pair.only_reference, *pair.only_target)
    return (
        verdict.verdict == VerdictKind.INTRODUCED
        and verdict.evidence == Evidence.TWO_DUMPS
        and call.phase == "backward"
        and call.forward >= 0
        and any(map(is_input, lone))
    )


def _missing(verdict: Verdict, pair: CallPair, paired: PairedRuns) -> tuple[CauseKind, str]:
    """(cause, words) of an input or parameter that only one side's call has; "" if none."""
    if verdict.evidence != Evidence.REPLAY and not _is_held_from_before(verdict.slot):
        missing = not_passed(pair, paired.calls[pair.reference])
        if missing:
            return CauseKind.INPUT, missing
    lone = "" if verdict.cause == CauseKind.KERNEL else lone_parameters(pair, paired)
    return CauseKind.STRUCTURAL, lone


def _is_held_from_before(slot: str) -> bool:
    """Whether the slot is a cache's content at the start of a call, which earlier steps wrote."""
    own = split_child(slot)[1] if is_of_child(slot) else slot
    return is_input(own) and is_cache(own)


def _used_alone(pair: CallPair, paired: PairedRuns) -> str:
    """The input, in words, that only one side's call has and computes with; "" if none. A replay
    gives the other side this side's value.
    """
    calls = paired.calls[pair.reference], paired.target.calls[pair.target]
    sides = (
        ("reference", paired.reference, calls[0], pair.only_reference),
        ("target", paired.target, calls[1], pair.only_target),
    )
    lone = []
    for side, run, call, slots in sides:
        program = run.programs.get(call.program)
        read = program.inputs if program is not None else ()
        used = [s for s in slots if s in read and is_input(s) and not is_cache(s)]
        if used:
            lone.append(_lone_inputs(used, side))
    return lone[0] if len(lone) == 1 else ""  # else one tensor under two names


def _made_alone(verdict: Verdict, paired: PairedRuns) -> str:
    """The operator, in words, that computed a verdict's tensor and that only the target runs; "" if
    a paired call or no recorded call computed it.
    """
    slot = paired.slot(verdict.pair, verdict.slot)
    maker = paired.maker(slot) if slot is not None else None
    alone = paired.plan.unmatched_target
    if slot is None or maker is None or maker.kind != "operator" or maker.id not in alone:
        return ""
    writers = {
        call.id
        for call in paired.target.calls
        if any(r.record == slot.target_record and is_written(r.slot) for r in call.refs)
    }
    if not writers or not writers.issubset(alone):  # it reads the tensor, or hands it on
        return ""
    return f"{maker.op_type}, which only the target runs, made it"


def not_passed(pair: CallPair, call: Call) -> str:
    """The inputs, in words, that the reference's call has and the target's lacks; "" if none. Also
    "" if only the target's operator has some inputs: then they are numbered differently, as a fused
    kernel reads the inputs of all operators in it.
    """
    if call.kind == "operator" and any(map(is_input, pair.only_target)):
        return ""
    read = {r.slot for r in call.slots("input")}
    missing = [s for s in pair.only_reference if is_input(s) and s in read and not is_cache(s)]
    return _lone_inputs(missing, "reference") if missing else ""


def _lone_inputs(slots: Sequence[str], side: str) -> str:
    """A sentence about inputs that only the call of this side has."""
    if all(map(is_drawn, slots)):
        return f"only the {side} draws random numbers"
    names = " and ".join(f"`{input_name(slot)}`" for slot in slots[:3])
    verb = "is" if len(slots) == 1 else "are"
    return f"{names} {verb} {'not passed' if side == 'reference' else 'passed only'} in the target"


def lone_parameters(pair: CallPair, paired: PairedRuns) -> str:
    """The parameters, in words, that only one side's call has; "" if none is known to be missing.

    Nothing is reported if each side has a lone name (one parameter under two names), for containers
    (a parameter may lie in a module inside) and for quantised weights, which come with scales.
    """
    call, partner = paired.calls[pair.reference], paired.target.calls[pair.target]
    sides = (
        ("reference", paired.reference, call, pair.only_reference),
        ("target", paired.target, partner, pair.only_target),
    )
    lone = [
        (side, names)
        for side, run, owner, slots in sides
        if (names := [param_name(s) for s in slots if _is_used(run, owner, s)])
    ]
    if len(lone) != 1 or pair.also or not (call.leaf and partner.leaf):
        return ""
    if partner.quantised is not None:  # what a layer of codes needs no more, as bounds at zero
        return ""
    shared = [s for s in pair.slots if is_param(s.reference_slot)]
    stored = [paired.reference.records[s.reference_record].dtype for s in shared]
    stored += [paired.target.records[s.target_record].dtype for s in shared]
    if not all(map(_is_plain_float, stored)):
        return ""
    ((side, names),) = lone
    shown = listed([f"`{name}`" for name in names], 3, " and ")
    is_one = len(names) == 1
    verb, noun = ("is a", "parameter") if is_one else ("are", "parameters")
    return f"{shown} {verb} {noun} of the {side} only"


def _is_used(run: Run, call: Call, slot: str) -> bool:
    """Whether the slot is a floating-point vector or scalar parameter that the call's program, if
    known, reads.

    A missing matrix is not reported: no call can do without it, so the other side holds it in a
    place that was not captured.
    """
    record = call.by_slot.get(slot)
    if record is None or not is_param(slot) or not _is_plain_float(run.records[record].dtype):
        return False
    if len(run.records[record].shape) > 1:
        return False
    program = run.programs.get(call.program)
    return program is None or slot in program.params


def _is_plain_float(dtype: str) -> bool:
    return dtypes.is_floating(dtype) and judge.unit_roundoff(dtype) <= 2.0**-8


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


_OF_A_CAPTURE = ("mode", "graph", "compile_id")  # arguments of a compiled graph


def _arguments(call: Call, partner: Call) -> str:
    """The arguments, other than tensors, that differ, in words. Dtypes are left out, since they
    follow the precision of the run, and so are arguments of two engines, which name them otherwise.
    """
    if has_mark(call, Mark.OPSET) != has_mark(partner, Mark.OPSET):
        return ""
    if call.phase == OPTIMIZER and call.program and partner.program and _is_torchs(call, partner):
        return ""  # its hyper-parameters are arguments of its program
    differ = [
        f"argument {input_name(name)} is {_shown(value)} in the reference, "
        f"{_shown(partner.arguments[name])} in the target"
        for name, value in call.arguments.items()
        if name in partner.arguments
        and not (call.kind == "graph" and name in _OF_A_CAPTURE)
        and not _same(value, partner.arguments[name])
        and not (_is_dtype(value) and _is_dtype(partner.arguments[name]))
    ]
    differ += _lone_arguments(call, partner)
    return listed(differ, 3)


def _is_torchs(*calls: Call) -> bool:
    """Whether torch itself defines the functions that these calls run."""
    return all(call.source.startswith("torch.") for call in calls)


def _lone_arguments(call: Call, partner: Call) -> list[str]:
    """The arguments of modules that only one side passes, in words. None counts as not passed, and
    an equal value may be passed under another name.
    """
    if call.kind != "module" or call.op_type != partner.op_type:
        return []
    both = (
        (call, partner, "not passed in the target"),
        (partner, call, "not passed in the reference"),
    )
    clauses = []
    for giver, other, how in both:
        slots = {ref.slot for ref in other.refs}
        for name, value in giver.arguments.items():
            known = name in other.arguments or name in slots
            if not known and value is not None and value not in other.arguments.values():
                side = "reference" if giver is call else "target"
                clauses.append(
                    f"argument {input_name(name)} is {_shown(value)} in the {side}, {how}"
                )
    return clauses


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and value in dtypes.DTYPES


def _same(reference: Any, target: Any) -> bool:
    if isinstance(reference, float) and isinstance(target, float):
        return reference == target or (math.isnan(reference) and math.isnan(target))
    return bool(reference == target)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
