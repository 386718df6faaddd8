"""The plan of a comparison applied to two runs: partner of a call, partner of a tensor slot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from whence import align, judge
from whence.comparison.left_out import NONE_LEFT_OUT, LeftOut
from whence.comparison.options import CompareOptions
from whence.comparison.prepare.masks import UnifiedMasks, hide_the_same, unify_masks
from whence.comparison.tasks import measuring
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Record, children, in_order, marks, region
from whence.records.marks import Mark
from whence.records.slots import (
    is_input,
    is_of_child,
    is_param,
    is_written,
    param_name,
    parameter_path,
    split_child,
)
from whence.records.views import CachedRun
from whence.results import CallPair, Measured, Plan, SlotPair

_SAME = Measured("same", True, {"rel_l2": 0.0, "max_abs_err": 0.0})


@dataclass(frozen=True, slots=True)
class PairedCall:
    """A call of the reference and its partner. index: of their pair in the plan."""

    index: int
    call: Call
    partner: Call


class PairedRuns:
    """The plan of a comparison, carried out.

    calls: the reference's. pair_of: call of the reference -> index of its pair. slots: of each
    pair, by slot of the reference. target: with its masks in the reference's form (`unify_masks`);
    shown: as it is. kids, target_kids: children of every call. written: records that some call of
    the reference wrote. measured: by pair of records. left_out: equal calls that are not among
    these. stated: as `CompareOptions` has it.
    """

    def __init__(
        self,
        reference: CachedRun,
        target: CachedRun,
        plan: Plan,
        options: CompareOptions,
        progress: Callable[[int, int, str], None],
        left_out: LeftOut = NONE_LEFT_OUT,
    ) -> None:
        self.reference, self.left_out = reference, left_out
        self._options, self.progress = options, progress
        self.stated = options.stated
        self.calls = reference.calls
        self.written = {r.record for c in self.calls for r in c.refs if is_written(r.slot)}
        self.kids, self.target_kids = children(self.calls), children(target.calls)
        self.plan = plan
        self.shown, self.target = target, unify_masks(reference, target, self.plan)
        self._with_own_padding = dict(plan.padded)
        self.pair_of = {p.reference: i for i, p in enumerate(self.plan.pairs)}
        self.slots: list[dict[str, SlotPair]] = [
            {s.reference_slot: self._in_one_form(s) for s in p.slots} for p in self.plan.pairs
        ]
        self.measured: dict[tuple[int, int], Measured] = {}
        self._is_printed = any(r.whole for run in (reference, self.target) for r in run.records)
        self._parameters: dict[int, dict[str, int]] = {}
        self._makers: dict[int, int] | None = None
        self._made_of: dict[int, int] = {}

    def _in_one_form(self, slot: SlotPair) -> SlotPair:
        """The pair, of a mask that has the reference's form already with the target's as it is."""
        target, number = self.target, slot.target_record
        if not isinstance(target, UnifiedMasks):
            return slot
        own = target.in_own_form(number)
        if target.records[own].dtype != self.reference.records[slot.reference_record].dtype:
            return slot
        return msgspec.structs.replace(slot, target_record=own)

    def pair(self, index: int) -> PairedCall:
        """The calls of one pair of the plan."""
        pair = self.plan.pairs[index]
        return PairedCall(index, self.calls[pair.reference], self.target.calls[pair.target])

    def slots_of(self, call: int) -> Mapping[str, SlotPair]:
        """The pairs of tensors of a call of the reference, by its slots; none without a partner."""
        index = self.pair_of.get(call)
        return self.slots[index] if index is not None else {}

    def records(self, slot: SlotPair) -> tuple[Record, Record]:
        """What both runs say of a pair of tensors."""
        return (
            self.reference.records[slot.reference_record],
            self.target.records[slot.target_record],
        )

    def is_equal(self, slot: SlotPair) -> bool:
        """Is a measured pair of tensors bitwise equal?"""
        return self.measured[slot.reference_record, slot.target_record].identical

    def maker(self, slot: SlotPair) -> Call | None:
        """The call of the target that left what a tensor was made of; None where none did."""
        if self._makers is None:
            refs = [(c.id, ref) for c in self.target.calls for ref in c.refs]
            made_by = {ref.record: call for call, ref in refs if is_written(ref.slot)}
            self._makers = {ref.record: call for call, ref in refs} | made_by
            self._made_of = {
                m.record: m.operands[0][1][0] for m in self.plan.made_target if m.operands
            }
        record = slot.target_record
        while record in self._made_of:
            record = self._made_of[record]
        maker = self._makers.get(record)
        return self.target.calls[maker] if maker is not None else None

    # ---- how far apart

    def measure(self) -> None:
        """Measure every pair of tensors, each once."""
        in_plan = [s for p in self.plan.pairs for s in p.slots]
        pairs = dict.fromkeys(
            (s.reference_record, self._in_one_form(s).target_record) for s in in_plan
        )
        masks = {
            (s.reference_record, s.target_record)
            for s in in_plan
            if "mask" in s.reference_slot and is_input(s.reference_slot)
        }
        out: dict[tuple[int, int], Measured] = {}
        differing: list[tuple[int, int]] = []
        for key in pairs:
            a, b = self.reference.records[key[0]], self.target.records[key[1]]
            if a.hash and a.hash == b.hash and a.dtype == b.dtype and a.shape == b.shape:
                out[key] = _SAME
            elif reason := next((r.why for r in (a, b) if marks.is_unplaced(r)), ""):
                out[key] = Measured("none", False, why=reason)
            elif a.shape != b.shape and key in masks and self._hide_the_same(key):
                out[key] = _SAME
            elif a.shape != b.shape:
                out[key] = Measured("none", False, why=f"shape {_shape(a)} against {_shape(b)}")
            else:
                differing.append(key)
        caches = self._caches()
        differing.sort(key=lambda key: caches.get(key, ""))
        runs = self.reference, self.target
        out.update(measuring.measure(runs, differing, self._options, self.progress))
        if isinstance(self.target, UnifiedMasks):
            for s in in_plan:
                key = s.reference_record, self._in_one_form(s).target_record
                out[s.reference_record, s.target_record] = out[key]
        self.measured = out

    def _hide_the_same(self, key: tuple[int, int]) -> bool:
        """Are these masks of other shapes that say the same?"""
        try:
            return hide_the_same(self.reference.array(key[0]), self.target.array(key[1]))
        except ElementsMissing:
            return False

    def _caches(self) -> dict[tuple[int, int], str]:
        """Pairs of states of caches, with the cache that they are states of: each is put together
        from the one before it, so they are read in a row.
        """
        return {
            (slot.reference_record, slot.target_record): f"{scope} {slot.reference_slot}"
            for pair in self.plan.pairs
            for scope in (self.calls[pair.reference].scope,)
            for slot in pair.slots
            if align.is_cache(slot.reference_slot)
        }

    def partly(self, slot: SlotPair) -> str:
        """What was not printed of a pair that comes from text, in words; "" when nothing is
        missing.
        """
        return judge.partly(*self.records(slot)) if self._is_printed else ""

    def arrays(self, slot: SlotPair) -> tuple[Array, Array] | None:
        try:
            return self.reference.array(slot.reference_record), self.target.array(
                slot.target_record
            )
        except ElementsMissing:
            return None

    def arrays_of_one_shape(self, slot: SlotPair) -> tuple[Array, Array] | None:
        """As `arrays`, None of two shapes too."""
        arrays = self.arrays(slot)
        return arrays if arrays is not None and arrays[0].shape == arrays[1].shape else None

    def why_no_elements(self, slot: SlotPair) -> str:
        """Why a pair has no `arrays`: a run keeps elements that cannot be read, or kept none."""
        for side, run, number in (
            ("reference", self.reference, slot.reference_record),
            ("target", self.target, slot.target_record),
        ):
            if run.records[number].elements is not None:
                try:
                    run.array(number)
                except ElementsMissing:
                    return f"the {side}'s elements cannot be read"
        return "elements were not kept"

    def slot(self, index: int, slot: str) -> SlotPair | None:
        """What is paired in a slot of a call's program: of the call itself, or of its k-th
        child ("3:output.0").
        """
        if is_param(slot):
            return self.slots[index].get(slot) or self._deeper_parameter(index, slot)
        if not is_of_child(slot):
            return self.slots[index].get(slot)
        k, slot = split_child(slot)
        kids = self.kids.get(self.plan.pairs[index].reference, [])
        child = self.pair_of.get(kids[k]) if k < len(kids) else None
        return self.slots[child].get(slot) if child is not None else None

    def replayed(self, index: int, slot: str) -> SlotPair | None:
        """What is paired in a slot of a call's program, with the target's tensor as the call had
        it, padding too.
        """
        pair = self.slot(index, slot)
        if pair is None or pair.target_record not in self._with_own_padding:
            return pair
        own = self._with_own_padding[pair.target_record]
        return msgspec.structs.replace(pair, target_record=own)

    def _deeper_parameter(self, index: int, slot: str) -> SlotPair | None:
        """A parameter that the target's call has under a wrapper's name, or that a call below it
        has ("param.norm1.weight").
        """
        pair = self.plan.pairs[index]
        partner = self.target.calls[pair.target]
        wrapped = self.inner_parameter(partner, self.calls[pair.reference], slot)
        if wrapped is not None:
            return wrapped
        record = self.calls[pair.reference].by_slot.get(slot)
        name = f"{partner.scope}.{param_name(slot)}" if partner.scope else param_name(slot)
        below = list(self.target_kids.get(partner.id, ()))
        while below and record is not None:
            call = self.target.calls[below.pop()]
            if name.startswith(f"{call.scope}."):
                inside = f"param.{name[len(call.scope) + 1 :]}"
                for ref in call.refs:
                    if ref.slot == inside:
                        return SlotPair(slot, inside, record, ref.record)
                below += self.target_kids.get(call.id, ())
        return None

    def inner_parameter(self, partner: Call, inner: Call, slot: str) -> SlotPair | None:
        """The pair of a parameter of a call without a partner: one that the target's call has
        itself, under the same name, or which held the same elements first.
        """
        parameters = self._parameters.get(partner.id)
        if parameters is None:
            parameters = {
                align.normal_scope(param_name(r.slot)): r.record for r in partner.slots("param")
            }
            self._parameters[partner.id] = parameters
        name = align.normal_scope(
            f"{inner.scope}.{param_name(slot)}" if inner.scope else param_name(slot)
        )
        scope = align.normal_scope(partner.scope)
        record = parameters.get(name.removeprefix(f"{scope}.") if scope else name)
        if record is None:
            content = self._first_content["reference"].get(parameter_path(inner.scope, slot))
            alike = [
                ref.record
                for ref in partner.slots("param")
                if content
                and self._first_content["target"][parameter_path(partner.scope, ref.slot)]
                == content
            ]
            record = alike[0] if len(alike) == 1 else None
        own_record = inner.by_slot.get(slot)
        return (
            SlotPair(slot, slot, own_record, record)
            if record is not None and own_record is not None
            else None
        )

    def parameter_around(self, inner: Call, slot: str) -> SlotPair | None:
        """The pair of a parameter of a call without a partner, in the partner of a call around it:
        code of the target's that runs what a module of the reference does.
        """
        around = inner.parent
        while around >= 0:
            if around in self.pair_of:
                partner = self.target.calls[self.plan.pairs[self.pair_of[around]].target]
                if (pair := self.inner_parameter(partner, inner, slot)) is not None:
                    return pair
            around = self.calls[around].parent
        return None

    @functools.cached_property
    def _first_content(self) -> dict[str, dict[str, tuple[str, tuple[int, ...]] | None]]:
        """By side and name of a parameter, its hash and shape at the first call that reads it: what
        a training changes later is told by it. None of one without a hash.
        """
        content: dict[str, dict[str, tuple[str, tuple[int, ...]] | None]] = {}
        for side, run in (("reference", self.reference), ("target", self.target)):
            first = content[side] = {}
            for call in in_order(run.calls):
                for ref in call.slots("param"):
                    record = run.records[ref.record]
                    key = (record.hash, record.shape) if record.hash else None
                    first.setdefault(parameter_path(call.scope, ref.slot), key)
        return content

    def all_same(self, index: int, slots: Iterable[str]) -> bool:
        pairs = [self.slot(index, slot) for slot in slots]
        keys = [(p.reference_record, p.target_record) for p in pairs if p is not None]
        return len(keys) == len(pairs) and all(
            key in self.measured and self.measured[key].identical for key in keys
        )

    def hands_on(self, call: Call) -> bool:
        """Did an operator of the reference return what it was given?"""
        return region.hands_on(self.reference, call)

    def alone(self, call: int) -> list[int]:
        """Selected calls below this one that have no partner, nor has any call between."""
        unpaired: list[int] = []
        todo = [call]
        while todo:
            below = [k for k in self.kids.get(todo.pop(), ()) if k not in self.pair_of]
            unpaired += [k for k in below if not marks.has_mark(self.calls[k], Mark.NOT_SELECTED)]
            todo += below
        return unpaired

    def shows_no_inside(self, index: int, pair: CallPair) -> bool:
        """Is this a call whose inside only the reference shows, with the same bits going in and
        coming out?

        Also one of which the target shows some calls, all the same to the bit: what is missing are
        calls around them, or modules that the target's code writes otherwise between them.
        """
        if not self.kids.get(pair.reference) or not self._is_identical(index):
            return False
        if not self.target_kids.get(pair.target):
            return True
        around = self.alone(pair.reference)
        within = {k for call in (pair.reference, *around) for k in self.kids.get(call, ())}
        pairs = [self.pair_of[k] for k in within if k in self.pair_of]
        return (
            bool(around)
            and all(self.kids.get(k) or self.calls[k].program for k in around)
            and all(map(self._is_identical, pairs))
        )

    def _is_identical(self, index: int) -> bool:
        slots = [
            s
            for s in self.slots[index].values()
            if is_input(s.reference_slot) or is_written(s.reference_slot)
        ]
        return bool(slots) and all(self.is_equal(s) for s in slots)


def _shape(record: Record) -> str:
    return f"({', '.join(map(str, record.shape))})"
