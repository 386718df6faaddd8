"""Pairs tensors without a common call: labels, taps and graph nodes with the records of a captured
program.

One run shows calls of modules, the other only named tensors. Each tensor is paired with the
candidate whose elements are by far the closest, in any order of axes. From these pairs a naming
rule is learnt (`h3` is the input of `layers.3`, because `h0`, `h1` and `h2` were the inputs of
theirs). The rule pairs tensors that a fault changed beyond recognition, so that a wrong tensor
keeps its partner.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from whence.align.call_sites import selected
from whence.align.derived_run import DerivedTensors, text
from whence.align.layout import axes
from whence.align.plan_editor import USER_MAP
from whence.align.tensors.candidates import CLEARER, Match, TensorCandidates
from whence.align.tensors.elements import (
    Elements,
    Family,
    Inside,
    Numbers,
    PairedTensor,
    Place,
    Tap,
    pairs_of_tensors,
    split,
)
from whence.records import Call, Run, in_order
from whence.records.slots import is_written, slot_kind
from whence.results import CallPair, Plan, SlotPair


def pair_tensors(
    reference: Run, target: Run, plan: Plan, inside: Callable[[Run], Inside] | None = None
) -> tuple[Run, Run, Plan]:
    """Pair the tensors of labels with those of calls, where one run has labels that are not paired
    with calls of the other run.

    inside: computes tensors that exist only inside the reference's programs; asked last, for what
    is still unpaired. Returns the runs with the derived tensors, and the plan, in which calls
    without a paired tensor stay unmatched. Reads the elements of a few candidates for each tensor.
    """
    labels = [[c for c in selected(run.calls) if c.kind != "module"] for run in (reference, target)]
    modules = [any(c.kind == "module" for c in run.calls) for run in (reference, target)]
    if labels[1] and modules[0] and not modules[1]:
        return _LabelPairing(
            reference, target, plan, labels[1], inside(reference) if inside is not None else None
        ).done()
    if labels[0] and modules[1] and not modules[0]:
        turned = _LabelPairing(target, reference, _swapped(plan), labels[0], None)
        target, reference, plan = turned.done()
        return reference, target, _one_each(_swapped(plan))
    return reference, target, plan


def _swapped(plan: Plan) -> Plan:
    """The plan with reference and target exchanged."""
    pairs = tuple(
        CallPair(
            p.target,
            p.reference,
            p.rule,
            p.evidence,
            tuple(
                SlotPair(
                    s.target_slot, s.reference_slot, s.target_record, s.reference_record, s.dims
                )
                for s in p.slots
            ),
            p.only_target,
            p.only_reference,
        )
        for p in plan.pairs
    )
    return replace(
        plan,
        pairs=pairs,
        unmatched_reference=plan.unmatched_target,
        unmatched_target=plan.unmatched_reference,
        ambiguous=(),
    )


def _one_each(plan: Plan) -> Plan:
    """The plan with one target call for each label: the innermost, which ran last."""
    by_label: dict[int, CallPair] = {}
    dropped: list[int] = []
    for pair in plan.pairs:
        written = tuple(s for s in pair.slots if is_written(s.target_slot))[:1]
        old = by_label.get(pair.reference)
        if old is not None:
            dropped.append(old.target)
        by_label[pair.reference] = replace(
            pair, slots=written or pair.slots[:1], only_reference=(), only_target=()
        )
    used = {p.target for p in by_label.values()}
    unmatched = sorted({*plan.unmatched_target, *(d for d in dropped if d not in used)})
    pairs = tuple(sorted(by_label.values(), key=lambda p: p.reference))
    return replace(plan, pairs=pairs, unmatched_target=tuple(unmatched))


class _LabelPairing:
    """Pairs the two runs. rich: the run with calls. taps: the run of labels, brought to the other
    run's axes.
    """

    def __init__(
        self, rich: Run, taps: Run, plan: Plan, labels: Sequence[Call], inside: Inside | None
    ) -> None:
        self.rich, self.taps, self.plan, self._inside = rich, taps, plan, inside
        self.labels = labels
        self.derived = DerivedTensors(taps)
        self.elements = Elements(rich, taps)
        self.notes: list[str] = []
        self._copies: set[int] = set()
        self.from_map: dict[int, PairedTensor] = {}
        self._earlier: dict[tuple[str, Family], list[tuple[Family, Numbers]]] = {}

    # ---- the answer

    def done(self) -> tuple[Run, Run, Plan]:
        """The runs with their derived tensors, and the plan."""
        self._take_map()
        matches: list[Match] = []
        for step in sorted({c.step for c in self.labels}):
            matches += self._step(step)
        rich = self.elements.with_inner({m.place.record for m in matches})
        pairs = self._pairs(matches)
        paired = {
            *(m.tap.call for m in matches),
            *(label for label, _, _ in self.from_map.values()),
        }
        unpaired = tuple(
            c.id for c in self.labels if c.id not in paired and c.id not in self._copies
        )
        calls = {p.reference for p in pairs}
        if self._copies:
            self.notes.append(
                f"{len(self._copies)} tensors of the target repeat another one's elements "
                "(views, copies) and are listed with it"
            )
        guessed = [m for m in matches if not m.sure]
        if guessed:
            named = ", ".join(f"{m.tap.name} ({m.place.words})" for m in guessed[:3])
            self.notes.append(
                f"{len(guessed)} of {len(matches)} tensors are paired by name and place, since "
                f"their elements differ: {named}" + (" ..." if len(guessed) > 3 else "")
            )
        if unpaired and not matches:
            self.notes.append(self._nearest(unpaired))
        plan = Plan(
            tuple(pairs),
            tuple(
                c.id for c in selected(self.rich.calls) if c.kind == "module" and c.id not in calls
            ),
            unpaired,
            (),
            (*self.plan.notes, *self.notes),
        )
        return rich, self.derived.done(), plan

    def _take_map(self) -> None:
        """The pairs in the user's map: by record, (label, evidence, pair of tensors)."""
        for pair in self.plan.pairs:
            if pair.rule == USER_MAP:
                for slot in pair.slots:
                    self.from_map.setdefault(
                        slot.reference_record,
                        (pair.target, f"{USER_MAP}, {pair.evidence}", self._in_axes(slot)),
                    )

    def _in_axes(self, slot: SlotPair) -> SlotPair:
        """A pair of the user's map, in the closest order of axes where the map gives none."""
        shapes = [
            self.rich.records[slot.reference_record].shape,
            self.taps.records[slot.target_record].shape,
        ]
        arrays = [
            self.elements.array(True, slot.reference_record),
            self.elements.array(False, slot.target_record),
        ]
        if slot.dims or shapes[0] == shapes[1] or arrays[0] is None or arrays[1] is None:
            return slot
        fit = axes.fit(arrays[1], arrays[0])
        if fit is None:
            return slot
        new_record = self.derived.add(fit.node, {"x": [slot.target_record]}, "its elements")
        return replace(slot, target_record=new_record, dims=str(fit.node))

    # ---- which calls are paired, within one step

    def _step(self, step: int) -> list[Match]:
        mapped = {label for label, _, _ in self.from_map.values()}
        taps = [t for t in self._taps(step) if t.call not in mapped]
        places = [p for p in self._places(step) if p.record not in self.from_map]
        if not places:
            return []
        candidates = TensorCandidates(self.elements, taps, places)
        candidates.by_content()
        candidates.as_before(self._earlier)
        candidates.by_name()
        unpaired = [t for t in taps if t.call not in candidates.matched or candidates.strays(t)]
        if unpaired and self._inside is not None:
            counts = frozenset(self.taps.records[t.record].count for t in unpaired)
            inner = [self.elements.place(item) for item in self._inside(step, counts)]
            if inner:
                deeper = TensorCandidates(self.elements, unpaired, inner)
                deeper.by_content()
                for call, match in deeper.matched.items():
                    if (
                        call not in candidates.matched
                        or CLEARER * match.fit.distance < candidates.matched[call].fit.distance
                    ):
                        candidates.matched[call] = match
                candidates.places += inner
                candidates.by_name()
        candidates.only_one_of_its_size()
        self._copies.update(
            t.call for t in taps if t.call not in candidates.matched and candidates.repeats(t)
        )
        for match in candidates.matched.values():
            self._earlier.setdefault((match.tap.name, match.tap.family), match.place.roles)
        return list(candidates.matched.values())

    def _taps(self, step: int) -> list[Tap]:
        out = []
        for call in self.labels:
            for ref in call.slots("output") if call.step == step else ():
                family, numbers = split(call.scope)
                out.append(
                    Tap(
                        call.id,
                        ref.record,
                        call.order,
                        (family, call.op or call.op_type, str(call.occurrence)),
                        numbers,
                        call.scope,
                    )
                )
        return sorted(out, key=lambda t: t.order)

    def _places(self, step: int) -> list[Place]:
        places: dict[int, Place] = {}
        for call in in_order(selected(self.rich.calls)):
            if call.step != step or call.kind != "module" or call.phase != "forward":
                continue
            name, numbers = split(call.scope)
            for ref in call.refs:
                kind = slot_kind(ref.slot)
                if kind == "param":
                    continue
                place = places.get(ref.record)
                if place is None:
                    place = places[ref.record] = Place(
                        ref.record, call.order, words=f"{call.module_name} {ref.slot}"
                    )
                if kind != "input" and not place.is_written:
                    place.is_written, place.words = True, f"{call.module_name} {ref.slot}"
                slot = re.sub(r"\.\d+(?=\.)", ".*", ref.slot)  # a cache names the layer once more
                place.roles.append(((name, slot, str(call.occurrence)), numbers))
        return list(places.values())

    # ---- calls

    def _pairs(self, matches: Sequence[Match]) -> list[CallPair]:
        """Pair every call that wrote a paired tensor with its label, and all its paired tensors."""
        paired = dict(self.from_map)
        for match in matches:
            record = self.derived.add(match.fit.node, {"x": [match.tap.record]}, match.why)
            dims = text(self.derived.done(), record) if record >= len(self.taps.records) else ""
            paired.setdefault(
                match.place.record,
                (
                    match.tap.call,
                    match.why,
                    SlotPair("", "output.0", match.place.record, record, dims),
                ),
            )
        modules = (call for call in self.rich.calls if call.kind == "module")
        return list(pairs_of_tensors(modules, paired, self._made_between(paired)))

    def _made_between(self, paired: Iterable[int]) -> dict[int, list[tuple[str, int]]]:
        """By call, the tensors inside it: inputs of its children that no call returned."""
        out: dict[int, list[tuple[str, int]]] = defaultdict(list)
        records = set(paired)
        for record in records:
            if record >= self.elements.first_inner:
                item = self.elements.inner[record - self.elements.first_inner]
                out[item.call].append((f"inside.{item.operation}", record))
        read: set[int] = set()
        below: Counter[int] = Counter()
        ended = {r.record for c in self.rich.calls for r in c.refs if is_written(r.slot)}
        for call in in_order(self.rich.calls):
            place = below[call.parent]
            below[call.parent] += 1
            for ref in call.slots("input"):
                if (
                    ref.record in records
                    and ref.record not in ended
                    and ref.record not in read
                    and call.parent >= 0
                ):
                    out[call.parent].append((f"{place}:{ref.slot}", ref.record))
                read.add(ref.record)
        return out

    def _nearest(self, unpaired: Sequence[int]) -> str:
        first = self.taps.calls[unpaired[0]]
        record = self.taps.records[first.slots("output")[0].record]
        alike = [
            f"{c.module_name} {r.slot} {self.rich.records[r.record].shape}"
            for c in self.rich.calls
            for r in c.slots("output")
            if self.rich.records[r.record].count == record.count
        ]
        sizes = f"of its size are {', '.join(alike[:3])}" if alike else "none has its size"
        return (
            f"no tensor of the labels resembles one of the calls; of {first.scope} "
            f"{record.shape}, {sizes}"
        )
