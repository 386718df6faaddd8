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
from whence.align.layout.calls_before import content_of
from whence.align.layout.distances import AGREES, clear_best, distance
from whence.align.module_names import starred
from whence.align.plan_editor import READ, PlanEditor, spread
from whence.records import Call
from whence.records.slots import is_input, is_output, is_param
from whence.results import CallPair, SlotPair

_NORMS = ("batchnorm", "batch_norm")


def folded(editor: PlanEditor) -> None:
    """conv and batch norm of the reference are one convolution of the target."""
    families: defaultdict[tuple[str, str], list[tuple[CallPair, Call, Call]]] = defaultdict(list)
    readers: defaultdict[int, list[Call]] = defaultdict(list)
    for call in editor.reference.calls:
        for ref in call.slots("input"):
            readers[ref.record].append(call)
    for pair in list(editor.pairs.values()):
        call, target_call = editor.calls(pair)
        outputs = call.slots("output")
        if len(outputs) != 1 or not call.slots("param") or editor.is_fixed(call.id):
            continue
        for norm in readers[outputs[0].record]:
            if norm.parent != call.parent or not any(n in norm.op_type.lower() for n in _NORMS):
                continue
            partner = editor.pairs.get(norm.id)
            if partner is None or not any(
                n in editor.target.calls[partner.target].op_type.lower() for n in _NORMS
            ):
                families[starred(call.scope), starred(target_call.scope)].append(
                    (pair, norm, target_call)
                )
    count = 0
    for members in families.values():
        if not any(_is_folded(editor, *m) for m in members[:READ]):
            continue
        for pair, norm, _ in members:
            count += _fold(editor, pair, norm)
    if count:
        editor.notes.append(
            f"{count} batch norms of the reference are folded into the layer before in the "
            "target: both are replayed together, "
            "and their parameters are not compared"
        )


def _is_folded(editor: PlanEditor, pair: CallPair, norm: Call, target_call: Call) -> bool:
    output = (
        editor.array("target", target_call.slots("output")[0].record)
        if target_call.slots("output")
        else None
    )
    call = editor.reference.calls[pair.reference]
    convolved = editor.array("reference", call.slots("output")[0].record)
    normed = (
        editor.array("reference", norm.slots("output")[0].record) if norm.slots("output") else None
    )
    if output is None or convolved is None or normed is None or output.shape != normed.shape:
        return False
    return clear_best([distance(normed, output), distance(convolved, output)]) == 0


def _fold(editor: PlanEditor, pair: CallPair, norm: Call) -> int:
    above = editor.pairs.get(editor.reference.calls[pair.reference].parent)
    if above is None or pair.reference not in editor.pairs:
        return 0
    used = editor.unpair(pair.reference) + (
        editor.unpair(norm.id) if norm.id in editor.pairs else []
    )
    editor.free_reference |= {pair.reference, norm.id}
    editor.attach(above.reference, used)
    return 1


def absorbed(editor: PlanEditor) -> None:
    """Activations of the target that do more: their output is a later one of the reference."""
    fuller: list[CallPair] = []
    partners_of = _partners_of(editor)
    families: defaultdict[tuple[str, str], list[tuple[CallPair, int, int, int]]] = defaultdict(list)
    for pair in editor.pairs.values():
        call, target_call = editor.calls(pair)
        outputs = [s for s in pair.slots if is_output(s.reference_slot)]
        if (
            len(outputs) != 1
            or editor.is_fixed(call.id)
            or call.slots("param")
            or target_call.slots("param")
            or editor.kids_reference.get(call.id)
        ):
            continue
        output, target_output = outputs[0].reference_record, outputs[0].target_record
        if call.op_type != target_call.op_type and _takes_more(editor, pair, "reference"):
            fuller.append(pair)
            continue
        later = [r for r in partners_of.get(target_output, ()) if not _are_one(editor, r, output)]
        if call.op_type != target_call.op_type and len(later) == 1:
            families[starred(call.scope), starred(target_call.scope)].append(
                (pair, output, later[0], target_output)
            )
    for (name, partner), members in families.items():
        if not _takes_more(editor, members[0][0], "target") and not any(
            _nearer(editor, later, output, target_output)
            for _, output, later, target_output in spread(members)
        ):
            continue
        for pair, *_ in members:
            above = editor.pairs.get(editor.reference.calls[pair.reference].parent)
            if above is not None:
                used = editor.unpair(pair.reference)
                editor.free_reference.add(pair.reference)
                editor.attach(above.reference, used)
        editor.notes.append(
            f"{partner} of the target does what follows {name} in the reference too: they are "
            "replayed together"
        )
    _as_elsewhere(editor, fuller)


def _are_one(editor: PlanEditor, record: int, other: int) -> bool:
    """Are two records of the reference one tensor, in another shape perhaps?"""
    return content_of(editor, "reference", record) == content_of(editor, "reference", other)


def _partners_of(editor: PlanEditor) -> dict[int, dict[int, None]]:
    """Records of the target, before a change of axes, -> their partners in order."""
    in_calls = {r.record for c in editor.target.calls for r in c.refs}

    def held(record: int) -> int:
        while record not in in_calls and record < len(editor.target.records):
            tensor = made_as(editor.target, record)
            if tensor is None or len(tensor.operands) != 1:
                break
            record = tensor.operands[0][1][0]
        return record

    out: defaultdict[int, dict[int, None]] = defaultdict(dict)
    calls = editor.reference.calls
    for pair in sorted(editor.pairs.values(), key=lambda p: calls[p.reference].order):
        for slot in pair.slots:
            if not is_param(slot.reference_slot):
                out[held(slot.target_record)][slot.reference_record] = None
    return out


def _takes_more(editor: PlanEditor, pair: CallPair, side: str) -> bool:
    """Does this side's call read a multiple of the other's elements, and so do more?"""
    inputs = [s for s in pair.slots if is_input(s.reference_slot)]
    inputs += [] if inputs else _unmatched_inputs(editor, pair)
    counts = [
        (
            editor.reference.records[s.reference_record].count,
            editor.target.records[s.target_record].count,
        )
        for s in inputs
    ]
    if len(counts) != 1:
        return False
    few, many = counts[0] if side == "target" else counts[0][::-1]
    return many > few > 0 and many % few == 0


def _unmatched_inputs(editor: PlanEditor, pair: CallPair) -> list[SlotPair]:
    call, target_call = editor.calls(pair)
    inputs, target_inputs = call.slots("input"), target_call.slots("input")
    return (
        [SlotPair(a.slot, b.slot, a.record, b.record) for a, b in zip(inputs, target_inputs)]
        if len(inputs) == len(target_inputs) == 1
        else []
    )


def _as_elsewhere(editor: PlanEditor, pairs: Sequence[CallPair]) -> None:
    """Pair the tensors of calls that do more than their partners with partners elsewhere."""
    partners = editor.partners({p.reference for p in pairs})
    for pair in pairs:
        call = editor.reference.calls[pair.reference]
        slots = [
            SlotPair(r.slot, partners[r.record][1], r.record, partners[r.record][0])
            for r in call.refs
            if r.record in partners
        ]
        if any(is_output(s.reference_slot) for s in slots):
            editor.set_slots(pair.reference, slots)


def _nearer(editor: PlanEditor, later: int, output: int, target_output: int) -> bool:
    """Is the target's tensor the later one of the reference's, and not the call's own output?"""
    arrays = (
        editor.array("reference", later),
        editor.array("reference", output),
        editor.array("target", target_output),
    )
    if any(a is None for a in arrays):
        return False
    a, b, y = (np.asarray(x) for x in arrays)
    if not a.size == b.size == y.size:
        return a.size == y.size and distance(a, y.reshape(a.shape)) < AGREES
    return clear_best([distance(a, y.reshape(a.shape)), distance(b, y.reshape(b.shape))]) == 0
