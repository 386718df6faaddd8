"""Marks beside tensors: of which call and under which slot each is (`whence.cards`), for formats with room for a little text there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from whence.records import Call, Run, sidecar

_ALSO = 20  # calls without tensors that one mark tells of


class Marks:
    """Marks of the tensors of one step. calls: those that are written; those of them without tensors are told of beside others."""

    def __init__(self, run: Run, calls: Sequence[Call]) -> None:
        self._run, self._held = run, {call.id for call in calls}
        self._bare = deque(call for call in calls if not call.refs)
        self._told: set[int] = set()

    def of(self, call: Call, slot: str) -> dict[str, Any]:
        """The mark of the next tensor that is written: {"slot", "call"}, with the card of its call when it is the first of it."""
        mark: dict[str, Any] = {"slot": slot, "call": call.id}
        if call.id not in self._told:
            self._told.add(call.id)
            mark["card"] = self.card(call)
        if self._bare:
            mark["also"] = [self.card(self._bare.popleft()) for _ in range(min(_ALSO, len(self._bare)))]
        return mark

    def card(self, call: Call) -> dict[str, Any]:
        """The card of a call, below the nearest one above it that is written too."""
        parent = call.parent
        while parent >= 0 and parent not in self._held:
            parent = self._run.calls[parent].parent
        return sidecar.write(call, parent)

    def untold(self) -> Sequence[Call]:
        """The calls without tensors for which there was no room."""
        return tuple(self._bare)
