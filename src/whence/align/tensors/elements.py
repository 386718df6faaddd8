"""The tensors of a run with calls and of a run of labels, including tensors inside calls that are
computed again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from whence import dtypes
from whence.align.derived_run import Derived
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.frameworks import host
from whence.records import Call, Record, Run, in_order
from whence.records.slots import is_input, is_param, is_written
from whence.results import TENSOR_RULE, CallPair, Made, SlotPair

_HELD = 512  # most recently read arrays that are kept

Numbers = tuple[int, ...]
Family = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inner:
    """A tensor made by one operator of a call's program and held by no record."""

    call: int
    operation: int
    name: str
    array: Array


Inside = Callable[[int, frozenset[int]], Iterable[Inner]]
"""(step, element counts) -> tensors inside that step's calls with one of these counts."""


@dataclass(slots=True)
class Place:
    """A tensor of the run with calls. roles: (starred name, numbers in it) for each of its names,
    in order.
    """

    record: int
    order: int
    roles: list[tuple[Family, Numbers]] = field(default_factory=list)
    words: str = ""
    is_written: bool = False


@dataclass(slots=True)
class Tap:
    """A tensor of the run of labels."""

    call: int
    record: int
    order: int
    family: Family
    numbers: Numbers
    name: str


def split(name: str) -> tuple[str, Numbers]:
    """(the name with its numbers starred, the numbers)."""
    return re.sub(r"\d+", "*", name), tuple(int(n) for n in re.findall(r"\d{1,9}", name))


class Recomputed(Derived):
    """A run with additional tensors that were computed again from its programs."""

    def __init__(
        self, base: Run, tensors: Sequence[Made], records: Sequence[Record], arrays: Sequence[Array]
    ) -> None:
        super().__init__(base, tensors, records)
        self._arrays = arrays

    def _make(self, tensor: Made) -> Array:
        view = self._arrays[tensor.record - self._first].view()
        view.flags.writeable = False
        return view


class Elements:
    """Records and arrays of both runs by number; numbers after those of the run with calls stand
    for recomputed tensors.

    rich: the run with calls. taps: the run of labels. inner: recomputed tensors. first_inner: the
    number of the first of them.
    """

    def __init__(self, rich: Run, taps: Run) -> None:
        self.rich, self.taps = rich, taps
        self.inner: list[Inner] = []
        self.first_inner = len(rich.records)
        self._inner_records: list[Record] = []
        self._arrays: dict[tuple[bool, int], Array | None] = {}

    def record(self, rich: bool, record: int) -> Record:
        if rich:
            return (
                self._inner_records[record - self.first_inner]
                if record >= self.first_inner
                else self.rich.records[record]
            )
        return self.taps.records[record]

    def array(self, rich: bool, record: int) -> Array | None:
        """Elements of a record; None where they were not stored. The most recently read arrays are
        kept. rich: read from the run with calls.
        """
        key = rich, record
        if key not in self._arrays:
            if len(self._arrays) > _HELD:
                self._arrays.pop(next(iter(self._arrays)))
            try:
                inner = rich and record >= self.first_inner
                self._arrays[key] = (
                    self.inner[record - self.first_inner].array
                    if inner
                    else (self.rich if rich else self.taps).array(record)
                )
            except ElementsMissing:
                self._arrays[key] = None
        return self._arrays[key]

    def add(self, item: Inner) -> int:
        """Add a recomputed tensor and return its number."""
        number = self.first_inner + len(self.inner)
        self.inner.append(item)
        self._inner_records.append(_described(number, item.array))
        return number

    def place(self, item: Inner) -> Place:
        """Add a recomputed tensor and return it as a place."""
        call = self.rich.calls[item.call]
        name, numbers = split(call.scope)
        words = f"{call.module_name} operator {item.operation} ({item.name})"
        role = ((name, f"inside.{item.operation}", str(call.occurrence)), numbers)
        return Place(self.add(item), call.order, [role], words, is_written=True)

    def with_inner(self, used: Collection[int]) -> Run:
        """The run with calls, extended by the recomputed tensors that are used."""
        if not any(number >= self.first_inner for number in used):
            return self.rich
        tensors = [
            Made(
                self.first_inner + i,
                f"operator {item.operation} of {self.rich.calls[item.call].scope}, computed again",
                (),
                item.name,
            )
            for i, item in enumerate(self.inner)
        ]
        unused = np.zeros(0, np.uint8)
        arrays = [
            item.array if self.first_inner + i in used else unused
            for i, item in enumerate(self.inner)
        ]
        return Recomputed(self.rich, tensors, self._inner_records, arrays)


def _described(number: int, array: Array) -> Record:
    """A record of a computed tensor, with figures of its elements."""
    dtype = dtypes.of(array).name
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    figures, sketch = host.statistics(data, dtype)
    return Record(number, dtype, tuple(array.shape), statistics=figures, sketch=sketch)


PairedTensor = tuple[int, str, SlotPair]
"""A call of the other run, why its tensor is paired, and how."""


def pairs_of_tensors(
    calls: Iterable[Call],
    paired: Mapping[int, PairedTensor],
    inner: Mapping[int, Sequence[tuple[str, int]]],
) -> Iterator[CallPair]:
    """Every call that wrote a paired tensor, or has one inside, with that and all its paired ones.

    paired: by record. inner: by call, (slot, record) of what is inside.
    """
    for call in in_order(calls):
        refs = [(r.slot, r.record) for r in call.refs if r.record in paired]
        outputs = [ref for ref in refs if is_written(ref[0])]
        chief = next(iter((*outputs, *inner.get(call.id, ()))), None)
        if chief is None:
            continue
        inputs = [ref for ref in refs if is_input(ref[0])]
        slots = tuple(
            replace(paired[record][2], reference_slot=slot)
            for slot, record in (*inputs, *outputs, *inner.get(call.id, ()))
        )
        named = {slot.reference_slot for slot in slots}
        only = tuple(r.slot for r in call.refs if r.slot not in named and not is_param(r.slot))
        across, why, _ = paired[chief[1]]
        yield CallPair(call.id, across, TENSOR_RULE, why, slots, only)
