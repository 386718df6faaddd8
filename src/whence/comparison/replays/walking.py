"""Runs the reference through from its roots, with what a target shows in the place of what comes up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from whence.comparison.replays.call_tree import Chain, Noise
from whence.comparison.replays.side import Side
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call

_PRODUCTS = frozenset({"linear", "mm", "addmm", "matmul", "bmm"})


class Walk(Chain):
    """A chain over whole roots, one after the other, that shows each tensor which comes up and goes on with the target's.

    instead: the target's tensor for a record of the reference, None where it shows none. inner: (call, operation) -> record of what
    one operator gives. coarser: done to what calls that are a matrix product are given, None for nothing.
    why: why something could not be run, "" when all was.
    """

    def __init__(
        self, side: Side, working: str, held: Callable[[Any, Call, str], Any], instead: Callable[[int], Array | None], *,
        noise: Noise | None = None, coarser: Callable[[Array], Array] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(side, working, held, noise=noise)
        self._instead, self._coarser = instead, coarser
        self.inner: dict[tuple[int, int], int] = {}
        self.why = ""
        self._came: dict[int, Array] = {}
        self._owned: set[int] | None = None

    def through(self, root: Call) -> dict[int, Array]:
        """What came up in this call and below, by record. What is not seen of its inputs is as before it, or the reference's."""
        self._came = {}
        given: dict[str, Array] = {}
        for ref in root.slots("input"):
            try:
                given[ref.slot] = self._known(ref.record, self.side.run)
            except ElementsMissing as error:
                self.why = self.why or str(error)
        self._try(root, given)
        return self._came

    def _known(self, record: int, run: Any) -> Array:
        other = self._instead(record)
        other = other if other is not None else self.state.get(record)
        array: Array = other if other is not None else run.array(record)
        return array

    def _try(self, call: Call, given: Mapping[str, Array]) -> None:
        """Run a call; where that is refused, the calls below it that all is known for."""
        try:
            left = self.run(call, given)
        except (ReplayRefused, ElementsMissing) as error:
            self.why = self.why or f"{call.scope or call.root}: {error}"
            for kid in (self.side.run.calls[k] for k in self.side.children(call.id)):
                there = {r.slot: self._instead(r.record) for r in kid.slots("input")}
                known = self._parameters(kid) | {r.slot: self.state[r.record] for r in kid.slots("input") if r.record in self.state}
                self._try(kid, known | {slot: array for slot, array in there.items() if array is not None})
            return
        own = {r.slot: r.record for r in call.refs}
        self.state.update((own[slot], array) for slot, array in left.items() if slot in own)

    def _parameters(self, call: Call) -> dict[str, Array]:
        """The parameters that an operator was given as inputs: the reference's own."""
        if call.kind != "operator":
            return {}
        if self._owned is None:
            self._owned = {r.record for c in self.side.run.calls for r in c.slots("param")}
        return {r.slot: self.side.run.array(r.record) for r in call.slots("input") if r.record in self._owned}

    def passing(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, Array]:
        own = {r.slot: r.record for r in call.refs}
        out = dict(arrays)
        for slot, array in arrays.items():
            record = own.get(slot)
            other = self._instead(record) if record is not None else None
            if record is not None and other is not None and other.shape == array.shape:
                self._came.setdefault(record, array)
                out[slot] = other
            if self._coarser is not None and slot.startswith("input") and call.leaf and self._multiplies(call):
                out[slot] = self._coarser(out[slot])
        return out

    def trace(self, call: Call) -> Callable[[int, Array], None] | None:
        wanted = {at: record for (owner, at), record in self.inner.items() if owner == call.id}
        if not wanted:
            return None

        def take(at: int, array: Array) -> None:
            if at in wanted:
                self._came.setdefault(wanted[at], array)

        return take

    def _multiplies(self, call: Call) -> bool:
        """Is this call a matrix product?"""
        program = self.side.run.programs.get(call.program)
        return program is not None and any(op.name.split(".")[1] in _PRODUCTS for op in program.operations)
