"""Tensors that face each other without a common call: labels, taps and graph nodes against the records of a captured program.

One run shows calls of modules, the other only tensors with names. A tensor finds its partner by its elements, in whatever order of
axes: by far closer than any other candidate. From those that did, the rule of their names is learnt (`h3` is what `layers.3` is given,
since h0, h1 and h2 were), and what a fault changed beyond recognition is paired by it. So a wrong tensor keeps its partner.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from whence import _kernels, dtypes
from whence.align import axes, expressions
from whence.align.derived import Derived, Making, text
from whence.align.distances import typical_distance
from whence.align.matching import USER_MAP
from whence.align.sites import selected
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Record, Run, Sketch, Statistics
from whence.results import TENSOR_RULE, CallPair, Made, Plan, SlotPair

_FIGURES = 0.1  # how far norm and moments may be apart between tensors whose elements are looked at
_LOOKED_AT = 16  # candidates of one tensor whose elements are read
_CLEARER = 3.0  # times closer than any other candidate
_VOTES = 3  # of others of its name, which outweigh what the elements of a tensor say
_UNLIKE = 100.0  # times as far apart as certain pairs usually are: maybe something nearby that no call returned
_MONOTONE = 0.9  # share of the certain pairs in one order, from which on order means something

Numbers = tuple[int, ...]
Family = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inner:
    """A tensor inside a call of a captured program that is no record of it: what one operator of its program gave."""

    call: int
    operation: int
    name: str
    array: Array


Inside = Callable[[int, frozenset[int]], Iterable[Inner]]
"""(step, element counts) -> tensors inside the calls of that step with so many elements."""


@dataclass(slots=True)
class Place:
    """A tensor of the run with calls. roles: what calls know it as, (name with stars, numbers), in order of execution."""

    record: int
    order: int
    roles: list[tuple[Family, Numbers]] = field(default_factory=list)
    words: str = ""
    made: bool = False


@dataclass(slots=True)
class Tap:
    """A tensor of the run of labels."""

    call: int
    record: int
    order: int
    family: Family
    numbers: Numbers
    name: str


@dataclass(slots=True)
class Match:
    """tap faces place through an expression over the tap's tensor. sure: its elements say so."""

    tap: Tap
    place: Place
    fit: axes.Fit
    why: str
    sure: bool = True


class Recomputed(Derived):
    """A run with tensors behind its own that were computed again from its programs, since it does not hold them."""

    def __init__(self, base: Run, made: Sequence[Made], records: Sequence[Record], arrays: Sequence[Array]) -> None:
        super().__init__(base, made, records)
        self._arrays = arrays

    def _make(self, made: Made) -> Array:
        view = self._arrays[made.record - self._first].view()
        view.flags.writeable = False
        return view


def face(reference: Run, target: Run, plan: Plan, inside: Callable[[Run], Inside] | None = None) -> tuple[Run, Run, Plan]:
    """Pair the tensors of labels with those of calls, where one run has labels that the other run's calls do not face.

    inside: computes what only programs of the reference hold; asked last, for what is left. Returns the runs with the tensors made,
    and the plan: calls whose tensors have partners, the others unmatched, as before. Reads elements of few candidates each.
    """
    labels = [[c for c in selected(run.calls) if c.kind != "module"] for run in (reference, target)]
    modules = [any(c.kind == "module" for c in run.calls) for run in (reference, target)]
    if labels[1] and modules[0] and not modules[1]:
        return _Facing(reference, target, plan, labels[1], inside(reference) if inside is not None else None).done()
    if labels[0] and modules[1] and not modules[0]:
        turned = _Facing(target, reference, _turned(plan), labels[0], None)
        target, reference, plan = turned.done()
        return reference, target, _one_each(_turned(plan))
    return reference, target, plan


def _turned(plan: Plan) -> Plan:
    """The plan with reference and target in each other's place."""
    pairs = tuple(
        CallPair(
            p.target, p.reference, p.rule, p.evidence,
            tuple(SlotPair(s.target_slot, s.reference_slot, s.target_record, s.reference_record, s.dims) for s in p.slots),
            p.only_target, p.only_reference,
        )
        for p in plan.pairs
    )  # fmt: skip
    return msgspec.structs.replace(
        plan, pairs=pairs, unmatched_reference=plan.unmatched_target, unmatched_target=plan.unmatched_reference, ambiguous=(),
    )  # fmt: skip


def _one_each(plan: Plan) -> Plan:
    """With one call of the target for each label: the innermost that left its tensor, which comes last in order of execution."""
    kept: dict[int, CallPair] = {}
    dropped: list[int] = []
    for pair in plan.pairs:
        own = tuple(s for s in pair.slots if s.target_slot.startswith(("output", "mutated")))[:1]
        old = kept.get(pair.reference)
        if old is not None:
            dropped.append(old.target)
        kept[pair.reference] = msgspec.structs.replace(pair, slots=own or pair.slots[:1], only_reference=(), only_target=())
    taken = {p.target for p in kept.values()}
    left = sorted({*plan.unmatched_target, *(d for d in dropped if d not in taken)})
    pairs = tuple(sorted(kept.values(), key=lambda p: p.reference))
    return msgspec.structs.replace(plan, pairs=pairs, unmatched_target=tuple(left))


class _Facing:
    """rich: the run with calls; taps: the run of labels, whose tensors are brought to the other's axes."""

    def __init__(self, rich: Run, taps: Run, plan: Plan, labels: Sequence[Call], inside: Inside | None) -> None:
        self.rich, self.taps, self.plan, self._inside = rich, taps, plan, inside
        self.labels = labels
        self.making = Making(taps)
        self.inner: list[Inner] = []
        self._first_inner = len(rich.records)
        self.arrays: dict[tuple[bool, int], Array | None] = {}
        self.notes: list[str] = []
        self._copies: set[int] = set()
        self.said: dict[int, tuple[int, str, SlotPair]] = {}
        self._known: dict[tuple[str, Family], list[tuple[Family, Numbers]]] = {}
        self._inner_records: list[Record] = []

    # ---- the answer

    def done(self) -> tuple[Run, Run, Plan]:
        """The runs with what was made, and the plan."""
        self._as_said()
        matches: list[Match] = []
        for step in sorted({c.step for c in self.labels}):
            matches += self._step(step)
        rich = self._with_inner(matches)
        pairs = self._pairs(matches, rich)
        faced = {*(m.tap.call for m in matches), *(label for label, _, _ in self.said.values())}
        left = tuple(c.id for c in self.labels if c.id not in faced and c.id not in self._copies)
        there = {p.reference for p in pairs}
        if self._copies:
            self.notes.append(
                f"{len(self._copies)} tensors of the target repeat another one's elements (views, copies) and stand behind it"
            )
        guessed = [m for m in matches if not m.sure]
        if guessed:
            named = ", ".join(f"{m.tap.name} ({m.place.words})" for m in guessed[:3])
            self.notes.append(
                f"{len(guessed)} of {len(matches)} tensors are paired by name and place, since their elements differ: {named}"
                + (" ..." if len(guessed) > 3 else "")
            )  # fmt: skip
        if left and not matches:
            self.notes.append(self._nearest(left))
        plan = Plan(
            tuple(pairs),
            tuple(c.id for c in selected(self.rich.calls) if c.kind == "module" and c.id not in there),
            left, (), (*self.plan.notes, *self.notes),
        )  # fmt: skip
        return rich, self.making.done(), plan

    def _as_said(self) -> None:
        """What the user's map pairs: by record, (label, evidence, the pair of tensors)."""
        for pair in self.plan.pairs:
            if pair.rule == USER_MAP:
                for slot in pair.slots:
                    self.said.setdefault(slot.reference_record, (pair.target, f"{USER_MAP}, {pair.evidence}", self._in_axes(slot)))

    def _in_axes(self, slot: SlotPair) -> SlotPair:
        """A pair of the user's, in the order of axes in which it is closest where the map says none."""
        shapes = [self.rich.records[slot.reference_record].shape, self.taps.records[slot.target_record].shape]
        arrays = [self.array(True, slot.reference_record), self.array(False, slot.target_record)]
        if slot.dims or shapes[0] == shapes[1] or arrays[0] is None or arrays[1] is None:
            return slot
        found = axes.fit(arrays[1], arrays[0])
        if found is None:
            return slot
        made = self.making.add(found.node, {"x": [slot.target_record]}, "its elements")
        return msgspec.structs.replace(slot, target_record=made, dims=str(found.node))

    # ---- who faces whom, within one step

    def _step(self, step: int) -> list[Match]:
        taken = {label for label, _, _ in self.said.values()}
        taps = [t for t in self._taps(step) if t.call not in taken]
        places = [p for p in self._places(step) if p.record not in self.said]
        if not places:
            return []
        found = _Matching(self, taps, places)
        found.by_content()
        found.as_before(self._known)
        found.by_name()
        left = [t for t in taps if t.call not in found.matched or found.strays(t)]
        if left and self._inside is not None:
            counts = frozenset(self.taps.records[t.record].count for t in left)
            inner = self._added(self._inside(step, counts))
            if inner:
                deeper = _Matching(self, left, inner)
                deeper.by_content()
                for call, match in deeper.matched.items():
                    if call not in found.matched or _CLEARER * match.fit.distance < found.matched[call].fit.distance:
                        found.matched[call] = match
                found.places += inner
                found.by_name()
        found.only_one_of_its_size()
        self._copies.update(t.call for t in taps if t.call not in found.matched and found.repeats(t))
        for match in found.matched.values():
            self._known.setdefault((match.tap.name, match.tap.family), match.place.roles)
        return list(found.matched.values())

    def _taps(self, step: int) -> list[Tap]:
        out = []
        for call in self.labels:
            for ref in call.slots("output") if call.step == step else ():
                family, numbers = _split(call.scope)
                out.append(
                    Tap(call.id, ref.record, call.order, (family, call.op or call.op_type, str(call.occurrence)), numbers, call.scope)
                )
        return sorted(out, key=lambda t: t.order)

    def _places(self, step: int) -> list[Place]:
        places: dict[int, Place] = {}
        for call in sorted(selected(self.rich.calls), key=lambda c: c.order):
            if call.step != step or call.kind != "module" or call.phase != "forward":
                continue
            name, numbers = _split(call.scope)
            for ref in call.refs:
                kind = ref.slot.partition(".")[0]
                if kind == "param":
                    continue
                place = places.get(ref.record)
                if place is None:
                    place = places[ref.record] = Place(ref.record, call.order, words=f"{call.scope or call.root} {ref.slot}")
                if kind != "input" and not place.made:
                    place.made, place.words = True, f"{call.scope or call.root} {ref.slot}"
                slot = re.sub(r"\.\d+(?=\.)", ".*", ref.slot)  # a cache names the layer once more
                place.roles.append(((name, slot, str(call.occurrence)), numbers))
        return list(places.values())

    def _added(self, inner: Iterable[Inner]) -> list[Place]:
        out = []
        for item in inner:
            number = self._first_inner + len(self.inner)
            self.inner.append(item)
            self._inner_records.append(_described(number, item.array))
            call = self.rich.calls[item.call]
            name, numbers = _split(call.scope)
            words = f"{call.scope or call.root} operator {item.operation} ({item.name})"
            role = ((name, f"inside.{item.operation}", str(call.occurrence)), numbers)
            out.append(Place(number, call.order, [role], words, made=True))
        return out

    # ---- tensors

    def record(self, rich: bool, at: int) -> Record:
        if rich:
            return self._inner_records[at - self._first_inner] if at >= self._first_inner else self.rich.records[at]
        return self.taps.records[at]

    def array(self, rich: bool, at: int) -> Array | None:
        """Elements, None where they were not kept. The last few hundred are held."""
        key = rich, at
        if key not in self.arrays:
            if len(self.arrays) > 512:
                self.arrays.pop(next(iter(self.arrays)))
            try:
                inner = rich and at >= self._first_inner
                self.arrays[key] = self.inner[at - self._first_inner].array if inner else (self.rich if rich else self.taps).array(at)
            except ElementsMissing:
                self.arrays[key] = None
        return self.arrays[key]

    def _with_inner(self, matches: Sequence[Match]) -> Run:
        used = {m.place.record for m in matches if m.place.record >= self._first_inner}
        if not used:
            return self.rich
        made = [
            Made(self._first_inner + i, f"operator {item.operation} of {self.rich.calls[item.call].scope}, computed again", (), item.name)
            for i, item in enumerate(self.inner)
        ]
        unused = np.zeros(0, np.uint8)
        arrays = [item.array if self._first_inner + i in used else unused for i, item in enumerate(self.inner)]
        return Recomputed(self.rich, made, self._inner_records, arrays)

    # ---- calls

    def _pairs(self, matches: Sequence[Match], rich: Run) -> list[CallPair]:
        """Every call that left a tensor with a partner faces the label of that one; all its tensors with partners are its slots."""
        faced = dict(self.said)
        for match in matches:
            record = self.making.add(match.fit.node, {"x": [match.tap.record]}, match.why)
            dims = text(self.making.done(), record) if record >= len(self.taps.records) else ""
            faced.setdefault(match.place.record, (match.tap.call, match.why, SlotPair("", "output.0", match.place.record, record, dims)))
        slots: dict[int, list[SlotPair]] = defaultdict(list)
        chief: dict[int, tuple[int, str, SlotPair]] = {}
        between = self._made_between(faced)
        for call in self.rich.calls:
            if call.kind != "module":
                continue
            left = [r for r in call.refs if r.record in faced and r.slot.startswith(("output", "mutated"))]
            own = between.get(call.id, [])
            if not left and not own:
                continue
            given = [r for r in call.refs if r.record in faced and r.slot.startswith("input")]
            for ref in (*given, *left):
                slots[call.id].append(msgspec.structs.replace(faced[ref.record][2], reference_slot=ref.slot))
            slots[call.id] += [msgspec.structs.replace(faced[record][2], reference_slot=slot) for slot, record in own]
            chief[call.id] = faced[left[0].record if left else own[0][1]]
        pairs = []
        for call_id, found in slots.items():
            call, (label, why, _) = self.rich.calls[call_id], chief[call_id]
            there = {s.reference_slot for s in found}
            only = tuple(r.slot for r in call.refs if r.slot not in there and not r.slot.startswith("param"))
            pairs.append(CallPair(call_id, label, TENSOR_RULE, why, tuple(found), only, ()))
        return sorted(pairs, key=lambda p: self.rich.calls[p.reference].order)

    def _made_between(self, faced: Iterable[int]) -> dict[int, list[tuple[str, int]]]:
        """Tensors that a call's own operators made and no call returned, by that call: what a child is given, what lies inside."""
        out: dict[int, list[tuple[str, int]]] = defaultdict(list)
        wanted = set(faced)
        for record in wanted:
            if record >= self._first_inner:
                item = self.inner[record - self._first_inner]
                out[item.call].append((f"inside.{item.operation}", record))
        seen: set[int] = set()
        below: Counter[int] = Counter()
        ended = {r.record for c in self.rich.calls for r in c.refs if r.slot.startswith(("output", "mutated"))}
        for call in sorted(self.rich.calls, key=lambda c: c.order):
            place = below[call.parent]
            below[call.parent] += 1
            for ref in call.slots("input"):
                if ref.record in wanted and ref.record not in ended and ref.record not in seen and call.parent >= 0:
                    out[call.parent].append((f"{place}:{ref.slot}", ref.record))
                seen.add(ref.record)
        return out

    def _nearest(self, left: Sequence[int]) -> str:
        first = self.taps.calls[left[0]]
        record = self.taps.records[first.slots("output")[0].record]
        alike = [
            f"{c.scope or c.root} {r.slot} {self.rich.records[r.record].shape}"
            for c in self.rich.calls for r in c.slots("output") if self.rich.records[r.record].count == record.count
        ]  # fmt: skip
        what = f"of its size are {', '.join(alike[:3])}" if alike else "none has its size"
        return f"no tensor of the labels resembles one of the calls; of {first.scope} {record.shape}, {what}"


class _Matching:
    """Finds the partners of some taps among some places."""

    def __init__(self, facing: _Facing, taps: Sequence[Tap], places: Sequence[Place]) -> None:
        self.facing, self.taps, self.places = facing, taps, list(places)
        self.matched: dict[int, Match] = {}
        self.behind: set[int] = set()  # taps whose place another tap has: its views and copies
        self._fits: dict[tuple[int, int], axes.Fit | None] = {}
        self._by_count: dict[int, list[Place]] = defaultdict(list)
        for place in places:
            self._by_count[facing.record(True, place.record).count].append(place)

    def by_content(self) -> None:
        """Tensors whose elements are by far closer than those of any other candidate."""
        doubtful: dict[int, list[tuple[Place, axes.Fit]]] = {}
        for tap in self.taps:
            fits = [(place, fit) for place in self._candidates(tap) if (fit := self.fit(tap, place)) is not None and fit.close]
            if not fits:
                continue
            fits.sort(key=lambda item: item[1].distance)
            best = fits[0][1].distance
            limit = max(_CLEARER * best, 1e-6)
            rivals = [item for item in fits if item[1].distance <= limit]
            if len(rivals) == 1 or self._one_tensor([place for place, _ in rivals]):
                place, fit = min(rivals, key=lambda item: self._fitness(tap, *item))
                rest = [f.distance for p, f in fits if f.distance > limit]
                self._take(tap, place, fit, f"elements {best:.2g} apart" + (f", the next {rest[0]:.2g}" if rest else ""))
            else:
                doubtful[tap.call] = rivals
        self._one_each()
        self._by_order(doubtful)

    def as_before(self, known: dict[tuple[str, Family], list[tuple[Family, Numbers]]]) -> None:
        """What faced each other in an earlier step does so again."""
        roles = {role: place for place in reversed(self.places) for role in place.roles}
        for tap in self.taps:
            place = next((roles[r] for r in known.get((tap.name, tap.family), ()) if r in roles), None)
            old = self.matched.get(tap.call)
            if place is None or (old is not None and (old.place is place or self._one_tensor([old.place, place]))):
                continue
            fit = self.fit(tap, place)
            if fit is not None:
                self.matched[tap.call] = Match(tap, place, fit, f"as in the step before; elements {fit.distance:.2g} apart", sure=fit.close)

    def by_name(self) -> None:
        """What the names of certain pairs have in common says which tensor the others of the same names face."""
        rules = self._rules()
        roles = {role: place for place in reversed(self.places) for role in place.roles}
        for tap in self.taps:
            for family, offset, votes in rules.get(tap.family, ()):
                place = roles.get((family, tuple(n - o for n, o in zip(tap.numbers, offset))))
                if place is None:
                    continue
                old = self.matched.get(tap.call)
                if old is not None and (old.place is place or (old.sure and votes < _VOTES)):
                    break
                fit = self.fit(tap, place)
                if fit is None or any(m.place is place and m.sure and m.tap is not tap for m in self.matched.values()):
                    continue
                fit = self._as_siblings(tap, place, fit)
                why = f"named as {votes} other{'s' if votes > 1 else ''} that certainly face each other; elements {fit.distance:.2g} apart"
                self.matched[tap.call] = Match(tap, place, fit, why, sure=False)
                break

    def strays(self, tap: Tap) -> bool:
        """Is a tensor much further from its partner than certain pairs are?"""
        usual = float(np.median([m.fit.distance for m in self.matched.values()]))
        return self.matched[tap.call].fit.distance > max(_UNLIKE * usual, 1e-6)

    def only_one_of_its_size(self) -> None:
        """A tensor that alone has its size on either side has one partner, whatever its elements; and one that is called the same."""
        left = [t for t in self.taps if t.call not in self.matched]
        taken = {m.place.record for m in self.matched.values()}
        count = Counter(self.facing.record(False, t.record).count for t in self.taps)
        for tap in left:
            size = self.facing.record(False, tap.record).count
            open_ = [p for p in self._by_count.get(size, ()) if p.record not in taken and p.made]
            exact = [p for p in open_ if any((f[0], n) == _split(tap.name) and f[1].startswith("output") for f, n in p.roles)]
            same = exact or [p for p in open_ if any(_last(tap.name) in (f[1].partition(".")[2], _last(f[0])) for f, _ in p.roles)]
            alone = same if len(same) == 1 else open_ if len(open_) == 1 and count[size] == 1 and size > 1 else []
            if alone and (fit := self.fit(tap, alone[0])) is not None:
                why = "of the same name" if alone is same else "the only tensor of its size on either side"
                self.matched[tap.call] = Match(tap, alone[0], fit, f"{why}; elements {fit.distance:.2g} apart", sure=fit.close)
                taken.add(alone[0].record)

    def repeats(self, tap: Tap) -> bool:
        """Are these the elements of a tensor that has a partner, seen once more?"""
        if tap.call in self.behind:
            return True
        mine = self.facing.record(False, tap.record)
        for match in self.matched.values():
            other = self.facing.record(False, match.tap.record)
            if (
                mine.sketch is not None
                and other.sketch is not None
                and (mine.count, mine.sketch.checksum) == (other.count, other.sketch.checksum)
            ):
                return True
        return False

    # ---- candidates

    def _candidates(self, tap: Tap) -> list[Place]:
        record = self.facing.record(False, tap.record)
        near = []
        for place in self._by_count.get(record.count, ()):
            apart = _figures(record, self.facing.record(True, place.record))
            if apart <= _FIGURES:
                near.append((apart, place.order, place))
        near.sort(key=lambda item: item[:2])
        found = [place for _, _, place in near[:_LOOKED_AT]]
        return found or self._shorter(tap, record)

    def _shorter(self, tap: Tap, record: Record) -> list[Place]:
        """Places that the front of a padded axis may hold: of a size that divides out along one axis."""
        out = []
        for count, places in self._by_count.items():
            if 0 < count < record.count and any(count % (record.count // n) == 0 for n in record.shape if n > 1):
                out += [p for p in places if next(axes.cuts(record.shape, self.facing.record(True, p.record).shape), None)]
        return out[: 4 * _LOOKED_AT]

    def fit(self, tap: Tap, place: Place) -> axes.Fit | None:
        """How the tap comes to the place's axes, and how far its elements are then; None where it cannot."""
        key = tap.record, place.record
        if key not in self._fits:
            a, b = self.facing.record(False, tap.record), self.facing.record(True, place.record)
            found = None
            if _exact(a.dtype) == _exact(b.dtype):
                mine, theirs = self.facing.array(False, tap.record), self.facing.array(True, place.record)
                if mine is not None and theirs is not None:
                    found = axes.fit(mine, theirs)
                elif a.shape == b.shape and a.count:
                    found = axes.Fit(expressions.Name("x"), _figures(a, b))
            self._fits[key] = found
        return self._fits[key]

    def _as_siblings(self, tap: Tap, place: Place, fit: axes.Fit) -> axes.Fit:
        """In the axes of the certain pairs of the same names: of a wrong tensor its own elements do not tell."""
        mine, theirs = self.facing.array(False, tap.record), self.facing.array(True, place.record)
        orders = Counter(str(m.fit.node) for m in self.matched.values() if m.sure and m.tap.family == tap.family)
        for node in (expressions.parse(order) for order, _ in orders.most_common()):
            try:
                if mine is not None and theirs is not None and node.shape({"x": [mine.shape]}) == theirs.shape:
                    return axes.Fit(node, typical_distance(theirs, node.apply({"x": [mine]})))
            except expressions.Unfit:
                continue
        return fit

    # ---- choosing

    def _take(self, tap: Tap, place: Place, fit: axes.Fit, why: str) -> None:
        self.matched[tap.call] = Match(tap, place, fit, why)

    def _fitness(self, tap: Tap, place: Place, fit: axes.Fit) -> tuple[bool, int, bool, bool, int]:
        """What decides between places that hold one content: numbers in the names, the simplest change of axes, outputs first."""
        named = bool(tap.numbers) and any(numbers == tap.numbers for _, numbers in place.roles)
        return not named, len(str(fit.node)), not place.made, False, place.order

    def _one_tensor(self, places: Sequence[Place]) -> bool:
        """Do these hold the same elements (a view, a copy)?"""
        prints = set()
        for place in places:
            sketch = self.facing.record(True, place.record).sketch
            if sketch is None:
                return False
            prints.add(sketch.checksum)
        return len(prints) == 1

    def _one_each(self) -> None:
        """Of several taps with one place, the closest and the one with the simplest change of axes keeps it."""
        by_place: dict[int, list[Match]] = defaultdict(list)
        for match in self.matched.values():
            by_place[match.place.record].append(match)
        for found in by_place.values():
            keep = min(found, key=lambda m: (m.fit.distance > 2 * min(f.fit.distance for f in found), len(str(m.fit.node)), m.tap.order))
            for match in found:
                if match is not keep:
                    del self.matched[match.tap.call]
                    self.behind.add(match.tap.call)

    def _by_order(self, doubtful: dict[int, list[tuple[Place, axes.Fit]]]) -> None:
        """Between neighbours that resemble each other, the one that keeps the order of execution; if the certain ones are in order."""
        sure = sorted((m.tap.order, m.place.order) for m in self.matched.values())
        if not doubtful or len(sure) < 3 or _longest_run([b for _, b in sure]) < _MONOTONE * len(sure):
            return
        for tap in self.taps:
            if tap.call not in doubtful:
                continue
            low = max((b for a, b in sure if a < tap.order), default=-1)
            high = min((b for a, b in sure if a > tap.order and b >= low), default=1 << 60)
            taken = {m.place.record for m in self.matched.values()}
            fits = [(p, f) for p, f in doubtful[tap.call] if low <= p.order <= high and p.record not in taken]
            if len(fits) == 1:
                self._take(tap, *fits[0], f"elements {fits[0][1].distance:.2g} apart, the only one of several alike that keeps the order")

    def _rules(self) -> dict[Family, list[tuple[Family, Numbers, int]]]:
        """For the taps of one name: the roles that certain pairs share, with the offset of their numbers, those with most votes first."""
        votes: dict[Family, Counter[tuple[Family, Numbers]]] = defaultdict(Counter)
        for match in self.matched.values():
            for family, numbers in dict.fromkeys(match.place.roles):
                if match.sure and match.tap.numbers and len(numbers) == len(match.tap.numbers):
                    votes[match.tap.family][family, tuple(a - b for a, b in zip(match.tap.numbers, numbers))] += 1
        return {
            family: [(role, offset, n) for (role, offset), n in found.most_common() if 2 * n >= found.most_common(1)[0][1]]
            for family, found in votes.items()
        }


def _split(name: str) -> tuple[str, Numbers]:
    """A name with its numbers starred, and the numbers."""
    return re.sub(r"\d+", "*", name), tuple(int(n) for n in re.findall(r"\d{1,9}", name))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _exact(dtype: str) -> bool:
    return dtype not in dtypes.DTYPES or not dtypes.named(dtype).is_floating


def _figures(a: Record, b: Record) -> float:
    """How far apart two tensors of one count are by what no order of elements changes: norm, |x|, x^4, extremes. inf when unlike."""
    s, t, p, q = a.statistics, b.statistics, a.sketch, b.sketch
    if _exact(a.dtype) != _exact(b.dtype):
        return float("inf")
    if s is None or t is None or p is None or q is None or s.norm is None or t.norm is None:
        return 0.0  # not known: the elements decide
    if p.checksum == q.checksum and a.dtype == b.dtype:
        return 0.0

    def apart(x: float | None, y: float | None, power: float = 1.0) -> float:
        if x is None or y is None:
            return 0.0
        top = max(abs(x), abs(y))
        return abs(abs(x) ** power - abs(y) ** power) / top**power if top else 0.0

    return max(apart(s.norm, t.norm), apart(p.abs_sum, q.abs_sum), apart(p.fourth_sum, q.fourth_sum, 0.25))


def _longest_run(values: Sequence[int]) -> int:
    """The length of the longest non-decreasing subsequence."""
    ends: list[int] = []
    for value in values:
        at = bisect_left(ends, value + 1)
        ends[at : at + 1] = [value]
    return len(ends)


def _described(number: int, array: Array) -> Record:
    """A record of a computed tensor, with figures of its elements."""
    wide = np.abs(array).astype(np.float64) if array.dtype.kind == "c" else array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    figures = sketch = None
    if finite.size:
        figures = Statistics(
            array.size, float(finite.min()), float(finite.max()), float(finite.mean()), float(finite.std()),
            float(np.linalg.norm(finite)), int(np.isnan(wide).sum()), int(np.isinf(wide).sum()), int((wide == 0).sum()),
        )  # fmt: skip
        square = finite * finite
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        check = _kernels.checksum(data, array.dtype.itemsize)
        sketch = Sketch(check, float(np.abs(finite).sum()), float((square * finite).sum()), float((square * square).sum()))
    return Record(number, dtypes.of(array).name, tuple(array.shape), statistics=figures, sketch=sketch)
