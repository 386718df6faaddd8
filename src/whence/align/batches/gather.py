"""Calls gathered from pieces of several calls: the rows and tokens of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from whence.align.batches.batch import Batch
from whence.align.batches.sequence_tensors import Line, SequenceTensors, Shape
from whence.align.batches.token_axes import SlotAxes, SlotKey, slot_key
from whence.align.derived_run import DerivedTensors
from whence.align.dims import Unfit
from whence.records import Call, Ref
from whence.records.slots import is_output, is_param, is_written


class SequenceGatherer:
    """Gathers calls of one run from pieces; they replace those they are made of."""

    def __init__(self, slots: SlotAxes, batches: Mapping[int, Batch]) -> None:
        self.slots, self._batches = slots, batches
        self._tensors = SequenceTensors(slots.derived, batches)
        self._shapes: Mapping[SlotKey, Shape] = {}
        self._calls: dict[int, dict[tuple[Any, ...], Call]] = {}

    def is_call(self, lines: Sequence[Line]) -> bool:
        """Are these all rows and tokens of one call as it is?"""
        batch = self._batches[lines[0][0].call]
        return (
            all(len(line) == 1 for line in lines)
            and not batch.flat
            and self._tensors.all_rows(lines)
            and (lines[0][0].start, lines[0][0].stop) == (0, batch.width)
        )

    def gathered(
        self,
        lines: Sequence[Line],
        *,
        step: int,
        micro: int,
        note: str,
        lasts_across: tuple[set[SlotKey], Sequence[int]] = (set(), ()),
        shapes: Mapping[SlotKey, Shape] | None = None,
    ) -> list[Call]:
        """The calls of one unit. lines: the pieces of every row of the batch it has, in order. Ids
        are those of the longest piece's.

        lasts_across: slots of which the other run has only the last token of each call, and which
        tokens of the sequence these are. shapes: of the other run's tensors, where it has slots of
        these names.
        """
        self._shapes = shapes or {}
        longest = max(
            range(len(lines[0])), key=lambda i: (lines[0][i].stop - lines[0][i].start, -i)
        )
        calls = []
        for call in self.slots.tree(lines[0][longest].call):
            refs = []
            for ref in call.refs:
                record = (
                    ref.record
                    if is_param(ref.slot) or ref.record in self.slots.held
                    else self._record(call, ref.slot, lines, lasts_across)
                )
                if record is not None:
                    refs.append(Ref(ref.slot, record, ref.edge))
            is_lost = (
                call.leaf and call.slots("output") and not any(is_output(r.slot) for r in refs)
            )
            if is_lost:  # no partner: it runs again as part of the call above
                continue
            calls.append(
                replace(call, refs=tuple(refs), step=step, micro=micro, notes=(*call.notes, note))
            )
        return calls

    def _record(
        self,
        call: Call,
        slot: str,
        lines: Sequence[Line],
        lasts_across: tuple[set[SlotKey], Sequence[int]],
    ) -> int | None:
        """The tensor of a slot, made from all pieces; None where it cannot be."""
        axes = self.slots.of(call, slot)
        if axes is None:
            return None
        if is_written(slot) and not axes.has_tokens:
            if not all(line[-1].whole for line in lines):
                return None
            lines = [line[-1:] for line in lines]  # a state, as the last token leaves it
        keys, tokens = lasts_across
        key = slot_key(call, slot)
        tokens_across = tokens if keys and (axes.last is not None or key in keys) else None
        records: dict[int, int] = {}
        for piece in (p for line in lines for p in line):
            source = self._calls_of(piece.call).get((call.scope, call.op, call.occurrence))
            refs = source.refs if source is not None else ()
            record = next((r.record for r in refs if r.slot == slot), None)
            if record is None:
                return None
            records[piece.call] = record
        try:
            return self._tensors.assembled(
                axes, lines, records, tokens_across, self._shapes.get(key)
            )
        except Unfit:
            return None

    def _calls_of(self, root: int) -> dict[tuple[Any, ...], Call]:
        calls = self._calls.get(root)
        if calls is None:
            calls = {(c.scope, c.op, c.occurrence): c for c in self.slots.tree(root)}
            self._calls[root] = calls
        return calls


def shapes_of(calls: Iterable[Call], derived: DerivedTensors) -> dict[SlotKey, Shape]:
    """The shape of every tensor of the calls of one unit, by the name of its slot."""
    return {slot_key(c, r.slot): derived.record(r.record).shape for c in calls for r in c.refs}
