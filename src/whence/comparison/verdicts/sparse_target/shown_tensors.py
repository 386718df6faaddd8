"""The tensors that a target shows of a reference which was captured whole, and what each rests
on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from whence.comparison.paired_runs import PairedRuns
from whence.comparison.replays.side import ReplaySource
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Program, Region
from whence.records.program import Operand
from whence.records.slots import is_inside, split_slot
from whence.results import SlotPair

RegionKey = tuple[int, int]
"""Call of the reference, and segment of it (-1 for a leaf)."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """What a tensor depends on. tensors: those shown before it; regions: what lies between.

    places: the same with all segments of a container as one, (call, 0), since one piece of code
    made them.
    """

    regions: frozenset[RegionKey]
    tensors: frozenset[int]

    @property
    def places(self) -> frozenset[RegionKey]:
        return frozenset((call, min(segment, 0)) for call, segment in self.regions)


class ShownTensors:
    """Shown tensors by their record of the reference.

    pairs: by call, the index of its pair. slots: by record, the index of the pair and the slot.
    maker: by record, the region that made it. inner: by call, (record, operation) of tensors inside
    its program. regions: all of the reference, in order of execution; order: their places in it.
    """

    def __init__(
        self,
        paired: PairedRuns,
        pairs: Mapping[int, int],
        regions: Sequence[Region],
        source: ReplaySource | None,
    ) -> None:
        self.paired, self.pairs, self._source = paired, pairs, source
        self.slots: dict[int, tuple[int, SlotPair]] = {}
        self.inner: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.maker: dict[int, RegionKey] = {}
        self.regions = {(r.call, r.stretch): r for r in regions if pairs}
        self.order = {key: place for place, key in enumerate(self.regions)}
        self._needed: dict[int, dict[int, set[int]]] = {}
        for key, region in self.regions.items():
            for record in region.outputs:
                self.maker.setdefault(record, key)
        for call, index in pairs.items():
            for slot in paired.plan.pairs[index].slots:
                record = slot.reference_record
                if is_inside(slot.reference_slot):
                    operation = int(split_slot(slot.reference_slot)[1])
                    self.inner[call].append((record, operation))
                    self.maker[record] = self._region_of(call, operation)
                if record not in self.slots or self.maker.get(record, (-1, 0))[0] == call:
                    self.slots[record] = index, slot

    def _region_of(self, call: int, operation: int) -> RegionKey:
        """The segment of a call's own operators that this one is in."""
        container = self.paired.calls[call]
        program = self.paired.reference.programs.get(container.program)
        if container.leaf or program is None:
            return call, -1
        return call, sum(
            1 for _, operation_before in program.calls if operation_before <= operation
        )

    def in_order(self) -> list[int]:
        """The records that a region made, in order of execution."""
        records = (record for record in self.slots if record in self.maker)
        return sorted(records, key=self.place)

    def place(self, record: int) -> int:
        """The place of the region that made a tensor, in order of execution."""
        return self.order[self.maker[record]]

    def array(self, record: int) -> Array:
        """What the target shows of a record of the reference."""
        return self.paired.target.array(self.slots[record][1].target_record)

    def path(self, call: int) -> list[int]:
        """The calls around one, the outermost first, and it."""
        path = [call]
        while (parent := self.paired.calls[path[-1]].parent) != -1:
            path.append(parent)
        return path[::-1]

    def roots(self) -> list[Call]:
        """The outermost calls with tensors that the target shows, in order of execution."""
        roots = dict.fromkeys(self.path(call)[0] for call in self.pairs)
        return sorted((self.paired.calls[root] for root in roots), key=lambda c: c.order)

    def is_within(self, call: int, above: int) -> bool:
        """Is a call this one, or inside it?"""
        while call != -1 and call != above:
            call = self.paired.calls[call].parent
        return call == above

    def label(self, slot: SlotPair) -> Call:
        """The call of the target that shows a tensor."""
        calls, pairs = self.paired.target.calls, self.paired.plan.pairs
        if slot.target_record < 0:
            return calls[pairs[self.slots[slot.reference_record][0]].target]
        return self.paired.maker(slot) or calls[pairs[0].target]

    def upstream(self, record: int) -> Upstream:
        """What a tensor depends on."""
        regions: set[RegionKey] = set()
        tensors: set[int] = set()
        visited: set[int] = set()
        todo = [record]
        while todo:
            current = todo.pop()
            regions.add(self.maker[current])
            for source in self._sources(current) - visited:
                visited.add(source)
                if source in self.slots:
                    tensors.add(source)
                elif source in self.maker and self.place(source) <= self.place(current):
                    todo.append(source)
        return Upstream(frozenset(regions), frozenset(tensors - {record}))

    def _sources(self, record: int) -> Set[int]:
        """What a tensor depends on, as the program that made it tells; without one, all that its
        region could see.
        """
        call, segment = self.maker[record]
        if call not in self._needed:
            self._needed[call] = self._needs(self.paired.calls[call])
        if record in self._needed[call]:
            return self._needed[call][record]
        return {
            r
            for k in range(min(segment, 0), segment + 1)
            if (call, k) in self.regions
            for r in self.regions[call, k].inputs
        }

    def _needs(self, call: Call) -> dict[int, set[int]]:
        """What each tensor that a call's own operators made depends on, by record; nothing without
        a program.
        """
        source = self._source
        if source is None:
            return {}
        try:
            loaded = source.load(call)
        except (ReplayRefused, ElementsMissing):
            return {}
        needs: dict[int, set[int]] = defaultdict(set)
        for slot, _ in loaded.program.outputs:
            record = source.record(call, slot)
            if record is not None:
                needs[record] |= set(source.records(call, loaded.needs(slot)).values())
        for record, operation in self.inner.get(call.id, ()):
            read = _inputs_of(loaded.program, operation)
            needs[record] = set(source.records(call, read).values())
        return needs


def _inputs_of(program: Program, operation: int) -> list[str]:
    """The slots that the result of one operator of a program depends on."""
    slots: dict[str, None] = {}
    visited: set[int] = set()
    todo = [Operand("op", (operation, 0))]
    while todo:
        kind, value = todo.pop()
        if kind == "in":
            slots[program.inputs[value]] = None
        elif kind == "param":
            slots[value] = None
        elif kind == "op" and value[0] not in visited:
            visited.add(value[0])
            todo += program.operations[value[0]].operands()
    return list(slots)
