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
    at = PlanEditor(reference, target, plan)
    _Projections(at).join()
    own_parameters(at)
    folded(at)
    absorbed(at)
    streams(at)
    heads(at)
    _packed(at)
    return at.done()


def _packed(at: PlanEditor) -> None:
    """Tell what cannot be compared: weights that an engine has laid out anew for its kernels and
    left empty.
    """

    def is_gone(slot: SlotPair) -> bool:
        of = at.reference.records[slot.reference_record]
        return (
            is_param(slot.reference_slot)
            and of.count > at.record("target", slot.target_record).count == 0
        )

    names = dict.fromkeys(
        at.reference.calls[p.reference].scope
        for p in at.pairs.values()
        if any(map(is_gone, p.slots))
    )
    if names:
        at.notes.append(
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
    apart: str  # "reference" or "target"


@dataclass(slots=True)
class _Family:
    groups: list[_Group] = field(default_factory=list)
    places: Places | None = None
    turned: bool = False
    why: str = ""


class _Projections:
    def __init__(self, at: PlanEditor) -> None:
        self.at = at

    def join(self) -> None:
        families: dict[tuple[object, ...], _Family] = {}
        for group in self._groups():
            key = (
                tuple(starred(c.scope) for c in group.parts),
                starred(group.whole.scope),
                group.apart,
                tuple(self._extent(group.apart, c) for c in group.parts),
            )
            families.setdefault(key, _Family()).groups.append(group)
        for family in families.values():
            self._decide(family)
        # What weights prove comes before what activations suggest.
        for family in sorted(families.values(), key=lambda f: not f.why.startswith("weights")):
            if family.places is not None:
                joined = [group for group in family.groups if self._join(group, family)]
                if joined:
                    self.at.notes.append(self._told(joined[0], family))

    def _told(self, group: _Group, family: _Family) -> str:
        parts = [short(c) for c in group.parts]
        first, whole = starred(group.parts[0].scope), starred(group.whole.scope)
        names = _and([first, *parts[1:]])
        if group.apart == "reference":
            return f"{names} are {whole} of the target ({family.why})"
        return f"{whole} is {names} of the target ({family.why})"

    def _groups(self) -> Iterator[_Group]:
        loose = [p for p in self.at.pairs.values() if self._loose(p)]
        mine = {i for i in self.at.free_reference if self._leaf("reference", i)} | {
            p.reference for p in loose
        }
        theirs = {i for i in self.at.free_target if self._leaf("target", i)} | {
            p.target for p in loose
        }
        mine.update(self.at.ambiguous)
        theirs.update(other for others in self.at.ambiguous.values() for other in others)
        if not mine or not theirs:
            return
        under: defaultdict[int, tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
        for i in mine:
            under[self._above("reference", i, self.at.pairs)][0].append(self.at.reference.calls[i])
        for i in theirs:
            above = self._above("target", i, self.at.facing)
            for at in self.at.facing[above] if above >= 0 else [-1]:
                under[at][1].append(self.at.target.calls[i])
        for left, right in under.values():
            yield from self._sums_of("reference", left, right)
            yield from self._sums_of("target", right, left)

    def _leaf(self, side: str, call: int) -> bool:
        return not (self.at.kids_reference if side == "reference" else self.at.kids_target).get(
            call
        )

    def _above(self, side: str, call: int, paired: Container[int]) -> int:
        calls = self.at.reference.calls if side == "reference" else self.at.target.calls
        at = calls[call].parent
        while at >= 0 and at not in paired:
            at = calls[at].parent
        return at

    def _loose(self, pair: CallPair) -> bool:
        """Two leaves that were paired although one makes more than the other."""
        if self.at.said(pair.reference):
            return False
        call, other = self.at.reference.calls[pair.reference], self.at.target.calls[pair.target]
        if not (self._leaf("reference", call.id) and self._leaf("target", other.id)):
            return False
        a, b = self._extent("reference", call), self._extent("target", other)
        if not a or not b or a == b:
            return False
        weights = self._weight("reference", call), self._weight("target", other)
        counts = [
            self.at.record(s, w).count if w is not None else n
            for s, w, n in zip(("reference", "target"), weights, (a, b))
        ]
        return 3 * min(counts) <= 2 * max(counts)

    def _sums_of(
        self, apart: str, parts: Sequence[Call], wholes: Sequence[Call]
    ) -> Iterator[_Group]:
        """Neighbours that read one tensor, whose outputs are together as wide as one call's of the
        other run.
        """
        by_input: defaultdict[object, list[Call]] = defaultdict(list)
        for call in sorted(parts, key=lambda c: c.order):
            given = call.slots("input")
            if given and self._extent(apart, call):
                by_input[given[0].record].append(call)
        seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for whole in sorted(wholes, key=lambda c: c.order):
            extent = self._extent("target" if apart == "reference" else "reference", whole)
            for members in by_input.values():
                for count in range(2, MOST_PARTS + 1):
                    for at in range(len(members) - count + 1):
                        chosen = tuple(members[at : at + count])
                        if not extent or sum(self._extent(apart, c) for c in chosen) != extent:
                            continue
                        # One module called many times under one parent: the k-th time faces the
                        # k-th.
                        name = whole.scope, tuple(c.scope for c in chosen)
                        if {c.occurrence for c in chosen} == {whole.occurrence} or not seen[name]:
                            seen[name] += 1
                            yield _Group(chosen, whole, apart)

    def _extent(self, side: str, call: Call) -> int:
        """How many channels a call makes, 0 where that is not one number."""
        outputs = call.slots("output")
        if not outputs:
            return 0
        made = self.at.record(side, outputs[0].record)
        return made.shape[-1] if len(made.shape) > 1 and not is_unplaced(made) else 0

    def _weight(self, side: str, call: Call) -> int | None:
        return next(
            (
                r.record
                for r in call.slots("param")
                if len(self.at.record(side, r.record).shape) == 2
            ),
            None,
        )

    def _decide(self, family: _Family) -> None:
        read = spread(family.groups)
        votes: Counter[tuple[Places, bool]] = Counter()
        known: Counter[tuple[Places, bool]] = Counter()
        for group in read:
            found = self._by_weights(group)
            if found is not None:
                votes[found[:2]] += 1
                known[found[:2]] = max(known[found[:2]], found[2])
        if votes:
            (family.places, family.turned), _ = max(
                votes.items(), key=lambda v: (v[1], known[v[0]])
            )
            family.why = (
                f"weights: {known[family.places, family.turned]} of "
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
        other = "target" if group.apart == "reference" else "reference"
        whole = self.at.array(other, self._weight(other, group.whole))
        parts = [self.at.array(group.apart, self._weight(group.apart, c)) for c in group.parts]
        if whole is None or any(p is None for p in parts):
            return None
        extents = [self._extent(group.apart, c) for c in group.parts]
        best: tuple[Places, bool, int] | None = None
        for turned_parts, turned in itertools.product((False, True), repeat=2):
            source = whole.T if turned else whole
            mine = [p.T if turned_parts else p for p in parts if p is not None]
            if (
                [len(p) for p in mine] != extents
                or len(source) != sum(extents)
                or any(p.shape[1] != source.shape[1] for p in mine)
            ):
                continue
            found = [permutations.located(p, source) for p in mine]
            rows = sum(int(np.count_nonzero(f >= 0)) for f in found if f is not None)
            places = self._filled(found, extents)
            if places is not None and any(
                f is None and self._is_elsewhere(group, p) for f, p in zip(found, mine, strict=True)
            ):
                continue
            if places is not None and (best is None or rows > best[2]):
                best = places, turned != turned_parts, rows
        return best

    def _is_elsewhere(self, group: _Group, weight: Array) -> bool:
        """Are the rows of a part in another call beside the whole? Then it is no part of this
        one.
        """
        other, kids = (
            ("target", self.at.kids_target)
            if group.apart == "reference"
            else ("reference", self.at.kids_reference)
        )
        calls = (self.at.target if other == "target" else self.at.reference).calls
        for call in (calls[i] for i in kids.get(group.whole.parent, ()) if i != group.whole.id):
            theirs = self.at.array(other, self._weight(other, call))
            if theirs is not None and any(
                permutations.located(weight, t) is not None for t in (theirs, theirs.T)
            ):
                return True
        return False

    def _filled(
        self, found: Sequence[permutations.Order | None], extents: Sequence[int]
    ) -> Places | None:
        """Places of all parts; one that was not found gets what the others leave."""
        total = sum(extents)
        orders = [permutations.completed(f, total) if f is not None else None for f in found]
        missing = [i for i, order in enumerate(orders) if order is None]
        if len(missing) > 1 or len(missing) == len(orders):
            return None
        taken = {int(i) for order in orders if order is not None for i in order}
        if missing:
            left = [i for i in range(total) if i not in taken]
            orders[missing[0]] = np.array(left, np.int64)
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
        other = "target" if group.apart == "reference" else "reference"
        whole = self.at.array(other, group.whole.slots("output")[0].record)
        parts = [self.at.array(group.apart, c.slots("output")[0].record) for c in group.parts]
        if whole is None or any(p is None for p in parts):
            return None
        extents = [self._extent(group.apart, c) for c in group.parts]
        rows = whole.reshape(-1, whole.shape[-1])
        mine = [p.reshape(-1, p.shape[-1]) for p in parts if p is not None]
        if any(p.dtype.kind in "iub" or len(p) != len(rows) for p in mine):
            return None
        joined = np.concatenate([p.astype(np.float64) for p in mine], -1)
        candidates = list(dict.fromkeys(_arrangements(extents)))
        distances = [distance(joined, rows[:, np.concatenate(places)]) for places in candidates]
        best = clear_best(distances)
        return candidates[best] if best is not None else None

    def _join(self, group: _Group, family: _Family) -> bool:
        calls = (*group.parts, group.whole)
        sides = [group.apart] * len(group.parts) + [
            "target" if group.apart == "reference" else "reference"
        ]
        if any(not self._is_free(side, call) for side, call in zip(sides, calls)):
            return False
        for side, call in zip(sides, calls):
            self.at.free(side, call)
        names = _and([short(c) for c in group.parts])
        if group.apart == "reference":
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
            alone = call.id in self.at.free_reference or call.id in self.at.ambiguous
            return alone or (self.at.pairs[call.id].rule != RULE and not self.at.said(call.id))
        return not any(
            self.at.pairs[at].rule == RULE or self.at.said(at) for at in self.at.facing[call.id]
        )

    def _part(
        self, call: Call, other: Call, places: permutations.Order, turned: bool, evidence: str
    ) -> None:
        """A call of the reference is paired with a part of one of the target."""
        extent = self._extent("target", other)
        name = identifier(short(other))
        slots: list[SlotPair] = []
        theirs = {r.slot: r.record for r in other.refs}
        for ref in call.refs:
            record = theirs.get(ref.slot)
            if record is None:
                continue
            shape, mine = (
                self.at.making.record(record).shape,
                self.at.reference.records[ref.record].shape,
            )
            kind = slot_kind(ref.slot)
            if kind == "param":
                along = self._along(shape, mine, extent, len(places), turned)
            else:
                along = (
                    len(shape) - 1 if kind == "output" and shape and shape[-1] == extent else None
                )
            if along is None:
                # packed away: nothing to take a part of
                if kind == "input" or not self.at.making.record(record).count:
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
                    self.at.making.add(node, {name: [record]}, evidence),
                )
            )
        self._pair(call, other, slots, evidence)

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
            found = [r for r in records if r is not None]
            if len(found) != len(parts):
                continue
            shapes = [self.at.making.record(r).shape for r in found]
            dims = len(shapes[0])
            if any(len(s) != dims for s in shapes) or not dims:
                continue
            if kind == "param" and not self.at.reference.records[ref.record].count:  # packed away
                continue
            axes = range(dims) if kind == "param" else [dims - 1]
            own = 0 if not family.turned else 1
            mine = self.at.reference.records[ref.record].shape
            if kind == "param" and dims == 2:
                # Of a square weight shapes do not tell; the axis of the whole's weight does, by
                # which the rows were found.
                axes = [
                    a
                    for a in axes
                    if [s[a] for s in shapes] == extents
                    and mine[a if not own else 1 - a] == sum(extents)
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
                if kind == "param" and own and dims == 2:
                    node = ex.Reverse(node)
                made = self.at.making.add(node, {n: [r] for n, r in zip(names, found)}, evidence)
            except ex.Unfit:
                continue
            slots.append(SlotPair(ref.slot, ref.slot, ref.record, made))
        self._pair(call, parts[0], slots, evidence, tuple(c.id for c in parts[1:]))

    def _along(
        self, shape: tuple[int, ...], mine: tuple[int, ...], extent: int, part: int, turned: bool
    ) -> int | None:
        """The axis of a fused parameter that its outputs lie along, None where it has none."""
        if len(shape) != len(mine):
            return None
        fits = [
            a
            for a, n in enumerate(shape)
            if n == extent and mine[len(mine) - 1 - a if turned else a] == part
        ]
        return fits[0] if fits else None

    def _pair(
        self,
        call: Call,
        other: Call,
        slots: Sequence[SlotPair],
        evidence: str,
        also: tuple[int, ...] = (),
    ) -> None:
        faced, seen = {s.reference_slot for s in slots}, {s.target_slot for s in slots}
        self.at.take(
            CallPair(
                call.id,
                other.id,
                RULE,
                evidence,
                tuple(slots),
                tuple(r.slot for r in call.refs if r.slot not in faced),
                tuple(r.slot for r in other.refs if r.slot not in seen),
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


def own_parameters(at: PlanEditor) -> None:
    """Make such parameters of the parts, which belong to the call's partner then."""
    known: dict[tuple[str, str], tuple[int, int] | None] = {}
    for pair in list(at.pairs.values()):
        call, kids = at.reference.calls[pair.reference], at.kids_target.get(pair.target, [])
        fused_slots = [
            r
            for r in call.slots("param")
            if r.slot in pair.only_reference and len(at.reference.records[r.record].shape) == 2
        ]
        if not fused_slots or len(kids) < 2 or at.kids_reference.get(call.id):
            continue
        name = starred(call.scope), fused_slots[0].slot
        if known.get(name) is None:
            known[name] = _run_of_kids(at, fused_slots[0].record, kids)
        chosen = known[name]
        if chosen is None or chosen[1] > len(kids):
            continue
        parts = [at.target.calls[k] for k in kids[slice(*chosen)]]
        names = distinct([identifier(short(c)) for c in parts])
        slots = list(pair.slots)
        for ref in call.slots("param"):
            kind = ref.slot.rpartition("_")[2]  # in_proj_weight, in_proj_bias
            bound = {
                n: [r.record for r in c.slots("param") if r.slot == f"param.{kind}"]
                for n, c in zip(names, parts)
            }
            if ref.slot not in pair.only_reference or any(
                len(found) != 1 for found in bound.values()
            ):
                continue
            node = ex.Cat(tuple(ex.Name(n) for n in names), 0)
            shape = at.reference.records[ref.record].shape
            shapes = {n: [at.target.records[r].shape for r in found] for n, found in bound.items()}
            if (
                all(len(s[0]) == len(shape) for s in shapes.values())
                and node.shape(shapes) == shape
            ):
                made = at.making.add(node, bound, "rows found by their elements")
                slots.append(SlotPair(ref.slot, f"{parts[0].scope}:param.{kind}", ref.record, made))
        if len(slots) > len(pair.slots):
            at.put(call.id, slots)
            at.belongs(call.id, [k for k in kids if k in at.free_target])


def _run_of_kids(at: PlanEditor, record: int, kids: Sequence[int]) -> tuple[int, int] | None:
    """(first, behind the last) of the calls whose weights one after another are this one, told by
    most of its rows.
    """
    whole = at.array("reference", record)
    if whole is None:
        return None
    weights = [
        next(
            (
                r.record
                for r in at.target.calls[k].slots("param")
                if len(at.target.records[r.record].shape) == 2
            ),
            None,
        )
        for k in kids
    ]
    for count in range(2, MOST_PARTS + 1):
        for first in range(len(kids) - count + 1):
            parts = [at.array("target", w) for w in weights[first : first + count]]
            joined = [p for p in parts if p is not None and p.shape[1] == whole.shape[1]]
            if len(joined) == count and sum(map(len, joined)) == len(whole):
                found = permutations.located(whole, np.concatenate(joined))
                if found is not None and (found[found >= 0] == np.flatnonzero(found >= 0)).all():
                    return first, first + count
    return None
