"""Adds to a call the tensors it read from objects (a cache inside an argument) that the capture did
not list as inputs.

A capture of modules finds these while it records a program. A capture of operators sees only who
reads them, so they are looked up here among what earlier calls wrote.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from whence import judge
from whence.records import Call, Ref, Run, children
from whence.records.slots import SlotKind, is_mutated, is_written, slot_of_kind

Place = tuple[str, str, str]
"""Root, scope and slot of a module."""


class EarlierTensors(NamedTuple):
    """Tensors that a call read although it was not given them. refs: those that have the same name
    in either run, as inputs. unnamed: records of the others.
    """

    refs: tuple[Ref, ...]
    unnamed: frozenset[int]


class Writers:
    """Which call wrote each tensor of a run, and when."""

    def __init__(self, run: Run) -> None:
        self._run, self._below = run, children(run.calls)
        self._by_operators: dict[int, int] = {}  # record -> the first operator that wrote it
        self._places: dict[int, dict[Place, int]] = {}  # record -> place -> the first such call
        self._written: dict[Place, list[tuple[int, int]]] = {}  # place -> (call, record) in order
        for call in run.calls:
            for ref in call.refs:
                if not is_written(ref.slot):
                    continue
                if call.kind == "operator":
                    self._by_operators.setdefault(ref.record, call.id)
                elif call.kind == "module":
                    place = call.root, call.scope, ref.slot
                    self._places.setdefault(ref.record, {}).setdefault(place, call.id)
                    self._written.setdefault(place, []).append((call.id, ref.record))

    def before(self, call: Call, kids: Sequence[Call]) -> EarlierTensors:
        """What the operators among `kids`, the calls right below `call`, read that earlier calls
        wrote and that `call` was not given.
        """
        known = {r.record for r in call.refs if not is_written(r.slot)}
        known |= {r.record for kid in kids for r in kid.refs if is_written(r.slot)}
        start = self._start(call)
        taken = {r.slot for r in call.refs}
        refs: dict[str, Ref] = {}
        unnamed: set[int] = set()
        for ref in _read(kids):
            if ref.record in known:
                continue
            known.add(ref.record)
            slot = self._slot(call, ref.record, start)
            if slot and slot not in taken and slot not in refs:
                refs[slot] = Ref(slot, ref.record, ref.edge)
            elif self._is_activation(ref, start):
                unnamed.add(ref.record)
        return EarlierTensors(tuple(refs.values()), frozenset(unnamed))

    def _start(self, call: Call) -> int:
        """The id of the first call that ended inside this one; all before it ended earlier."""
        kids = self._below.get(call.id)
        return self._start(self._run.calls[kids[0]]) if kids else call.id

    def _slot(self, call: Call, record: int, start: int) -> str:
        """The slot to give a tensor that a module wrote; "" where no module has it as its newest.

        An older state of a cache has no name: the other run's newest would be taken for it.
        """
        places = [
            place
            for place, first in self._places.get(record, {}).items()
            if first < start and self._newest(place, start) == record
        ]
        if not places:
            return ""
        own = [p for p in places if p[:2] == (call.root, call.scope) and is_mutated(p[2])]
        if own:
            return slot_of_kind(own[0][2], SlotKind.INPUT)
        root, scope, slot = max(places, key=lambda place: (len(place[1]), place))
        return f"{SlotKind.INPUT}.{scope or root}.{slot}"

    def _newest(self, place: Place, start: int) -> int:
        written = self._written[place]
        return written[bisect.bisect_left(written, (start, -1)) - 1][1]

    def _is_activation(self, ref: Ref, start: int) -> bool:
        """Did an earlier call compute this tensor, so that the other run has its own of it? A
        constant of the code may only happen to hold the same numbers.
        """
        writers = (self._by_operators.get(ref.record), *self._places.get(ref.record, {}).values())
        return (
            ref.edge == "identity"
            and any(writer is not None and writer < start for writer in writers)
            and judge.unit_roundoff(self._run.records[ref.record].dtype) > 0
        )


def _read(kids: Iterable[Call]) -> Iterable[Ref]:
    return (ref for kid in kids if kid.kind == "operator" for ref in kid.slots("input"))
