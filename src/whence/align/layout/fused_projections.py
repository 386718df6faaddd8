"""Calls that are several in one run and one in the other: q, k, v and qkv; gate, up and gate_up.

Parents, inputs and extents propose; the rows of the weights confirm, and where there are none to
compare, the outputs do. A part that is not found because it differs (a fault) is placed by its
siblings in other layers, or by what the other parts leave.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from whence.align import dims as ex
from whence.align.layout import permutations
from whence.align.layout.distances import clear_best, distance
from whence.align.layout.folded_norms import absorbed, folded
from whence.align.layout.logits_outside import heads
from whence.align.layout.residual_streams import streams
from whence.align.module_names import starred
from whence.align.plan_editor import MOST_PARTS, PlanEditor, distinct, identifier, short, spread
from whence.dtypes import Array
from whence.records import Call, Run
from whence.records.marks import is_unplaced
from whence.records.slots import is_param, slot_kind
from whence.results import CallPair, Plan, SlotPair

RULE = "fused calls"

Places = tuple[tuple[int, ...], ...]  # of each part: where its channels lie in the whole


def fused(reference: Run, target: Run, plan: Plan) -> tuple[Run, Plan]:
    """Pair what is one call in one run and several in the other. Elements are read of few of every
    family of siblings.
    """
    editor = PlanEditor(reference, target, plan)
    _Projections(editor).join()
    own_parameters(editor)
    folded(editor)
    absorbed(editor)
    streams(editor)
    heads(editor)
    _packed(editor)
    return editor.done()


def _packed(editor: PlanEditor) -> None:
    """Tell what cannot be compared: weights that an engine has laid out anew for its kernels and
    left empty.
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
            "reference's stand in for them"
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Calls that together may be one. parts: of the run that keeps them apart, in order of
    execution.
    """

    parts: tuple[Call, ...]
    whole: Call
    parts_side: str  # "reference" or "target"


@dataclass(slots=True)
class _Family:
    groups: list[_Group] = field(default_factory=list)
    places: Places | None = None
    turned: bool = False
    why: str = ""


class _Projections:
    def __init__(self, editor: PlanEditor) -> None:
        self.editor = editor

    def join(self) -> None:
        families: dict[tuple[object, ...], _Family] = {}
        for group in self._groups():
            key = (
                tuple(starred(c.scope) for c in group.parts),
                starred(group.whole.scope),
                group.parts_side,
                tuple(self._extent(group.parts_side, c) for c in group.parts),
            )
            families.setdefault(key, _Family()).groups.append(group)
        for family in families.values():
            self._decide(family)
        # What weights prove comes before what activations suggest.
        for family in sorted(families.values(), key=lambda f: not f.why.startswith("weights")):
            if family.places is not None:
                joined = [group for group in family.groups if self._join(group, family)]
                if joined:
                    self.editor.notes.append(self._told(joined[0], family))

    def _told(self, group: _Group, family: _Family) -> str:
        parts = [short(c) for c in group.parts]
        first, whole = starred(group.parts[0].scope), starred(group.whole.scope)
        names = _and([first, *parts[1:]])
        if group.parts_side == "reference":
            return f"{names} are {whole} of the target ({family.why})"
        return f"{whole} is {names} of the target ({family.why})"

    def _groups(self) -> Iterator[_Group]:
        loose = [p for p in self.editor.pairs.values() if self._loose(p)]
        free = {i for i in self.editor.free_reference if self._leaf("reference", i)} | {
            p.reference for p in loose
        }
        target_free = {i for i in self.editor.free_target if self._leaf("target", i)} | {
            p.target for p in loose
        }
        free.update(self.editor.ambiguous)
        target_free.update(call for others in self.editor.ambiguous.values() for call in others)
        if not free or not target_free:
            return
        under: defaultdict[int, tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
        for i in free:
            under[self._above("reference", i, self.editor.pairs)][0].append(
                self.editor.reference.calls[i]
            )
        for i in target_free:
            above = self._above("target", i, self.editor.paired_with)
            for parent in self.editor.paired_with[above] if above >= 0 else [-1]:
                under[parent][1].append(self.editor.target.calls[i])
        for calls, target_calls in under.values():
            yield from self._sums_of("reference", calls, target_calls)
            yield from self._sums_of("target", target_calls, calls)

    def _leaf(self, side: str, call: int) -> bool:
        return not (
            self.editor.kids_reference if side == "reference" else self.editor.kids_target
        ).get(call)

    def _above(self, side: str, call: int, paired: Container[int]) -> int:
        calls = self.editor.reference.calls if side == "reference" else self.editor.target.calls
        parent = calls[call].parent
        while parent >= 0 and parent not in paired:
            parent = calls[parent].parent
        return parent

    def _loose(self, pair: CallPair) -> bool:
        """Two leaves that were paired although one makes more than the other."""
        if self.editor.is_fixed(pair.reference):
            return False
        call, target_call = (
            self.editor.reference.calls[pair.reference],
            self.editor.target.calls[pair.target],
        )
        if not (self._leaf("reference", call.id) and self._leaf("target", target_call.id)):
            return False
        a, b = self._extent("reference", call), self._extent("target", target_call)
        if not a or not b or a == b:
            return False
        weights = self._weight("reference", call), self._weight("target", target_call)
        counts = [
            self.editor.record(s, w).count if w is not None else n
            for s, w, n in zip(("reference", "target"), weights, (a, b))
        ]
        return 3 * min(counts) <= 2 * max(counts)

    def _sums_of(
        self, side: str, parts: Sequence[Call], wholes: Sequence[Call]
    ) -> Iterator[_Group]:
        """Neighbours that read one tensor, whose outputs are together as wide as one call's of the
        other run.
        """
        by_input: defaultdict[object, list[Call]] = defaultdict(list)
        for call in sorted(parts, key=lambda c: c.order):
            inputs = call.slots("input")
            if inputs and self._extent(side, call):
                by_input[inputs[0].record].append(call)
        counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for whole in sorted(wholes, key=lambda c: c.order):
            extent = self._extent("target" if side == "reference" else "reference", whole)
            for members in by_input.values():
                for count in range(2, MOST_PARTS + 1):
                    for first in range(len(members) - count + 1):
                        chosen = tuple(members[first : first + count])
                        if not extent or sum(self._extent(side, c) for c in chosen) != extent:
                            continue
                        # One module called many times under one parent: the k-th time faces the
                        # k-th.
                        name = whole.scope, tuple(c.scope for c in chosen)
                        if {c.occurrence for c in chosen} == {whole.occurrence} or not counts[name]:
                            counts[name] += 1
                            yield _Group(chosen, whole, side)

    def _extent(self, side: str, call: Call) -> int:
        """How many channels a call makes, 0 where that is not one number."""
        outputs = call.slots("output")
        if not outputs:
            return 0
        output = self.editor.record(side, outputs[0].record)
        return output.shape[-1] if len(output.shape) > 1 and not is_unplaced(output) else 0

    def _weight(self, side: str, call: Call) -> int | None:
        return next(
            (
                r.record
                for r in call.slots("param")
                if len(self.editor.record(side, r.record).shape) == 2
            ),
            None,
        )

    def _decide(self, family: _Family) -> None:
        read = spread(family.groups)
        votes: Counter[tuple[Places, bool]] = Counter()
        row_counts: Counter[tuple[Places, bool]] = Counter()
        for group in read:
            located = self._by_weights(group)
            if located is not None:
                votes[located[:2]] += 1
                row_counts[located[:2]] = max(row_counts[located[:2]], located[2])
        if votes:
            (family.places, family.turned), _ = max(
                votes.items(), key=lambda v: (v[1], row_counts[v[0]])
            )
            family.why = (
                f"weights: {row_counts[family.places, family.turned]} of "
                f"{sum(map(len, family.places))} rows found by their elements"
            )
            return
        by_outputs: Counter[Places] = Counter()
        for group in read:
            places = self._by_outputs(group)
            if places is not None:
                by_outputs[places] += 1
        if by_outputs:
            family.places = by_outputs.most_common(1)[0][0]
            family.why = "outputs: confirmed on data"

    def _by_weights(self, group: _Group) -> tuple[Places, bool, int] | None:
        """(places of the parts' rows in the whole's weight, does the whole keep its outputs along
        another axis?, rows found).
        """
        whole_side = "target" if group.parts_side == "reference" else "reference"
        whole = self.editor.array(whole_side, self._weight(whole_side, group.whole))
        parts = [
            self.editor.array(group.parts_side, self._weight(group.parts_side, c))
            for c in group.parts
        ]
        if whole is None or any(p is None for p in parts):
            return None
        extents = [self._extent(group.parts_side, c) for c in group.parts]
        best: tuple[Places, bool, int] | None = None
        for turned_parts, turned in itertools.product((False, True), repeat=2):
            source = whole.T if turned else whole
            weights = [p.T if turned_parts else p for p in parts if p is not None]
            if (
                [len(p) for p in weights] != extents
                or len(source) != sum(extents)
                or any(p.shape[1] != source.shape[1] for p in weights)
            ):
                continue
            orders = [permutations.located(p, source) for p in weights]
            rows = sum(int(np.count_nonzero(f >= 0)) for f in orders if f is not None)
            places = self._filled(orders, extents)
            if places is not None and any(
                f is None and self._is_elsewhere(group, p)
                for f, p in zip(orders, weights, strict=True)
            ):
                continue
            if places is not None and (best is None or rows > best[2]):
                best = places, turned != turned_parts, rows
        return best

    def _is_elsewhere(self, group: _Group, weight: Array) -> bool:
        """Are the rows of a part in another call beside the whole? Then it is no part of this
        one.
        """
        side, kids = (
            ("target", self.editor.kids_target)
            if group.parts_side == "reference"
            else ("reference", self.editor.kids_reference)
        )
        calls = (self.editor.target if side == "target" else self.editor.reference).calls
        for call in (calls[i] for i in kids.get(group.whole.parent, ()) if i != group.whole.id):
            candidate = self.editor.array(side, self._weight(side, call))
            if candidate is not None and any(
                permutations.located(weight, t) is not None for t in (candidate, candidate.T)
            ):
                return True
        return False

    def _filled(
        self, located: Sequence[permutations.Order | None], extents: Sequence[int]
    ) -> Places | None:
        """Places of all parts; one that was not found gets what the others leave."""
        total = sum(extents)
        orders = [permutations.completed(f, total) if f is not None else None for f in located]
        missing = [i for i, order in enumerate(orders) if order is None]
        if len(missing) > 1 or len(missing) == len(orders):
            return None
        used = {int(i) for order in orders if order is not None for i in order}
        if missing:
            gap = [i for i in range(total) if i not in used]
            orders[missing[0]] = np.array(gap, np.int64)
        places = tuple(tuple(int(i) for i in order) for order in orders if order is not None)
        if [len(p) for p in places] != list(extents) or len(
            {i for p in places for i in p}
        ) != total:
            return None
        return places

    def _by_outputs(self, group: _Group) -> Places | None:
        """Places of the parts' channels told by the outputs: one after another in any order, or in
        blocks of heads.
        """
        whole_side = "target" if group.parts_side == "reference" else "reference"
        whole = self.editor.array(whole_side, group.whole.slots("output")[0].record)
        parts = [
            self.editor.array(group.parts_side, c.slots("output")[0].record) for c in group.parts
        ]
        if whole is None or any(p is None for p in parts):
            return None
        extents = [self._extent(group.parts_side, c) for c in group.parts]
        rows = whole.reshape(-1, whole.shape[-1])
        outputs = [p.reshape(-1, p.shape[-1]) for p in parts if p is not None]
        if any(p.dtype.kind in "iub" or len(p) != len(rows) for p in outputs):
            return None
        joined = np.concatenate([p.astype(np.float64) for p in outputs], -1)
        candidates = list(dict.fromkeys(_arrangements(extents)))
        distances = [distance(joined, rows[:, np.concatenate(places)]) for places in candidates]
        best = clear_best(distances)
        return candidates[best] if best is not None else None

    def _join(self, group: _Group, family: _Family) -> bool:
        calls = (*group.parts, group.whole)
        sides = [group.parts_side] * len(group.parts) + [
            "target" if group.parts_side == "reference" else "reference"
        ]
        if any(not self._is_free(side, call) for side, call in zip(sides, calls)):
            return False
        for side, call in zip(sides, calls):
            self.editor.release(side, call)
        names = _and([short(c) for c in group.parts])
        if group.parts_side == "reference":
            evidence = f"{names} are {short(group.whole)} of the target; {family.why}"
            assert family.places is not None
            for part, places in zip(group.parts, family.places):
                self._part(part, group.whole, np.array(places), family.turned, evidence)
        else:
            self._whole(
                group, family, f"{short(group.whole)} is {names} of the target; {family.why}"
            )
        return True

    def _is_free(self, side: str, call: Call) -> bool:
        if side == "reference":
            unpaired = call.id in self.editor.free_reference or call.id in self.editor.ambiguous
            return unpaired or (
                self.editor.pairs[call.id].rule != RULE and not self.editor.is_fixed(call.id)
            )
        return not any(
            self.editor.pairs[partner].rule == RULE or self.editor.is_fixed(partner)
            for partner in self.editor.paired_with[call.id]
        )

    def _part(
        self, call: Call, target_call: Call, places: permutations.Order, turned: bool, evidence: str
    ) -> None:
        """A call of the reference is paired with a part of one of the target."""
        extent = self._extent("target", target_call)
        name = identifier(short(target_call))
        slots: list[SlotPair] = []
        records = {r.slot: r.record for r in target_call.refs}
        for ref in call.refs:
            record = records.get(ref.slot)
            if record is None:
                continue
            shape, reference_shape = (
                self.editor.derived.record(record).shape,
                self.editor.reference.records[ref.record].shape,
            )
            kind = slot_kind(ref.slot)
            if kind == "param":
                along = self._along(shape, reference_shape, extent, len(places), turned)
            else:
                along = (
                    len(shape) - 1 if kind == "output" and shape and shape[-1] == extent else None
                )
            if along is None:
                # packed away: nothing to take a part of
                if kind == "input" or not self.editor.derived.record(record).count:
                    slots.append(SlotPair(ref.slot, ref.slot, ref.record, record))
                continue
            node = permutations.taken(ex.Name(name), shape, along, places)
            if kind == "param" and turned and len(shape) == 2:
                node = ex.Reverse(node)
            slots.append(
                SlotPair(
                    ref.slot,
                    ref.slot,
                    ref.record,
                    self.editor.derived.add(node, {name: [record]}, evidence),
                )
            )
        self._pair(call, target_call, slots, evidence)

    def _whole(self, group: _Group, family: _Family, evidence: str) -> None:
        """A call of the reference faces several of the target, put together."""
        assert family.places is not None
        call, parts = group.whole, group.parts
        first = sorted(range(len(parts)), key=lambda i: family.places[i][0] if family.places else 0)
        parts, places = tuple(parts[i] for i in first), [family.places[i] for i in first]
        # places say where the parts' channels lie in the whole: turned round, which of the joined
        # parts each channel of the whole is.
        order = np.argsort(np.concatenate([np.array(p) for p in places]))
        extents = [self._extent("target", c) for c in parts]
        names = distinct([identifier(short(c)) for c in parts])
        slots: list[SlotPair] = []
        for ref in call.refs:
            records = [next((r.record for r in c.refs if r.slot == ref.slot), None) for c in parts]
            kind = slot_kind(ref.slot)
            if kind == "input":
                if records[0] is not None:
                    slots.append(SlotPair(ref.slot, ref.slot, ref.record, records[0]))
                continue
            ids = [r for r in records if r is not None]
            if len(ids) != len(parts):
                continue
            shapes = [self.editor.derived.record(r).shape for r in ids]
            dims = len(shapes[0])
            if any(len(s) != dims for s in shapes) or not dims:
                continue
            if (
                kind == "param" and not self.editor.reference.records[ref.record].count
            ):  # packed away
                continue
            axes = range(dims) if kind == "param" else [dims - 1]
            turned_axis = 0 if not family.turned else 1
            reference_shape = self.editor.reference.records[ref.record].shape
            if kind == "param" and dims == 2:
                # Of a square weight shapes do not tell; the axis of the whole's weight does, by
                # which the rows were found.
                axes = [
                    a
                    for a in axes
                    if [s[a] for s in shapes] == extents
                    and reference_shape[a if not turned_axis else 1 - a] == sum(extents)
                ]
            axis = next((a for a in axes if [s[a] for s in shapes] == extents), None)
            if axis is None:
                continue
            joined: ex.Node = ex.Cat(
                tuple(ex.Name(n) for n in names), -1 if axis == dims - 1 else axis
            )
            shape = (*shapes[0][:axis], sum(extents), *shapes[0][axis + 1 :])
            try:
                node = permutations.taken(joined, shape, axis, order)
                if kind == "param" and turned_axis and dims == 2:
                    node = ex.Reverse(node)
                record = self.editor.derived.add(
                    node, {n: [r] for n, r in zip(names, ids)}, evidence
                )
            except ex.Unfit:
                continue
            slots.append(SlotPair(ref.slot, ref.slot, ref.record, record))
        self._pair(call, parts[0], slots, evidence, tuple(c.id for c in parts[1:]))

    def _along(
        self,
        shape: tuple[int, ...],
        reference_shape: tuple[int, ...],
        extent: int,
        part: int,
        turned: bool,
    ) -> int | None:
        """The axis of a fused parameter that its outputs lie along, None where it has none."""
        if len(shape) != len(reference_shape):
            return None
        fits = [
            a
            for a, n in enumerate(shape)
            if n == extent
            and reference_shape[len(reference_shape) - 1 - a if turned else a] == part
        ]
        return fits[0] if fits else None

    def _pair(
        self,
        call: Call,
        target_call: Call,
        slots: Sequence[SlotPair],
        evidence: str,
        also: tuple[int, ...] = (),
    ) -> None:
        paired, target_paired = {s.reference_slot for s in slots}, {s.target_slot for s in slots}
        self.editor.add(
            CallPair(
                call.id,
                target_call.id,
                RULE,
                evidence,
                tuple(slots),
                tuple(r.slot for r in call.refs if r.slot not in paired),
                tuple(r.slot for r in target_call.refs if r.slot not in target_paired),
                also,
            )
        )


def _arrangements(extents: Sequence[int]) -> Iterator[Places]:
    """Where parts of these extents may lie in the whole: in any order, group by group for every
    number of groups.
    """
    for groups in range(1, math.gcd(*extents) + 1):
        if any(n % groups for n in extents):
            continue
        for order in itertools.permutations(range(len(extents))):
            step = sum(extents) // groups
            offset = 0
            places: dict[int, tuple[int, ...]] = {}
            for part in order:
                length = extents[part] // groups
                places[part] = tuple(
                    g * step + offset + i for g in range(groups) for i in range(length)
                )
                offset += length
            yield tuple(places[i] for i in range(len(extents)))


def _and(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def own_parameters(editor: PlanEditor) -> None:
    """Make such parameters of the parts, which belong to the call's partner then."""
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
    """(first, behind the last) of the calls whose weights one after another are this one, told by
    most of its rows.
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
