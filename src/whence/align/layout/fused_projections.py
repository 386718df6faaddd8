"""Calls that are several in one run and one in the other: q, k, v and qkv; gate, up and gate_up.

Parents, inputs and extents propose; the rows of the weights confirm, and where there are none to
compare, the outputs do. A part that is not found because it differs (a fault) is placed by its
siblings in other layers, or by what the other parts leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from whence.align import dims as ex
from whence.align.layout import permutations
from whence.align.layout.calls_before import part_inputs
from whence.align.layout.folded_norms import absorbed, folded
from whence.align.layout.logits_outside import heads
from whence.align.layout.own_parameters import own_parameters
from whence.align.layout.projection_groups import Group, extent, groups
from whence.align.layout.projection_places import Places, by_outputs, by_weights
from whence.align.layout.residual_streams import streams
from whence.align.module_names import starred
from whence.align.plan_editor import PlanEditor, distinct, identifier, short, spread
from whence.records import Call, Ref, Run
from whence.records.slots import is_param, slot_kind
from whence.results import CallPair, Plan, SlotPair

RULE = "fused calls"


def fused(reference: Run, target: Run, plan: Plan) -> tuple[Run, Plan]:
    """Pair calls that are one in one run and several in the other. Reads a few of each family."""
    editor = PlanEditor(reference, target, plan)
    _join_projections(editor)
    own_parameters(editor)
    folded(editor)
    absorbed(editor)
    part_inputs(editor)
    streams(editor)
    heads(editor)
    _packed(editor)
    return editor.done()


def _packed(editor: PlanEditor) -> None:
    """Note weights that cannot be compared: packed for kernels and left empty by an engine."""

    def is_empty(slot: SlotPair) -> bool:
        of = editor.reference.records[slot.reference_record]
        return (
            is_param(slot.reference_slot)
            and of.count > editor.record("target", slot.target_record).count == 0
        )

    names = dict.fromkeys(
        editor.reference.calls[p.reference].scope
        for p in editor.pairs.values()
        if any(map(is_empty, p.slots))
    )
    if names:
        editor.notes.append(
            f"parameters of {len(names)} modules are empty in the target (packed by its engine): "
            "they are not compared, and the "
            "reference's are used instead"
        )


@dataclass(slots=True)
class _Family:
    """Groups of siblings. turned: have whole and parts other axes of outputs? why: the proof."""

    groups: list[Group] = field(default_factory=list)
    places: Places = ()
    turned: bool = False
    why: str = ""


def _join_projections(editor: PlanEditor) -> None:
    families: dict[tuple[object, ...], _Family] = {}
    for group in groups(editor):
        key = (
            tuple(starred(c.scope) for c in group.parts),
            starred(group.whole.scope),
            group.parts_side,
            tuple(extent(editor, group.parts_side, c) for c in group.parts),
        )
        families.setdefault(key, _Family()).groups.append(group)
    for family in families.values():
        _decide(editor, family)
    # What weights prove comes before what activations suggest.
    for family in sorted(families.values(), key=lambda f: not f.why.startswith("weights")):
        if family.places:
            joined = [group for group in family.groups if _join(editor, group, family)]
            if joined:
                editor.notes.append(_sentence(joined[0], family))


def _sentence(group: Group, family: _Family) -> str:
    first, whole = starred(group.parts[0].scope), starred(group.whole.scope)
    names = _and([first, *(short(c) for c in group.parts[1:])])
    if group.parts_side == "reference":
        return f"{names} are {whole} of the target ({family.why})"
    return f"{whole} is {names} of the target ({family.why})"


def _and(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _decide(editor: PlanEditor, family: _Family) -> None:
    """Where the parts of a family lie in the whole, by votes of a few of its groups."""
    read = spread(family.groups)
    votes: Counter[tuple[Places, bool]] = Counter()
    row_counts: Counter[tuple[Places, bool]] = Counter()
    for group in read:
        located = by_weights(editor, group)
        if located is not None:
            votes[located[:2]] += 1
            row_counts[located[:2]] = max(row_counts[located[:2]], located[2])
    if votes:
        best = max(votes, key=lambda way: (votes[way], row_counts[way]))
        family.places, family.turned = best
        total = sum(map(len, family.places))
        family.why = f"weights: {row_counts[best]} of {total} rows found by their elements"
        return
    by_place = Counter(p for group in read if (p := by_outputs(editor, group)) is not None)
    if by_place:
        family.places = by_place.most_common(1)[0][0]
        family.why = "outputs: confirmed on data"


def _join(editor: PlanEditor, group: Group, family: _Family) -> bool:
    """Pair the parts of a group with the whole; False where one of them has a partner already."""
    calls = [(group.parts_side, c) for c in group.parts] + [(group.whole_side, group.whole)]
    if not all(_is_free(editor, side, call) for side, call in calls):
        return False
    for side, call in calls:
        editor.release(side, call)
    names = _and([short(c) for c in group.parts])
    if group.parts_side == "reference":
        evidence = f"{names} are {short(group.whole)} of the target; {family.why}"
        for part, places in zip(group.parts, family.places, strict=True):
            slots = _part(editor, part, group.whole, np.array(places), family.turned, evidence)
            _pair(editor, part, group.whole, slots, evidence)
    else:
        _whole(
            editor, group, family, f"{short(group.whole)} is {names} of the target; {family.why}"
        )
    return True


def _is_free(editor: PlanEditor, side: str, call: Call) -> bool:
    if side == "target":
        return not any(_is_final(editor, k) for k in editor.paired_with[call.id])
    is_unpaired = call.id in editor.free_reference or call.id in editor.ambiguous
    return is_unpaired or not _is_final(editor, call.id)


def _is_final(editor: PlanEditor, call: int) -> bool:
    return editor.pairs[call].rule == RULE or editor.is_fixed(call)


def _part(
    editor: PlanEditor,
    call: Call,
    target_call: Call,
    places: permutations.Order,
    turned: bool,
    evidence: str,
) -> list[SlotPair]:
    """The slots of a call of the reference, made of a part of one of the target."""
    width = extent(editor, "target", target_call)
    name = identifier(short(target_call))
    slots: list[SlotPair] = []
    records = {r.slot: r.record for r in target_call.refs}
    for ref in (r for r in call.refs if r.slot in records):
        record = records[ref.slot]
        shape, kind = editor.derived.record(record).shape, slot_kind(ref.slot)
        along = None
        if kind == "param":
            part_shape = editor.reference.records[ref.record].shape
            along = _along(shape, part_shape, width, len(places), turned)
        elif kind == "output" and shape and shape[-1] == width:
            along = len(shape) - 1
        if along is None:
            # packed away: nothing to take a part of
            if kind == "input" or not editor.derived.record(record).count:
                slots.append(SlotPair(ref.slot, ref.slot, ref.record, record))
            continue
        node = permutations.taken(ex.Name(name), shape, along, places)
        if kind == "param" and turned and len(shape) == 2:
            node = ex.Reverse(node)
        derived = editor.derived.add(node, {name: [record]}, evidence)
        slots.append(SlotPair(ref.slot, ref.slot, ref.record, derived))
    return slots


def _along(
    shape: tuple[int, ...], part_shape: tuple[int, ...], extent: int, part: int, turned: bool
) -> int | None:
    """The axis of a fused parameter that its outputs lie along, None where it has none."""
    if len(shape) != len(part_shape):
        return None
    part_extents = part_shape[::-1] if turned else part_shape
    extents = enumerate(zip(shape, part_extents, strict=True))
    return next((axis for axis, pair in extents if pair == (extent, part)), None)


def _whole(editor: PlanEditor, group: Group, family: _Family, evidence: str) -> None:
    """Pair a call of the reference with several of the target, put together."""
    call, count = group.whole, len(group.parts)
    first = sorted(range(count), key=lambda i: family.places[i][0])
    parts, places = [group.parts[i] for i in first], [family.places[i] for i in first]
    # places say where the parts' channels lie in the whole: turned round, which of the joined
    # parts each channel of the whole is.
    order = np.argsort(np.concatenate([np.array(p) for p in places]))
    slots: list[SlotPair] = []
    for ref in call.refs:
        records = [next((r.record for r in c.refs if r.slot == ref.slot), None) for c in parts]
        if slot_kind(ref.slot) == "input":
            record = records[0]
        else:
            ids = [r for r in records if r is not None]
            record = None
            if len(ids) == count:
                record = _joined(editor, ref, parts, ids, order, family.turned, evidence)
        if record is not None:
            slots.append(SlotPair(ref.slot, ref.slot, ref.record, record))
    _pair(editor, call, parts[0], slots, evidence, tuple(c.id for c in parts[1:]))


def _joined(
    editor: PlanEditor,
    ref: Ref,
    parts: Sequence[Call],
    records: Sequence[int],
    order: permutations.Order,
    turned: bool,
    evidence: str,
) -> int | None:
    """The tensor that the parts' tensors make together; None where their shapes do not fit."""
    extents = [extent(editor, "target", c) for c in parts]
    shapes = [editor.derived.record(r).shape for r in records]
    dims, is_weight = len(shapes[0]), is_param(ref.slot)
    whole = editor.reference.records[ref.record]
    if any(len(s) != dims for s in shapes) or not dims or (is_weight and not whole.count):
        return None
    axes = [
        a for a in (range(dims) if is_weight else [dims - 1]) if [s[a] for s in shapes] == extents
    ]
    if is_weight and dims == 2:
        # Of a square weight shapes do not tell; the axis of the whole's weight does, by which the
        # rows were found.
        axes = [a for a in axes if whole.shape[1 - a if turned else a] == sum(extents)]
    if not axes:
        return None
    axis, names = axes[0], distinct([identifier(short(c)) for c in parts])
    joined = ex.Cat(tuple(ex.Name(n) for n in names), -1 if axis == dims - 1 else axis)
    shape = (*shapes[0][:axis], sum(extents), *shapes[0][axis + 1 :])
    try:
        node = permutations.taken(joined, shape, axis, order)
        if is_weight and turned and dims == 2:
            node = ex.Reverse(node)
        return editor.derived.add(node, {n: [r] for n, r in zip(names, records)}, evidence)
    except ex.Unfit:
        return None


def _pair(
    editor: PlanEditor,
    call: Call,
    target_call: Call,
    slots: Sequence[SlotPair],
    evidence: str,
    also: tuple[int, ...] = (),
) -> None:
    editor.add(CallPair(call.id, target_call.id, RULE, evidence, (), (), (), also))
    editor.set_slots(call.id, slots)
