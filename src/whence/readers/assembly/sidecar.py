"""Calls of a dump that whence wrote in another tool's format: its cards say which call each tensor
is of (`whence.records.sidecar`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from whence.readers.assembly.builder import Building
from whence.records import Call, sidecar


class Told:
    """What the cards beside the tensors of one step tell. of: how many tensors have one that is
    whole.
    """

    def __init__(self) -> None:
        self.of = 0
        self._calls: dict[int, Call] = {}
        self._slots: dict[int, list[tuple[str, int]]] = {}

    def add(self, mark: Any, record: int) -> None:
        """Take the mark of a tensor, also as text: {"slot", "call"}, the first of a call with its
        "card", some with cards of calls without tensors ("also"). What is none is passed over."""
        try:
            found = (
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
        for also in found.also:
            if (bare := sidecar.read(also)) is not None:
                self._calls.setdefault(bare.id, bare)
        if (card := sidecar.read(found.card) if found.card is not None else None) is not None:
            self._calls[found.call] = card
        if found.call in self._calls:
            self._slots.setdefault(found.call, []).append((found.slot, record))
            self.of += 1

    def build(self, building: Building, **moment: int) -> None:
        """Add the calls. moment: rank and step, where the dump has them itself; they hold where it
        was changed.
        """
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
    """Add calls in the order in which they began, below each other. slots: id -> (slot, record)."""
    handles: dict[int, int] = {}
    for call in sorted(calls, key=lambda call: (call.rank, call.order)):
        handles[call.id] = building.again(
            call, slots.get(call.id, []), handles.get(call.parent, -1)
        )
