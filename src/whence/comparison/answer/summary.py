"""The parts of an answer besides its findings: counts, rows of the report, unpaired names."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from whence import align
from whence.comparison.answer.runs import capture_notes
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.source_lines import of_call
from whence.comparison.verdicts.status import Gaps, failed_alone, updated_less
from whence.comparison.verdicts.third_run import ThirdRunJudge
from whence.judge.power import KINDS
from whence.records import Call, marks
from whence.records.marks import Mark
from whence.records.region import outwards
from whence.records.slots import is_output
from whence.results import (
    GUILTY,
    Evidence,
    Finding,
    Nearest,
    Plan,
    Row,
    SlotPair,
    Undecided,
    Verdict,
    VerdictKind,
    Visible,
)

_MAX_REASONS = 3  # why tensors could not be measured


def counts(paired: PairedRuns, per_call: Mapping[int, str]) -> dict[str, int]:
    """The number of calls by verdict. A root that only stands for a whole dump does not count."""
    numbers = Counter(
        verdict
        for call, verdict in per_call.items()
        if not marks.has_mark(paired.calls[call], Mark.PUT_TOGETHER)
    )
    if paired.left_out.identical:
        numbers[VerdictKind.IDENTICAL] += paired.left_out.identical
    return dict(numbers)


def _ran_alone(paired: PairedRuns) -> str:
    """Which model the target ran of which no call has a partner, in a sentence; "" without one.

    A script that prints both an old and a new model holds both: the old one pairs with the
    reference, and that says nothing of the new one. A call without children is no model, nor is a
    part that a backward pass runs again.
    """
    calls, alone = paired.target.calls, {*paired.plan.unmatched_target}
    seen = {
        around.module_name
        for call in calls
        if call.id not in alone
        for around in outwards(calls, call.id)
        if around.parent == -1
    }
    for number in paired.target_kids.get(-1, ()):
        call = calls[number]
        is_model = call.phase == "forward" and number in paired.target_kids
        if is_model and call.module_name not in seen:
            return (
                f"no fault in what was compared, but only the target ran {call.op_type}, "
                "and nothing of it has a partner: where it replaces the reference's model, capture "
                "it alone (whence.capture(model, path))"
            )
    return ""


def unmatched(plan: Plan) -> int:
    """The number of calls without a partner, or with several possible ones."""
    alone = plan.unmatched_reference, plan.unmatched_target, plan.ambiguous
    return sum(map(len, alone))


def evidence(paired: PairedRuns, verdicts: Iterable[Verdict], findings: Iterable[Finding]) -> str:
    """The strongest kind of evidence behind any verdict of the comparison."""
    kinds = {v.evidence for v in verdicts}
    if Evidence.REPLAY in kinds:
        return Evidence.REPLAY
    if kinds and any(
        r.quantum or r.whole for run in (paired.reference, paired.target) for r in run.records
    ):
        return Evidence.TEXT
    for kind in (Evidence.STATISTICS, Evidence.THREE_WAY):
        if kind in kinds:
            return kind
    return Evidence.TWO_DUMPS if kinds or any(findings) else Evidence.NONE


def visible(paired: PairedRuns, verdicts: Sequence[Verdict]) -> Iterator[Visible]:
    """By kind of fault, the smallest size that would have been named at the calls that passed, for
    replayed calls and for others separately.
    """
    passed = [v for v in verdicts if v.verdict not in (*GUILTY, VerdictKind.UNDETERMINED)]
    for evidence, kind in itertools.product((Evidence.REPLAY, Evidence.TWO_DUMPS), KINDS):
        sizes = [
            (size, paired.pair(v.pair).call.scope)
            for v in passed
            if (v.evidence == Evidence.REPLAY) == (evidence == Evidence.REPLAY)
            and (size := v.numbers.get(f"visible_{kind}")) is not None
        ]
        if sizes:
            largest, name = max(sizes)
            median = statistics.median(size for size, _ in sizes)
            yield Visible(kind, median, largest, name, len(sizes), evidence)


def first_difference(paired: PairedRuns, per_call: Mapping[int, str]) -> dict[str, Any] | None:
    """The first call that differs by more than noise, in the order of execution."""
    for pair in paired.plan.pairs:
        verdict = per_call.get(pair.reference, VerdictKind.IDENTICAL)
        if verdict in (
            VerdictKind.IDENTICAL,
            VerdictKind.NOISE,
            VerdictKind.DECLARED,
            VerdictKind.NONDETERMINISTIC,
        ):
            continue
        call = paired.calls[pair.reference]
        if verdict == VerdictKind.INHERITED and call.parent == -1:
            continue
        return {
            "name": call.module_name,
            "op_type": call.op_type,
            "step": call.step,
            "rank": call.rank,
            "verdict": verdict,
        }
    return None


def unmeasured_notes(
    paired: PairedRuns, unmeasured_pairs: Mapping[tuple[int, int], str]
) -> list[str]:
    """The most frequent reasons why tensors could not be measured, each with the first of its
    tensors.
    """
    tensors: dict[str, list[str]] = {}
    for key, tensor in unmeasured_pairs.items():
        tensors.setdefault(paired.measured[key].why, []).append(tensor)
    tensors.pop("", None)
    by_count = sorted(tensors, key=lambda why: -len(tensors[why]))
    told = [
        f"{'1 pair' if len(tensors[why]) == 1 else f'{len(tensors[why])} pairs'} of tensors not "
        f"measured, {'' if len(tensors[why]) == 1 else 'the first '}{tensors[why][0]}: {why}"
        for why in by_count[:_MAX_REASONS]
    ]
    if others := by_count[_MAX_REASONS:]:
        pairs = sum(len(tensors[why]) for why in others)
        told.append(f"{pairs} more pairs of tensors not measured, for {len(others)} more reasons")
    return told


def gaps(paired: PairedRuns, unmeasured_pairs: Mapping[tuple[int, int], str], partly: int) -> Gaps:
    """What was not compared. partly: the number of tensors of which text shows only a part."""
    return Gaps(
        calls=(
            len(paired.calls) + paired.left_out.calls,
            len(paired.target.calls) + paired.left_out.calls,
        ),
        tensor=_first_unmeasured(paired, unmeasured_pairs),
        output=_unmeasured_output(paired, unmeasured_pairs),
        partly=partly,
        about=functools.partial(_about, paired),
        one_sided=failed_alone(paired.reference.info, paired.target.info)
        or updated_less(paired.calls, paired.target.calls)
        or _ran_alone(paired),
    )


def _about(paired: PairedRuns, index: int, slot: str = "", why: str = "") -> Undecided:
    """The subject of an undecided answer: the call of a pair, or one of its tensors."""
    pair = paired.plan.pairs[index]
    call, partner = paired.calls[pair.reference], paired.target.calls[pair.target]
    line = of_call(paired.target, paired.target_kids, partner)
    return Undecided(
        call.module_name,
        call.op_type,
        slot,
        call.step,
        call.rank,
        call.root,
        line or partner.source,
        why,
        pair=index,
    )


def _first_unmeasured(
    paired: PairedRuns, unmeasured_pairs: Collection[tuple[int, int]], *, only_outputs: bool = False
) -> Undecided | None:
    """The first tensor that could not be measured, with the reason. only_outputs: of roots."""
    for index, pair in enumerate(paired.plan.pairs):
        is_root = paired.calls[pair.reference].parent == -1
        for slot in pair.slots:
            key = slot.reference_record, slot.target_record
            is_asked = not only_outputs or (is_root and is_output(slot.reference_slot))
            if is_asked and key in unmeasured_pairs:
                return _about(paired, index, slot.reference_slot, paired.measured[key].why)
    return None


def _unmeasured_output(
    paired: PairedRuns, unmeasured_pairs: Collection[tuple[int, int]]
) -> Undecided | None:
    """The first output of a root that could not be measured, with the reason, None where none is
    known.
    """
    if (first := _first_unmeasured(paired, unmeasured_pairs, only_outputs=True)) is not None:
        return first
    for index, pair in enumerate(paired.plan.pairs):
        call = paired.calls[pair.reference]
        for ref in call.slots("output") if call.parent == -1 else ():
            if ref.slot in pair.only_reference and not align.is_count_of_cache(
                paired.reference, ref
            ):
                return _about(paired, index, ref.slot, "the target has no such output")
    for number in sorted(paired.plan.unmatched_reference):
        call = paired.calls[number]
        if call.parent == -1 and call.phase == "forward" and number in paired.kids:
            why = (
                f"no sequence of the target has the tokens of step {call.step} row {call.micro}"
                if marks.is_gathered(call)
                else f"the target has no such call in step {call.step}"
            )
            output = next((ref.slot for ref in call.slots("output")), "")
            return Undecided(
                call.module_name, call.op_type, output, call.step, call.rank, call.root, why=why
            )
    return None


def unmeasured(errors: PairErrors) -> dict[tuple[int, int], str]:
    """By pair of records that could not be measured, the call and slot where it occurs first."""
    paired, tensors = errors.paired, dict[tuple[int, int], str]()
    for pair in paired.plan.pairs:
        call = paired.calls[pair.reference]
        for slot in pair.slots:
            key = slot.reference_record, slot.target_record
            if key in tensors or paired.measured[key].tier != "none":
                continue
            if (
                paired.reference.records[key[0]].count
                and errors.of(SlotPair("", "", *key)).value is None
            ):
                tensors[key] = f"{call.module_name} {slot.reference_slot}"
    return tensors


def rows(paired: PairedRuns, third: ThirdRunJudge, per_call: Mapping[int, str]) -> Iterator[Row]:
    """A row of the report for every pair of tensors."""
    for index, pair in enumerate(paired.plan.pairs):
        call, verdict = paired.calls[pair.reference], per_call.get(pair.reference, "")
        name = call.module_name
        for slot in pair.slots:
            key = slot.reference_record, slot.target_record
            a, b = paired.reference.records[key[0]], paired.shown.records[key[1]]
            yield Row(
                index,
                name,
                call.op_type,
                call.step,
                call.rank,
                call.occurrence,
                slot.reference_slot,
                slot.target_slot,
                slot.reference_record,
                slot.target_record,
                a.dtype,
                b.dtype,
                a.shape,
                b.shape,
                verdict,
                pair.rule,
                third.columns(key, paired.measured[key]),
            )


def without_partner(paired: PairedRuns, inside: Set[int]) -> dict[str, tuple[str, ...]]:
    """Names of calls without a partner, by side. inside: ids of calls of the reference to leave
    out, since they were compared as part of others.
    """

    def names_of(calls: Sequence[Call], ids: Iterable[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(calls[i].module_name for i in ids))

    plan = paired.plan
    sides = {
        "reference": names_of(
            paired.calls, (i for i in plan.unmatched_reference if i not in inside)
        ),
        "target": names_of(paired.target.calls, plan.unmatched_target),
        "ambiguous": names_of(paired.calls, (a for a, _ in plan.ambiguous)),
    }
    return {side: names for side, names in sides.items() if names}


def nearest(paired: PairedRuns, inside: Set[int]) -> tuple[Nearest, ...]:
    """For each unpaired call of the reference, the nearest call of the target. inside: as for
    `without_partner`.
    """
    plan = paired.plan
    missing = [i for i in plan.unmatched_reference if i not in inside]
    return align.nearest(paired.reference, paired.shown, plan, missing)


def run_notes(paired: PairedRuns) -> list[str]:
    """Problems during the capture of either run, in sentences."""
    sides = (("reference", paired.reference), ("target", paired.target))
    return [note for side, run in sides for note in capture_notes(side, run, run.calls)]
