"""A model output with another shape than the reference's, on inputs of equal shape, is a
structural fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from whence.comparison.paired_runs import PairedRuns
from whence.records import marks
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_cache, is_input, is_output, is_param
from whence.results import (
    GUILTY,
    CauseKind,
    Confidence,
    Evidence,
    SlotPair,
    Verdict,
    VerdictKind,
)

Verdicts = dict[tuple[int, int], Verdict]
_MODELS = ("module", "graph")
"""Kinds of root calls that count as models."""


class Reshaped(NamedTuple):
    """An output of a model that the target returned in another shape. pair: index of the pair of
    calls; words: both shapes; is_asked_alike: whether all inputs have equal shapes in both runs.
    """

    pair: int
    slot: SlotPair
    words: str
    is_asked_alike: bool


def reshaped(paired: PairedRuns) -> Iterator[Reshaped]:
    """The outputs of models that alignment reshaped to the reference's axes."""
    plan = paired.plan
    if plan.joined:  # other batches give other shapes of outputs
        return
    own_records = {
        made.record: made.operands[0][1][0]
        for made in plan.made_target
        if [len(records) for _, records in made.operands] == [1]
    }
    are_padded = any(_is_longer(s, paired, own_records) for p in plan.pairs for s in p.slots)
    for index, pair in enumerate(plan.pairs):
        call = paired.calls[pair.reference]
        if call.parent != -1 or call.kind not in _MODELS or has_mark(call, Mark.PUT_TOGETHER):
            continue
        inputs = [s for s in pair.slots if is_input(s.reference_slot)]
        is_asked_alike = bool(inputs) and not any(s.target_record in own_records for s in inputs)
        # columns that the reference was not asked for, such as scores of all tokens but the last
        is_cut = marks.is_gathered(paired.target.calls[pair.target])
        for slot in pair.slots:
            own = own_records.get(slot.target_record)
            if own is None or not is_output(slot.reference_slot):
                continue
            reference, target = (
                paired.reference.records[slot.reference_record],
                paired.shown.records[own],
            )
            if reference.shape == target.shape:
                continue
            may_be_longer = are_padded or is_cut or is_cache(slot.reference_slot)
            if reference.count == target.count or not may_be_longer:
                words = f"{list(target.shape)} in the target, {list(reference.shape)}"
                yield Reshaped(index, slot, words, is_asked_alike and reference.count > 1)


def _is_longer(slot: SlotPair, paired: PairedRuns, own_records: Mapping[int, int]) -> bool:
    """Whether the pair is a parameter with more elements in one run, as for a padded vocabulary;
    tensors computed from it are longer too.
    """
    own = own_records.get(slot.target_record)
    if own is None or not is_param(slot.reference_slot):
        return False
    return paired.reference.records[slot.reference_record].count != paired.shown.records[own].count


def blamed(verdicts: Mapping[tuple[int, int], Verdict], paired: PairedRuns) -> Verdicts:
    """The verdicts, with models guilty that return other shapes for inputs of equal shapes."""
    out = dict(verdicts)
    for returned in reshaped(paired):
        call = paired.plan.pairs[returned.pair].reference
        segment = len(paired.kids.get(call, ())) if paired.kids.get(call) else -1
        verdict = out.get((call, segment))
        if not returned.is_asked_alike or (verdict is not None and verdict.verdict in GUILTY):
            continue
        passed = verdict or Verdict(returned.pair, VerdictKind.IDENTICAL, stretch=segment)
        own_name = returned.slot.reference_slot
        out[call, segment] = passed.replace(
            verdict=VerdictKind.STRUCTURAL,
            evidence=passed.evidence or Evidence.TWO_DUMPS,
            confidence=Confidence.LIKELY,
            cause=CauseKind.STRUCTURAL,
            slot=own_name,
            sentence=f"{own_name} is {returned.words} in the reference, "
            "for inputs of the same shapes",
        )
    return out
