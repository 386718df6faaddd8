"""Roots that no dump held: what they were given and returned is that of their first and last call,
and faces what these face.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from whence.readers import GATHERED
from whence.records import Call
from whence.results import CallPair, Plan, SlotPair


def put_together(plan: Plan, reference: Sequence[Call], target: Sequence[Call]) -> Plan:
    """The plan, with such a root's tensors facing what they face in the calls they come from, and
    nothing where they have no partner there.

    Dumps end with different calls: the last that one tool hooked is a layer, of another the block
    around it. That these are both the last does not make them one tensor.
    """
    roots = {
        i
        for i, p in enumerate(plan.pairs)
        if GATHERED in (*reference[p.reference].notes, *target[p.target].notes)
    }
    if not roots:
        return plan
    faced: dict[tuple[str, int], int] = {}
    for i, pair in enumerate(plan.pairs):
        for slot in pair.slots if i not in roots else ():
            faced.setdefault(
                (_kind(slot.reference_slot), slot.reference_record), slot.target_record
            )
    pairs = [
        _of_its_calls(p, reference[p.reference], target[p.target], faced) if i in roots else p
        for i, p in enumerate(plan.pairs)
    ]
    return msgspec.structs.replace(plan, pairs=tuple(pairs))


def _of_its_calls(
    pair: CallPair, call: Call, other: Call, faced: dict[tuple[str, int], int]
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
        if (across := faced.get((_kind(ref.slot), ref.record))) is not None
    ]
    mine, theirs = {s.reference_slot for s in slots}, {s.target_record for s in slots}
    return msgspec.structs.replace(
        pair,
        slots=tuple(slots),
        only_reference=tuple(r.slot for r in call.refs if r.slot not in mine),
        only_target=tuple(r.slot for r in other.refs if r.record not in theirs),
    )


def _kind(slot: str) -> str:
    return "read" if slot.startswith(("input", "param")) else "made"
