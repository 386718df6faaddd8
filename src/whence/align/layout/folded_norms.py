"""Calls of the target that do more than their namesakes: a norm folded into the convolution, an
activation that multiplies too.

What such a call makes is what the reference makes a little later. The calls of the reference up to
there have no partner; they are replayed together, between tensors that both runs show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from whence.align.derived_run import made_as
from whence.align.layout.distances import AGREES, clear_best, distance
from whence.align.module_names import starred
from whence.align.plan_editor import READ, PlanEditor, spread
from whence.records import Call
from whence.records.slots import is_input, is_output, is_param
from whence.results import CallPair, SlotPair

_NORMS = ("batchnorm", "batch_norm")


def folded(at: PlanEditor) -> None:
    """conv and batch norm of the reference are one convolution of the target."""
    families: defaultdict[tuple[str, str], list[tuple[CallPair, Call, Call]]] = defaultdict(list)
    readers: defaultdict[int, list[Call]] = defaultdict(list)
    for call in at.reference.calls:
        for ref in call.slots("input"):
            readers[ref.record].append(call)
    for pair in list(at.pairs.values()):
        call, other = at.reference.calls[pair.reference], at.target.calls[pair.target]
        outputs = call.slots("output")
        if len(outputs) != 1 or not call.slots("param") or at.said(call.id):
            continue
        for norm in readers[outputs[0].record]:
            if norm.parent != call.parent or not any(n in norm.op_type.lower() for n in _NORMS):
                continue
            partner = at.pairs.get(norm.id)
            if partner is None or not any(
                n in at.target.calls[partner.target].op_type.lower() for n in _NORMS
            ):
                families[starred(call.scope), starred(other.scope)].append((pair, norm, other))
    count = 0
    for members in families.values():
        if not any(_is_folded(at, *m) for m in members[:READ]):
            continue
        for pair, norm, _ in members:
            count += _fold(at, pair, norm)
    if count:
        at.notes.append(
            f"{count} batch norms of the reference are folded into the layer before in the "
            "target: both are replayed together, "
            "and their parameters are not compared"
        )


def _is_folded(at: PlanEditor, pair: CallPair, norm: Call, other: Call) -> bool:
    made = at.array("target", other.slots("output")[0].record) if other.slots("output") else None
    call = at.reference.calls[pair.reference]
    before = at.array("reference", call.slots("output")[0].record)
    after = at.array("reference", norm.slots("output")[0].record) if norm.slots("output") else None
    if made is None or before is None or after is None or made.shape != after.shape:
        return False
    return clear_best([distance(after, made), distance(before, made)]) == 0


def _fold(at: PlanEditor, pair: CallPair, norm: Call) -> int:
    above = at.pairs.get(at.reference.calls[pair.reference].parent)
    if above is None or pair.reference not in at.pairs:
        return 0
    used = at.parted(pair.reference) + (at.parted(norm.id) if norm.id in at.pairs else [])
    at.free_reference |= {pair.reference, norm.id}
    at.belongs(above.reference, used)
    return 1


def absorbed(at: PlanEditor) -> None:
    """An activation of the target that multiplies too: its output is what the reference makes of
    the activation's.
    """
    held = {r.record for c in at.target.calls for r in c.refs}

    def brought(record: int) -> int:
        """The record that a call holds and a map brought to other axes."""
        while record not in held and record < len(at.target.records):
            made = made_as(at.target, record)
            if made is None or len(made.operands) != 1:
                break
            record = made.operands[0][1][0]
        return record

    fuller: list[CallPair] = []
    faced: defaultdict[int, dict[int, None]] = defaultdict(dict)
    for pair in sorted(at.pairs.values(), key=lambda p: at.reference.calls[p.reference].order):
        for slot in pair.slots:
            if not is_param(slot.reference_slot):
                faced[brought(slot.target_record)][slot.reference_record] = None
    families: defaultdict[tuple[str, str], list[tuple[CallPair, int, int, int]]] = defaultdict(list)
    for pair in at.pairs.values():
        call, other = at.reference.calls[pair.reference], at.target.calls[pair.target]
        made = [s for s in pair.slots if is_output(s.reference_slot)]
        if (
            len(made) != 1
            or at.said(call.id)
            or call.slots("param")
            or other.slots("param")
            or at.kids_reference.get(call.id)
        ):
            continue
        own, theirs = made[0].reference_record, made[0].target_record
        if call.op_type != other.op_type and _takes_more(at, pair, "reference"):
            fuller.append(pair)
            continue
        later = [r for r in faced[theirs] if r != own]
        if call.op_type != other.op_type and len(later) == 1:
            families[starred(call.scope), starred(other.scope)].append(
                (pair, own, later[0], theirs)
            )
    for (name, partner), members in families.items():
        if not _takes_more(at, members[0][0], "target") and not any(
            _nearer(at, later, own, theirs) for _, own, later, theirs in spread(members)
        ):
            continue
        for pair, *_ in members:
            above = at.pairs.get(at.reference.calls[pair.reference].parent)
            if above is not None:
                used = at.parted(pair.reference)
                at.free_reference.add(pair.reference)
                at.belongs(above.reference, used)
        at.notes.append(
            f"{partner} of the target does what follows {name} in the reference too: they are "
            "replayed together"
        )
    _as_elsewhere(at, fuller)


def _takes_more(at: PlanEditor, pair: CallPair, side: str) -> bool:
    """Does this side's call read more elements than the other's and make as many? Then it does
    something else as well.
    """
    given = [s for s in pair.slots if is_input(s.reference_slot)]
    given += [] if given else _unmatched_inputs(at, pair)
    counts = [
        (at.reference.records[s.reference_record].count, at.target.records[s.target_record].count)
        for s in given
    ]
    if len(counts) != 1:
        return False
    few, many = counts[0] if side == "target" else counts[0][::-1]
    return many > few > 0 and many % few == 0


def _unmatched_inputs(at: PlanEditor, pair: CallPair) -> list[SlotPair]:
    call, other = at.reference.calls[pair.reference], at.target.calls[pair.target]
    mine, theirs = call.slots("input"), other.slots("input")
    return (
        [SlotPair(a.slot, b.slot, a.record, b.record) for a, b in zip(mine, theirs)]
        if len(mine) == len(theirs) == 1
        else []
    )


def _as_elsewhere(at: PlanEditor, pairs: Sequence[CallPair]) -> None:
    """A call of the reference that does more than its namesake faces what its tensors face in other
    calls.
    """
    known = at.faces({p.reference for p in pairs})
    for pair in pairs:
        call = at.reference.calls[pair.reference]
        slots = [
            SlotPair(r.slot, known[r.record][1], r.record, known[r.record][0])
            for r in call.refs
            if r.record in known
        ]
        if any(is_output(s.reference_slot) for s in slots):
            at.put(pair.reference, slots)


def _nearer(at: PlanEditor, later: int, own: int, theirs: int) -> bool:
    """Is the target's tensor the later one of the reference's, and not the call's own output?"""
    arrays = at.array("reference", later), at.array("reference", own), at.array("target", theirs)
    if any(a is None for a in arrays):
        return False
    a, b, y = (np.asarray(x) for x in arrays)
    if not a.size == b.size == y.size:
        return a.size == y.size and distance(a, y.reshape(a.shape)) < AGREES
    return clear_best([distance(a, y.reshape(a.shape)), distance(b, y.reshape(b.shape))]) == 0
