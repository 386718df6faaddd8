"""Pairs calls that are fused in one run and separate in the other: q, k, v and qkv; gate, up and
gate_up.

Parents, inputs and extents propose candidates. The rows of the weights confirm them; where no
weights can be compared, the outputs do. A part that is not found because it differs (a fault) is
placed as in other layers, or where the other parts leave room.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from whence import dtypes
from whence.align import dims as ex
from whence.align.call_sites import LastWriters
from whence.align.derived_run import made_as
from whence.align.layout import permutations
from whence.align.layout.distances import AGREES, clear_best, distance
from whence.align.layout.logits_outside import heads
from whence.align.layout.projection_groups import Group, extent, groups
from whence.align.layout.projection_groups import across as _across
from whence.align.layout.projection_places import Places, by_outputs, by_weights
from whence.align.module_names import starred
from whence.align.plan_editor import (
    MOST_PARTS,
    READ,
    PlanEditor,
    distinct,
    identifier,
    short,
    spread,
    voted,
)
from whence.dtypes import Array
from whence.records import Call, Ref, Run
from whence.records.slots import is_input, is_output, is_param, slot_kind
from whence.results import CallPair, Plan, SlotPair

RULE = "fused calls"


def fused(reference: Run, target: Run, plan: Plan) -> tuple[Run, Plan]:
    """Pair calls that are one call in one run and several in the other. Reads a few calls of each
    family of siblings.
    """
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
    """Note weights that cannot be compared because an engine packed them for its kernels and left
    the parameters empty.
    """

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
    """Groups of sibling calls in different layers. turned: whether the weights of whole and parts
    have their output channels along different axes. why: the evidence.
    """

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
            joined = [g for g in _surest_first(editor, family.groups) if _join(editor, g, family)]
            if joined:
                editor.notes.append(_sentence(joined[0], family))


def _surest_first(editor: PlanEditor, groups: Sequence[Group]) -> Sequence[Group]:
    """Of groups that want the same call, those first whose own weights say so."""
    wanted = Counter((c.scope, c.id) for g in groups for c in (*g.parts, g.whole))

    def is_doubtful(group: Group) -> bool:
        calls = (*group.parts, group.whole)
        has_rivals = any(wanted[c.scope, c.id] > 1 for c in calls)
        return has_rivals and by_weights(editor, group) is None

    return sorted(groups, key=is_doubtful)


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
    """Set where the parts of a family lie in the whole call, by majority over some of its
    groups.
    """
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
    """Pair the parts of a group with the whole call; False where one of them already has a final
    partner.
    """
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
    """The slots of a reference call that corresponds to a part of a fused target call."""
    width = extent(editor, "target", target_call)
    name = identifier(short(target_call))
    slots: list[SlotPair] = []
    records = target_call.by_slot
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
            # an empty, packed parameter has no part to take
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
    """The axis of a fused parameter along which its output channels lie; None where it has none."""
    if len(shape) != len(part_shape):
        return None
    part_extents = part_shape[::-1] if turned else part_shape
    extents = enumerate(zip(shape, part_extents, strict=True))
    return next((axis for axis, pair in extents if pair == (extent, part)), None)


def _whole(editor: PlanEditor, group: Group, family: _Family, evidence: str) -> None:
    """Pair a fused call of the reference with several calls of the target, whose tensors are
    joined.
    """
    call, count = group.whole, len(group.parts)
    first = sorted(range(count), key=lambda i: family.places[i][0])
    parts, places = [group.parts[i] for i in first], [family.places[i] for i in first]
    # `places` says where the parts' channels lie in the whole. Its inverse says which channel of
    # the joined parts each channel of the whole is.
    order = np.argsort(np.concatenate([np.array(p) for p in places]))
    slots: list[SlotPair] = []
    for ref in call.refs:
        records = [c.by_slot.get(ref.slot) for c in parts]
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
    """The record of the tensor that the parts' tensors form together; None where their shapes do
    not fit.
    """
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
        # The shape of a square weight does not tell the axis. The axis of the whole weight along
        # which the rows were found does.
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


# Parameters of one call of the reference that belong to several calls of the target (q, k, v).


def own_parameters(editor: PlanEditor) -> None:
    """Join parameters of several target calls into the parameter of the reference call that holds
    all of them (in_proj_weight of q, k, v); those calls then belong to its partner.
    """
    runs: dict[tuple[str, str], tuple[int, int] | None] = {}
    for pair in list(editor.pairs.values()):
        call, kids = editor.reference.calls[pair.reference], editor.kids_target.get(pair.target, [])
        fused_slots = [
            r
            for r in call.slots("param")
            if r.slot in pair.only_reference and len(editor.reference.records[r.record].shape) == 2
        ]
        if not fused_slots or len(kids) < 2 or editor.kids_reference.get(call.id):
            continue
        name = starred(call.scope), fused_slots[0].slot
        if runs.get(name) is None:
            runs[name] = _run_of_kids(editor, fused_slots[0].record, kids)
        chosen = runs[name]
        if chosen is None or chosen[1] > len(kids):
            continue
        parts = [editor.target.calls[k] for k in kids[slice(*chosen)]]
        names = distinct([identifier(short(c)) for c in parts])
        slots = list(pair.slots)
        for ref in call.slots("param"):
            kind = ref.slot.rpartition("_")[2]  # in_proj_weight, in_proj_bias
            bound = {
                n: [r.record for r in c.slots("param") if r.slot == f"param.{kind}"]
                for n, c in zip(names, parts)
            }
            if ref.slot not in pair.only_reference or any(len(ids) != 1 for ids in bound.values()):
                continue
            node = ex.Cat(tuple(ex.Name(n) for n in names), 0)
            shape = editor.reference.records[ref.record].shape
            shapes = {n: [editor.target.records[r].shape for r in ids] for n, ids in bound.items()}
            if (
                all(len(s[0]) == len(shape) for s in shapes.values())
                and node.shape(shapes) == shape
            ):
                record = editor.derived.add(node, bound, "rows found by their elements")
                slots.append(
                    SlotPair(ref.slot, f"{parts[0].scope}:param.{kind}", ref.record, record)
                )
        if len(slots) > len(pair.slots):
            editor.set_slots(call.id, slots)
            editor.attach(call.id, [k for k in kids if k in editor.free_target])


def _run_of_kids(editor: PlanEditor, record: int, kids: Sequence[int]) -> tuple[int, int] | None:
    """(first, stop) among `kids` of the consecutive calls whose joined weights have the most rows
    in common with this one.
    """
    whole = editor.array("reference", record)
    if whole is None:
        return None
    weights = [
        next(
            (
                r.record
                for r in editor.target.calls[k].slots("param")
                if len(editor.target.records[r.record].shape) == 2
            ),
            None,
        )
        for k in kids
    ]
    for count in range(2, MOST_PARTS + 1):
        for first in range(len(kids) - count + 1):
            parts = [editor.array("target", w) for w in weights[first : first + count]]
            joined = [p for p in parts if p is not None and p.shape[1] == whole.shape[1]]
            if len(joined) == count and sum(map(len, joined)) == len(whole):
                rows = permutations.located(whole, np.concatenate(joined))
                if rows is not None and (rows[rows >= 0] == np.flatnonzero(rows >= 0)).all():
                    return first, first + count
    return None


# Calls of the target that do more than the reference calls of the same name: a convolution with a
# folded norm, an activation that multiplies too.
#
# The output of such a call corresponds to a later output of the reference. The reference calls in
# between have no partner; they are replayed together, between tensors that both runs show.

_NORMS = ("batchnorm", "batch_norm")


def folded(editor: PlanEditor) -> None:
    """Pair one target convolution with a convolution and its batch norm in the reference."""
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
    """Pair activations of the target that do more with the later output of the reference that
    corresponds.
    """
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
    """Whether two records of the reference hold the same elements, perhaps in different shapes."""
    return content_of(editor, "reference", record) == content_of(editor, "reference", other)


def _partners_of(editor: PlanEditor) -> dict[int, dict[int, None]]:
    """Records of the target, before any change of axes, mapped to their partners in execution
    order.
    """
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
    """Whether this side's call reads a whole multiple of the elements that its partner reads, and
    so does more.
    """
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
    """Pair the tensors of calls that do more than their partners with the partners these tensors
    have in other calls.
    """
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
    """Whether the target's output is nearer to the later output of the reference than to the output
    of the call's own partner.
    """
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


# Fused calls of the target in dumps of graphs: which of their inputs belong to reference calls that
# come before the call of the same name.
#
# A kernel that normalises, scales and adds is recorded as the addition. It reads the inputs of the
# first operator it carries out, in slots where the reference's addition reads the results of the
# operators in between. Paired by slot, the two inputs would differ by all that these operators do.

Content = str | int
"""Identifies the elements of a record, whatever its shape: their hash, or the record itself."""


def content_of(editor: PlanEditor, side: str, record: int) -> Content:
    """The hash of a record's elements, or its number without one. side: of the record; records
    derived from the target's are included.
    """
    return editor.record(side, record).hash or record


def part_inputs(editor: PlanEditor) -> None:
    """Remove inputs of fused target calls from the pairs where unpaired reference calls before the
    partner read these tensors.

    The output of the fused call stays paired with its partner's output. They may differ by a fault:
    a scale that was left out, for example, shows there.
    """
    if not editor.free_reference:
        return
    makers = LastWriters(
        (call, content_of(editor, "reference", ref.record))
        for call in editor.reference.calls
        if call.leaf
        for ref in call.slots("output")
    )
    same = _same_contents(editor)
    for pair in list(editor.pairs.values()):
        call, partner = editor.calls(pair)
        before = _before(editor, call, makers)
        if not call.leaf or editor.is_fixed(call.id) or not before.read:
            continue
        own = {ref.slot: content_of(editor, "reference", ref.record) for ref in call.refs}
        fused = set()
        for ref in partner.slots("input"):
            alike = same[tensor := content_of(editor, "target", ref.record)] | {tensor}
            across = {own[s.reference_slot] for s in pair.slots if s.target_slot == ref.slot}
            if alike & before.read and not alike & across:
                fused.add(ref.slot)
        if fused and _makes_the_same(editor, pair):
            # these inputs are not left over: they belong to the calls before
            editor.pairs[call.id] = replace(
                pair,
                slots=tuple(
                    s
                    for s in pair.slots
                    if not (is_input(s.reference_slot) and s.target_slot in fused)
                ),
                only_reference=tuple(
                    s for s in pair.only_reference if not (is_input(s) and own[s] in before.made)
                ),
                only_target=tuple(s for s in pair.only_target if s not in fused),
            )


def _makes_the_same(editor: PlanEditor, pair: CallPair) -> bool:
    """Whether the outputs of a pair are roughly the same. False where elements are missing."""
    outputs = [slot for slot in pair.slots if is_output(slot.reference_slot)]
    return bool(outputs) and all(
        _are_alike(
            editor.array("reference", slot.reference_record),
            editor.array("target", slot.target_record),
        )
        for slot in outputs
    )


def _are_alike(reference: Array | None, target: Array | None) -> bool:
    """Whether two tensors agree on the elements that differ at all; equal fill values of a mask
    would hide the difference.
    """
    if reference is None or target is None or reference.size != target.size:
        return False
    a, b = reference.reshape(-1), target.reshape(-1)
    differs = a != b
    return not differs.any() or distance(a[differs], b[differs]) < AGREES


class _Before(NamedTuple):
    """What the unpaired calls that lead into a call read, and what they make."""

    read: set[Content]
    made: set[Content]


def _before(editor: PlanEditor, call: Call, makers: LastWriters) -> _Before:
    before = _Before(set(), set())
    visited: set[int] = set()
    todo = [call]
    while todo:
        reader = todo.pop()
        contents = {content_of(editor, "reference", r.record) for r in reader.slots("input")}
        if reader is not call:
            before.read.update(contents)
        for content in contents:
            # of several calls that made equal tensors (a sum with zeros), the last before the
            # reader
            maker = makers.before(reader, content)
            if maker is None or maker.id not in editor.free_reference:
                continue
            before.made.add(content)
            if maker.id not in visited:
                visited.add(maker.id)
                todo.append(maker)
    return before


def _same_contents(editor: PlanEditor) -> Mapping[Content, set[Content]]:
    """Contents of the target mapped to the contents of the reference that are outputs of paired
    calls.
    """
    same: defaultdict[Content, set[Content]] = defaultdict(set)
    for pair in editor.pairs.values():
        for slot in pair.slots:
            if is_output(slot.reference_slot):
                tensor = content_of(editor, "target", slot.target_record)
                same[tensor].add(content_of(editor, "reference", slot.reference_record))
    return same


# A residual stream that one run keeps as one tensor and the other as two, to be added later:
# `hidden + residual`.
#
# Serving engines pass both through the layers and add them inside the next norm, in place.

_MOST = 4  # tensors of one call that are tried at most

Chosen = tuple[int, ...]  # which of the target's tensors are added


class _Place(NamedTuple):
    """A tensor of one call of a pair, and the (slot, record) of the other call's tensors of which
    it may be one, or the sum of two. call: id of the reference's call.
    """

    call: int
    slot: str
    record: int
    fits: tuple[tuple[str, int], ...]


def streams(editor: PlanEditor) -> None:
    """Where a call has more tensors of one size than its partner, choose the tensor, or the sum of
    two, that corresponds to the partner's.
    """
    decided = _decided(editor, "target")
    _set_sums(editor, decided)
    sums = sum(len(picked) > 1 for _, picked in decided)
    if sums:
        editor.notes.append(
            f"{sums} tensors of the reference are sums of two of the target (a residual kept apart)"
        )
    _split_reference(editor)


def _decided(editor: PlanEditor, many: str) -> list[tuple[_Place, Chosen]]:
    """The choice for every place that can be decided. many: the side that has more tensors.

    Where a fault hides the answer in the data, the choice follows calls of the same classes
    elsewhere, then the sum already chosen for the same tensor at another call.
    """
    families: defaultdict[tuple[object, ...], list[_Place]] = defaultdict(list)
    for place in _places(editor, many):
        call, target_call = _calls(editor, place)
        shape = editor.run(_across(many)).records[place.record].shape
        families[
            starred(call.scope),
            starred(target_call.scope),
            place.slot,
            tuple(n for n, _ in place.fits),
            shape,
        ].append(place)
    chosen = {key: _chosen(editor, places, many) for key, places in families.items()}
    by_kind: defaultdict[tuple[object, ...], Counter[Chosen]] = defaultdict(Counter)
    for key, picked in chosen.items():
        if picked is not None:
            by_kind[_kind(editor, families[key][0])][picked] += 1
    out: list[tuple[_Place, Chosen]] = []
    undecided: list[_Place] = []
    for key, places in families.items():
        alike = by_kind.get(_kind(editor, places[0]))
        picked = chosen[key] or (alike.most_common(1)[0][0] if alike else None)
        if picked is None:
            undecided += places
        else:
            out += [(place, picked) for place in places]
    sums = {
        (place.record, frozenset(place.fits[i][1] for i in picked))
        for place, picked in out
        if len(picked) > 1
    }
    for place in undecided:
        pairs = itertools.combinations(range(len(place.fits)), 2)
        addends = next(
            (
                pair
                for pair in pairs
                if (place.record, frozenset(place.fits[i][1] for i in pair)) in sums
            ),
            None,
        )
        out += [(place, addends)] if addends is not None else []
    return out


def _places(editor: PlanEditor, many: str) -> Iterator[_Place]:
    few = _across(many)
    records = {side: editor.run(side).records for side in (few, many)}
    for pair in editor.pairs.values():
        has_more = pair.only_target if many == "target" else pair.only_reference
        if not has_more or editor.is_fixed(pair.reference):
            continue
        calls = dict(zip(("reference", "target"), editor.calls(pair)))
        for kind in ("input", "output"):
            candidates = _floats(editor, many, calls[many], kind)
            if len(candidates) < 2:
                continue
            tensors = _floats(editor, few, calls[few], kind)
            counts = Counter(records[few][record].count for _, record in tensors)
            for slot, record in tensors:
                count = records[few][record].count
                fits = tuple(t for t in candidates if records[many][t[1]].count == count)
                if max(1, counts[count]) < len(fits) <= _MOST:
                    yield _Place(pair.reference, slot, record, fits)


def _floats(editor: PlanEditor, side: str, call: Call, kind: str) -> list[tuple[str, int]]:
    records = [(r.slot, editor.run(side).records[r.record]) for r in call.slots(kind)]
    return [
        (slot, record.id)
        for slot, record in records
        if dtypes.is_floating(record.dtype) and record.count > 1
    ]


def _calls(editor: PlanEditor, place: _Place) -> tuple[Call, Call]:
    return editor.calls(editor.pairs[place.call])


def _kind(editor: PlanEditor, place: _Place) -> tuple[object, ...]:
    call, target_call = _calls(editor, place)
    return call.op_type, target_call.op_type, place.slot, tuple(name for name, _ in place.fits)


def _chosen(editor: PlanEditor, places: Sequence[_Place], many: str) -> Chosen | None:
    """Which tensor, or sum of two, equals the other side's tensor, by data of a few siblings."""
    count = len(places[0].fits)
    candidates: list[Chosen] = [
        *((i,) for i in range(count)),
        *itertools.combinations(range(count), 2),
    ]

    def nearest(place: _Place) -> int | None:
        tensor = editor.array(_across(many), place.record)
        arrays = [editor.array(many, r) for _, r in place.fits]
        if tensor is None or any(t is None for t in arrays):
            return None
        flat = [np.asarray(t).reshape(tensor.shape).astype(np.float64) for t in arrays]
        return clear_best(
            [distance(tensor, np.sum([flat[i] for i in chosen], axis=0)) for chosen in candidates]
        )

    best = voted(places, nearest)
    return candidates[best] if best is not None else None


def _set_sums(editor: PlanEditor, chosen: Iterable[tuple[_Place, Chosen]]) -> None:
    """Pair the slot of the reference with the chosen tensor or sum."""
    for (call, slot, record, fits), picked in chosen:
        bound = {identifier(fits[i][0]): [fits[i][1]] for i in picked}
        node: ex.Node = (
            ex.Name(next(iter(bound)))
            if len(picked) == 1
            else ex.Sum(tuple(ex.Name(n) for n in bound))
        )
        try:
            new_record = editor.derived.add(
                node, bound, "streams whose sum is the reference's one; confirmed on data"
            )
        except ex.Unfit:
            continue
        used = {fits[i][0] for i in picked}
        unchanged = [
            s
            for s in editor.pairs[call].slots
            if s.reference_slot != slot and s.target_slot not in used
        ]
        editor.set_slots(call, [*unchanged, SlotPair(slot, fits[picked[0]][0], record, new_record)])


# ---- the reference keeps two


def _split_reference(editor: PlanEditor) -> None:
    """Where the reference has more tensors, pair them with the partners they have in other calls,
    or with equal tensors.
    """
    split: defaultdict[int, set[str]] = defaultdict(set)
    for place, picked in _decided(editor, "reference"):
        if len(picked) > 1:
            split[place.call].add(slot_kind(place.slot))
    if not split:
        return
    dropped = {
        call: [
            s
            for s in editor.pairs[call].slots
            if slot_kind(s.reference_slot) not in (*kinds, "mutated")
        ]
        for call, kinds in split.items()
    }
    for call, slots in dropped.items():
        editor.set_slots(call, slots)
    alike = _alike(editor, split)
    # The output of a leaf lies in its partner's call. Its input may appear only in the call that
    # made it.
    leaves = [call for call in split if editor.reference.calls[call].leaf]
    for calls, kinds_now in (
        (leaves, ("output",)),
        (split, ("input", "output", "mutated")),
        (split, ("input", "output", "mutated")),
    ):
        partners = editor.partners()
        for call in calls:
            pair = editor.pairs[call]
            slots = list(pair.slots)
            for slot, record in _all_floats(editor, "reference", editor.reference.calls[call]):
                if slot in pair.only_reference and slot.startswith(kinds_now):
                    partner = partners.get(record) or alike.get((call, slot))
                    slots += (
                        [SlotPair(slot, partner[1], record, partner[0])]
                        if partner is not None
                        else []
                    )
            editor.set_slots(call, slots)
    editor.notes.append(
        f"{len(split)} calls of the reference get the residual as an input of its own, which the "
        "target has added: each summand is paired with its own"
    )


def _alike(
    editor: PlanEditor, split: Mapping[int, set[str]]
) -> dict[tuple[int, str], tuple[int, str]]:
    """The tensor of the target's call that each reference slot corresponds to, decided by data for
    siblings together: (call, slot) -> (record, slot).
    """
    families: defaultdict[tuple[object, ...], list[_Place]] = defaultdict(list)
    for call in split:
        pair = editor.pairs[call]
        reference_call, target_call = editor.reference.calls[call], editor.target.calls[pair.target]
        for slot, record in _all_floats(editor, "reference", reference_call):
            count = editor.reference.records[record].count
            fits = tuple(
                (n, r)
                for n, r in _all_floats(editor, "target", target_call)
                if editor.target.records[r].count == count
            )
            if slot in pair.only_reference and fits:
                families[
                    reference_call.op_type, target_call.op_type, slot, tuple(n for n, _ in fits)
                ].append(_Place(call, slot, record, fits))
    out: dict[tuple[int, str], tuple[int, str]] = {}

    def nearest(member: _Place) -> int | None:
        array = editor.array("reference", member.record)
        arrays = [editor.array("target", r) for _, r in member.fits]
        if array is None or any(t is None for t in arrays):
            return None
        return clear_best([distance(array, np.asarray(t).reshape(array.shape)) for t in arrays])

    for members in families.values():
        if (best := voted(members, nearest)) is not None:
            out.update(((m.call, m.slot), m.fits[best][::-1]) for m in members)
    return out


def _all_floats(editor: PlanEditor, side: str, call: Call) -> list[tuple[str, int]]:
    return [
        tensor
        for kind in ("input", "output", "mutated")
        for tensor in _floats(editor, side, call, kind)
    ]
