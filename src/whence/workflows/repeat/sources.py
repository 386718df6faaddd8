"""Walks over two runs of one program in execution order and collects tensors that differ although
everything they were computed from is equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from whence.records import Call, Ref, Run
from whence.records.marks import NoProgram, is_without_program
from whence.records.region import children
from whence.records.slots import is_drawn, is_param, is_read, is_state, is_written
from whence.results import SourceKind
from whence.workflows.repeat.equal_records import EqualRecords, partners
from whence.workflows.repeat.programs import ChangedOperation, changed_operation


class Difference(NamedTuple):
    """A tensor that differs although its inputs are equal.

    call, partner: the call with the tensor in both runs; for a tensor made by a container's own
    code, the container's. place: of the container's child that receives it, -1 for none. records:
    in the two runs, None when it is no tensor. changed: the first operation in which the recorded
    programs differ.
    """

    kind: SourceKind
    call: Call
    partner: Call | None
    slot: str
    records: tuple[int, int] | None = None
    changed: ChangedOperation | None = None
    words: str = ""


class _Sides(NamedTuple):
    """A call and the same call of the other run."""

    call: Call
    partner: Call


class Walk:
    """Finds differences between two runs in execution order.

    calls: number of compared calls. records: compares records of the two runs.
    """

    def __init__(self, first: Run, second: Run) -> None:
        self.first, self.second = first, second
        self.records = EqualRecords(first, second)
        self._partners = partners(first.calls, second.calls)
        self._kids = children(first.calls)
        self._seen: set[int] = set()
        self._unequal = 0  # sights that differ, so far
        self._unequal_results = 0  # those of them that a call made
        self._programs: dict[tuple[str, str], ChangedOperation | None] = {}
        self.calls = len(self._partners)

    def differences(self) -> list[Difference]:
        """All differences, in execution order."""
        differences = [*self._below(-1, None, 0), *self._only_in_second()]
        return sorted(differences, key=lambda difference: difference.call.order)

    def _only_in_second(self) -> Iterator[Difference]:
        paired = set(self._partners.values())
        missing = {call.id for call in self.second.calls if call.id not in paired}
        for call in self.second.calls:
            if call.id in missing and call.parent not in missing:
                words = "only the second run makes this call"
                yield Difference(SourceKind.CALLS, call, None, "", words=words)

    def _below(self, parent: int, above: _Sides | None, before: int) -> Iterator[Difference]:
        """Differences inside a call. before: number of differing tensors when the call began."""
        for place, number in enumerate(self._kids.get(parent, ())):
            call = self.first.calls[number]
            if call.id not in self._partners:
                words = "only the first run makes this call"
                self._unequal += 1
                yield Difference(SourceKind.CALLS, call, None, "", words=words)
                continue
            sides = _Sides(call, self.second.calls[self._partners[call.id]])
            began = self._unequal
            yield from self._given(sides, above, place, before)
            yield from self._below(call.id, sides if call.refs else None, began)
            yield from self._left(sides, began)

    # ---- inputs of a call

    def _given(
        self, sides: _Sides, above: _Sides | None, place: int, before: int
    ) -> Iterator[Difference]:
        call, partner = sides
        if repr(call.arguments) != repr(partner.arguments) and not self._unequal:
            self._unequal += 1
            words = _arguments(call, partner)
            yield Difference(SourceKind.ARGUMENT, call, partner, "arguments", words=words)
        untouched = self._unequal == before
        for ref, equal in self._refs(sides, read=True):
            is_new = ref.record not in self._seen
            self._seen.add(ref.record)
            if equal:
                continue
            self._unequal += 1
            if not is_new:
                continue
            records = self._pair(ref, partner)
            if is_state(ref.slot) or is_drawn(ref.slot):
                yield Difference(SourceKind.RANDOM, call, partner, ref.slot, records)
            elif is_param(ref.slot):
                yield Difference(SourceKind.STATE, call, partner, ref.slot, records)
            elif above is not None:
                if untouched:
                    yield self._made(above, f"{place}:{ref.slot}", records)
            elif not self._unequal_results:
                yield Difference(SourceKind.INPUT, call, partner, ref.slot, records)

    def _refs(self, sides: _Sides, *, read: bool) -> Iterator[tuple[Ref, bool]]:
        """The tensors that a call reads (or writes), each with whether it is equal; unknown counts
        as equal.
        """
        others = {ref.slot: ref.record for ref in sides.partner.refs}
        for ref in sides.call.refs:
            wanted = is_read(ref.slot) or is_state(ref.slot) if read else is_written(ref.slot)
            if wanted:
                record = others.get(ref.slot)
                equal = record is not None and self.records.equal(ref.record, record) is not False
                yield ref, equal

    @staticmethod
    def _pair(ref: Ref, partner: Call) -> tuple[int, int] | None:
        record = next((r.record for r in partner.refs if r.slot == ref.slot), None)
        return (ref.record, record) if record is not None else None

    # ---- outputs of a call

    def _left(self, sides: _Sides, began: int) -> Iterator[Difference]:
        inherited = self._unequal > began
        changed = self._changed(sides)
        told = False
        for ref, equal in self._refs(sides, read=False):
            is_new = ref.record not in self._seen
            self._seen.add(ref.record)
            if equal:
                continue
            self._unequal += 1
            self._unequal_results += 1
            if is_new and not inherited and not told:
                told = True
                yield self._made(sides, ref.slot, self._pair(ref, sides.partner))
        if changed is not None and not self._unequal:
            self._unequal += 1
            words = f"{changed.words}; its outputs are equal"
            yield Difference(SourceKind.CODE, sides.call, sides.partner, "", None, changed, words)
        if len(sides.call.refs) != len(sides.partner.refs) and not self._unequal:
            self._unequal += 1
            words = "it has other tensors in the two runs"
            yield Difference(SourceKind.CALLS, sides.call, sides.partner, "", words=words)

    def _made(self, sides: _Sides, slot: str, records: tuple[int, int] | None) -> Difference:
        """A difference that a call's own code produced from equal inputs."""
        call, partner = sides
        changed = self._changed(sides)
        has_state = any(is_state(ref.slot) for ref in call.refs)
        if changed is not None:
            kind = SourceKind.CODE
        elif is_without_program(call, NoProgram.RANDOM) and not has_state:
            kind = SourceKind.RANDOM
        else:
            kind = SourceKind.OPERATOR
        return Difference(kind, call, partner, slot, records, changed)

    def _changed(self, sides: _Sides) -> ChangedOperation | None:
        """The first operation in which the recorded programs of both calls differ."""
        ids = sides.call.program, sides.partner.program
        if not all(ids) or ids[0] not in self.first.programs:
            return None
        if ids not in self._programs:
            programs = self.first.programs[ids[0]], self.second.programs[ids[1]]
            self._programs[ids] = changed_operation(programs, (self.first, self.second))
        return self._programs[ids]

    def is_whole(self) -> bool:
        """Whether every call of both runs was compared."""
        return len(self._partners) == len(self.first.calls) == len(self.second.calls)


def _arguments(call: Call, partner: Call) -> str:
    for name in {**call.arguments, **partner.arguments}:
        a, b = (repr(c.arguments.get(name)) for c in (call, partner))
        if a != b:
            return f"{name} is {a[:60]} in one run and {b[:60]} in the other"
    return "it is given other arguments"


def has_operators(run: Run, call: Call) -> bool:
    """Whether the operators that a call ran are recorded as calls of their own."""
    return any(c.kind == "operator" and c.parent == call.id for c in run.calls)


def initial_states(run: Run) -> dict[str, int]:
    """Parameters and buffers as a run first reads them: NAME.SLOT -> record."""
    out: dict[str, int] = {}
    for call in sorted(run.calls, key=lambda c: c.order):
        if call.phase == "forward" and call.kind == "module":
            for ref in call.slots("param"):
                out.setdefault(f"{call.root}.{call.scope}.{ref.slot}", ref.record)
    return out


def outside_inputs(run: Run, call: Call, slot: str) -> Iterator[int]:
    """Records of an input slot over all calls of the same module or operator."""
    place = (call.root, call.scope, call.op, call.op_type)
    for other in run.calls:
        if (other.root, other.scope, other.op, other.op_type) == place:
            yield from (r.record for r in other.refs if r.slot == slot)
