"""A plan while stages of alignment change its pairs and derive tensors for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property
from typing import TypeVar

from msgspec.structs import replace

from whence.align.derived_run import DerivedTensors
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Record, Run, children
from whence.results import CallPair, Plan, SlotPair

T = TypeVar("T")

USER_MAP = "user map"
"""The rule name of pairs from a user's map; no stage changes them."""

MOST_PARTS = 4  # that one call may be in the other run
READ = 3  # siblings of a family that are read to decide for all of them


class PlanEditor:
    """A plan that is being changed. Every selected call is in exactly one of `pairs` (as a partner
    or in `also`), `free` and `ambiguous`.

    pairs: by call of the reference. paired_with: calls of the target -> calls of the reference.
    kids_reference, kids_target: children of every call, in order.
    """

    def __init__(self, reference: Run, target: Run, plan: Plan) -> None:
        self.reference, self.target, self.plan = reference, target, plan
        self.derived = DerivedTensors(target)
        self.pairs: dict[int, CallPair] = {p.reference: p for p in plan.pairs}
        self.free_reference, self.free_target = (
            set(plan.unmatched_reference),
            set(plan.unmatched_target),
        )
        self.ambiguous = {call: list(others) for call, others in plan.ambiguous}
        # calls of the target -> of the reference
        self.paired_with: defaultdict[int, set[int]] = defaultdict(set)
        for pair in plan.pairs:
            for partner in (pair.target, *pair.also):
                self.paired_with[partner].add(pair.reference)
        self.doubtful: defaultdict[int, set[int]] = defaultdict(set)
        for call, others in plan.ambiguous:
            for partner in others:
                self.doubtful[partner].add(call)
        self.notes = list(plan.notes)

    @cached_property
    def kids_reference(self) -> dict[int, list[int]]:
        return children(self.reference.calls)

    @cached_property
    def kids_target(self) -> dict[int, list[int]]:
        return children(self.target.calls)

    def done(self) -> tuple[Run, Plan]:
        """The target with its derived tensors, and the changed plan."""
        pairs = sorted(self.pairs.values(), key=lambda p: self.reference.calls[p.reference].order)
        return self.derived.done(), replace(
            self.plan,
            pairs=tuple(pairs),
            notes=tuple(self.notes),
            unmatched_reference=tuple(sorted(self.free_reference)),
            unmatched_target=tuple(sorted(self.free_target)),
            ambiguous=tuple(
                (call, tuple(others)) for call, others in sorted(self.ambiguous.items())
            ),
        )

    def calls(self, pair: CallPair) -> tuple[Call, Call]:
        """The reference call and the target call of a pair."""
        return self.reference.calls[pair.reference], self.target.calls[pair.target]

    def partners(self, but: Container[int] = ()) -> dict[int, tuple[int, str]]:
        """Partners of the reference's records: record -> (target record, "call:slot"). but: calls
        to leave out.
        """
        out: dict[int, tuple[int, str]] = {}
        for pair in self.pairs.values():
            if pair.reference not in but:
                scope = self.target.calls[pair.target].scope
                for slot in pair.slots:
                    out.setdefault(
                        slot.reference_record, (slot.target_record, f"{scope}:{slot.target_slot}")
                    )
        return out

    def set_slots(self, call: int, slots: Iterable[SlotPair]) -> None:
        """Give a pair these slots; all other slots of both calls are then listed as unpaired."""
        pair = self.pairs[call]
        refs, target_refs = (call.refs for call in self.calls(pair))
        order = [r.slot for r in refs]
        chosen = sorted(slots, key=lambda s: order.index(s.reference_slot))
        paired, used = (
            {s.reference_slot for s in chosen},
            {r for s in chosen for r in self._sources_of(s.target_record)},
        )
        self.pairs[call] = replace(
            pair,
            slots=tuple(chosen),
            only_reference=tuple(n for n in order if n not in paired),
            only_target=tuple(r.slot for r in target_refs if r.record not in used),
        )

    def _sources_of(self, record: int) -> tuple[int, ...]:
        """The target's own records that a record is derived from."""
        index = record - len(self.target.records)
        return (
            tuple(r for _, ids in self.derived.tensors[index].operands for r in ids)
            if index >= 0
            else (record,)
        )

    def is_fixed(self, reference: int) -> bool:
        """Whether the user's map fixes the partner of this call."""
        pair = self.pairs.get(reference)
        return pair is not None and pair.rule == USER_MAP

    # ---- what is read

    def array(self, side: str, record: int | None) -> Array | None:
        """Elements of a record of one side; None where they were not stored."""
        if record is None:
            return None
        try:
            return self.run(side).array(record)
        except ElementsMissing:
            return None

    def run(self, side: str) -> Run:
        return self.reference if side == "reference" else self.target

    def kids(self, side: str) -> dict[int, list[int]]:
        return self.kids_reference if side == "reference" else self.kids_target

    def record(self, side: str, record: int) -> Record:
        """A record of one side; for the target also one that will be derived."""
        return (
            self.reference.records[record] if side == "reference" else self.derived.record(record)
        )

    def release(self, side: str, call: Call) -> None:
        """Remove a call from its pair, and from the free and ambiguous calls. Its partner becomes
        free.
        """
        if side == "reference":
            if call.id in self.pairs:
                self.free_target.update(self.unpair(call.id))
            self.free_reference.discard(call.id)
            for candidate in self.ambiguous.pop(call.id, ()):
                self.doubtful[candidate].discard(call.id)
                if not self.doubtful[candidate] and not self.paired_with[candidate]:
                    self.free_target.add(candidate)
        else:
            for call_id in list(self.paired_with[call.id]):
                self.free_target.update(self.unpair(call_id))
                self.free_reference.add(call_id)
            self.free_target.discard(call.id)
            for call_id in self.doubtful.pop(call.id, ()):
                self.ambiguous[call_id].remove(call.id)
                if not self.ambiguous[call_id]:
                    del self.ambiguous[call_id]
                    self.free_reference.add(call_id)

    def unpair(self, reference: int) -> list[int]:
        """Remove a pair; returns the target calls that have no partner now."""
        pair = self.pairs.pop(reference)
        for partner in (pair.target, *pair.also):
            self.paired_with[partner].discard(reference)
        return [partner for partner in (pair.target, *pair.also) if not self.paired_with[partner]]

    def add(self, pair: CallPair) -> None:
        """Add a pair of calls that were freed."""
        self.pairs[pair.reference] = pair
        self.free_reference.discard(pair.reference)
        for partner in (pair.target, *pair.also):
            self.paired_with[partner].add(pair.reference)
            self.free_target.discard(partner)

    def attach(self, reference: int, others: Sequence[int]) -> None:
        """Add further target calls to a pair: they are part of its target call."""
        pair = self.pairs[reference]
        self.pairs[reference] = replace(pair, also=(*pair.also, *others))
        self.free_target -= set(others)


def spread(items: Sequence[T], count: int = READ) -> list[T]:
    """At most `count` of the items: the first, the last and some between them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def voted(members: Sequence[T], best: Callable[[T], int | None]) -> int | None:
    """The most frequent choice among a few siblings; None where no sibling gives one."""
    votes = Counter(b for member in spread(members) if (b := best(member)) is not None)
    return votes.most_common(1)[0][0] if votes else None


def short(call: Call) -> str:
    """A short name for a call: the last component of its path."""
    return call.scope.rpartition(".")[2] or call.op_type or call.root


def identifier(name: str) -> str:
    """The name as an identifier that a dims expression can bind."""
    out = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return out if out.isidentifier() else f"x_{out}"


def distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number appended to names that occur several times."""
    return [n if names.count(n) == 1 else f"{n}_{i}" for i, n in enumerate(names)]
