"""Gives a dump without a root call one made of its first and last call."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from whence.records import Call
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_read
from whence.results import CallPair, Plan, SlotPair


def put_together(plan: Plan, reference: Sequence[Call], target: Sequence[Call]) -> Plan:
    """The plan, in which tensors of a root that was put together from a dump's calls are paired as
    in those calls, and unpaired if they have no partner there.

    Two dumps may end with different calls: with a layer in one, with the block around it in the
    other. That both calls are the last does not mean that their outputs correspond.
    """
    roots = {
        i
        for i, p in enumerate(plan.pairs)
        if has_mark(reference[p.reference], Mark.PUT_TOGETHER)
        or has_mark(target[p.target], Mark.PUT_TOGETHER)
    }
    if not roots:
        return plan
    partner_of: dict[tuple[str, int], int] = {}
    for i, pair in enumerate(plan.pairs):
        for slot in pair.slots if i not in roots else ():
            partner_of.setdefault(
                (_kind(slot.reference_slot), slot.reference_record), slot.target_record
            )
    pairs = [
        _of_its_calls(p, reference[p.reference], target[p.target], partner_of) if i in roots else p
        for i, p in enumerate(plan.pairs)
    ]
    return msgspec.structs.replace(plan, pairs=tuple(pairs))


def _of_its_calls(
    pair: CallPair, call: Call, target_call: Call, partner_of: dict[tuple[str, int], int]
) -> CallPair:
    dims = {(s.reference_record, s.target_record): s.dims for s in pair.slots}
    names = {s.reference_slot: s.target_slot for s in pair.slots}
    slots = [
        SlotPair(
            ref.slot,
            names.get(ref.slot, ref.slot),
            ref.record,
            across,
            dims.get((ref.record, across), ""),
        )
        for ref in call.refs
        if (across := partner_of.get((_kind(ref.slot), ref.record))) is not None
    ]
    paired_slots, paired_records = (
        {s.reference_slot for s in slots},
        {s.target_record for s in slots},
    )
    return msgspec.structs.replace(
        pair,
        slots=tuple(slots),
        only_reference=tuple(r.slot for r in call.refs if r.slot not in paired_slots),
        only_target=tuple(r.slot for r in target_call.refs if r.record not in paired_records),
    )


def _kind(slot: str) -> str:
    return "read" if is_read(slot) else "made"
