"""`whence.jsonl`: the calls, records and programs of a run, for formats that hold tensors with a
name and nothing else.

A line each: first what the dump is, then records (`elements.file` is where they lie), calls,
programs, notes, as `whence.records` has them. Hashes are left out, and statistics of what has
elements: the elements tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from whence.records import Call, Dumped, Record, Run, sidecar
from whence.records.slots import param_name
from whence.writers.support.job import by_moment, name

NAME = "whence.jsonl"
_ABOUT = ("versions", "settings", "seed", "deterministic")
_encode = msgspec.json.Encoder(enc_hook=repr).encode


def write(folder: Path, run: Run, places: Mapping[int, str]) -> Path:
    """Write the index. places: record -> where its elements lie (`Dumped.file`); the others have
    none.
    """
    path = folder / NAME
    with path.open("wb") as file:
        about = {"t": "dump", "version": 1, "kind": run.info.kind, "ended": run.ended}
        file.write(_encode(about | {name: getattr(run.info, name) for name in _ABOUT}) + b"\n")
        for record in run.records:
            file.write(_encode(_placed(record, places.get(record.id))) + b"\n")
        for call in run.calls:
            file.write(_encode(msgspec.structs.replace(call, files={}, seconds=0.0)) + b"\n")
        for line in (*run.programs.values(), *run.notes):
            file.write(_encode(line) + b"\n")
    return path


def _placed(record: Record, place: str | None) -> Record:
    if place is None:
        return msgspec.structs.replace(
            record,
            elements=None,
            hash="",
            why=record.why or "its elements could not be read when it was written",
        )
    return msgspec.structs.replace(
        record, elements=Dumped(place), hash="", statistics=None, sketch=None, why=""
    )


def sights(run: Run) -> dict[int, tuple[Call, str]]:
    """record -> (the first call that has it, its slot there), in the order in which calls began."""
    first: dict[int, tuple[Call, str]] = {}
    for calls in by_moment(run.calls).values():
        for call in sorted(calls, key=lambda call: call.order):
            for ref in call.refs:
                first.setdefault(ref.record, (call, ref.slot))
    return first


def label(record: Record, first_sight: tuple[Call, str] | None) -> str:
    """A record for people, by its first sight: "layers.0.fc.weight", "layers.0.fc.output.0"."""
    return (
        name(first_sight[0], param_name(first_sight[1]))
        if first_sight is not None
        else f"constant.{record.id}"
    )


_ALSO = 20  # calls without tensors that one mark tells of


class Marks:
    """Marks of the tensors of one step. calls: those that are written; the cards of those without
    tensors go with marks of others.
    """

    def __init__(self, run: Run, calls: Sequence[Call]) -> None:
        self._run, self._written_ids = run, {call.id for call in calls}
        self._bare = deque(call for call in calls if not call.refs)
        self._described: set[int] = set()

    def of(self, call: Call, slot: str) -> dict[str, Any]:
        """The mark of the next tensor that is written: {"slot", "call"}, with the card of its call
        when it is the first of it.
        """
        mark: dict[str, Any] = {"slot": slot, "call": call.id}
        if call.id not in self._described:
            self._described.add(call.id)
            mark["card"] = self.card(call)
        if self._bare:
            mark["also"] = [
                self.card(self._bare.popleft()) for _ in range(min(_ALSO, len(self._bare)))
            ]
        return mark

    def card(self, call: Call) -> dict[str, Any]:
        """The card of a call, below the nearest one above it that is written too."""
        parent = call.parent
        while parent >= 0 and parent not in self._written_ids:
            parent = self._run.calls[parent].parent
        return sidecar.write(call, parent)

    def untold(self) -> Sequence[Call]:
        """The calls without tensors for which there was no room."""
        return tuple(self._bare)
