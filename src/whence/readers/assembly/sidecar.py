"""Calls of a dump that whence wrote in another tool's format: its cards say to which call each
tensor belongs (`whence.records.sidecar`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from whence.readers.assembly.builder import Building
from whence.records import Call, sidecar


class CardedCalls:
    """Calls described by the cards of the tensors of one step. count: tensors that have a complete
    card.
    """

    def __init__(self) -> None:
        self.count = 0
        self._calls: dict[int, Call] = {}
        self._slots: dict[int, list[tuple[str, int]]] = {}

    def add(self, mark: Any, record: int) -> None:
        """Adds the mark of a tensor, an object or its text: {"slot", "call"}. The first mark of a
        call has its "card"; some marks also have cards of calls without tensors ("also"). Other
        marks are ignored.
        """
        try:
            entry = (
                msgspec.convert(mark, _Mark)
                if isinstance(mark, dict)
                else msgspec.json.decode(mark, type=_Mark)
            )
        except (
            TypeError,
            msgspec.ValidationError,
            msgspec.DecodeError,
            UnicodeEncodeError,
            RecursionError,
        ):
            return
        for also in entry.also:
            if (bare := sidecar.read(also)) is not None:
                self._calls.setdefault(bare.id, bare)
        if (card := sidecar.read(entry.card) if entry.card is not None else None) is not None:
            self._calls[entry.call] = card
        if entry.call in self._calls:
            self._slots.setdefault(entry.call, []).append((entry.slot, record))
            self.count += 1

    def build(self, building: Building, **moment: int) -> None:
        """Adds the calls. moment: rank and step according to the dump; they override the cards."""
        calls = [
            msgspec.structs.replace(card, id=number, **moment)
            for number, card in self._calls.items()
        ]
        add(building, calls, self._slots)


class _Mark(msgspec.Struct):
    slot: str
    call: int
    card: Any = None
    also: list[Any] = []


def add(building: Building, calls: Iterable[Call], slots: dict[int, list[tuple[str, int]]]) -> None:
    """Adds calls in the order in which they began, nested by parent. slots: id ->
    (slot, record).
    """
    handles: dict[int, int] = {}
    for call in sorted(calls, key=lambda call: (call.rank, call.order)):
        handles[call.id] = building.again(
            call, slots.get(call.id, []), handles.get(call.parent, -1)
        )
