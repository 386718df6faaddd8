"""Cuts off columns that only one run has: padding of one of several inputs (such as that of an
encoder before a decoder) which a mask hides, and tokens whose scores the other run does not
compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from whence import dtypes
from whence.align.derived_run import DerivedTensors
from whence.align.dims import Cut, Name, Node, Take
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Record, Ref, Run, children, marks
from whence.records.slots import input_name, is_input, is_output, is_param
from whence.results import CallPair, Plan, SlotPair

_DECODER = "decoder_"


class Columns(NamedTuple):
    """The columns to keep of an axis: `real` ones from `start` on, of `width`, in `rows` rows."""

    rows: int
    width: int
    start: int
    real: int

    def cut(self, node: Node, axis: int, extent: int, wanted: int) -> Node | None:
        """The expression that cuts an axis from `extent` to `wanted`; None if these columns do not
        fit.
        """
        columns = slice(self.start, self.start + self.real)
        if (extent, wanted) == (self.width, self.real):
            return Cut(node, (*[slice(None)] * axis, columns))
        if (extent, wanted) == (self.rows * self.width, self.rows * self.real):
            kept = np.arange(extent).reshape(self.rows, self.width)[:, columns]
            return Take(node, tuple(kept.ravel().tolist()), axis)
        return None


def cut(reference: Run, target: Run, plan: Plan) -> tuple[Run, Run, Plan]:
    """Both runs and the plan, without columns that only one run has: its mask hides them, or the
    other run returns the last tokens alone. Only inputs and such outputs of models are read.
    """
    sides = _Side(reference, "reference_slot", "reference"), _Side(target, "target_slot", "target")
    kids: dict[int, list[int]] = {}
    pairs = {pair.reference: pair for pair in plan.pairs}
    notes: list[str] = []
    for root in plan.pairs:
        call = reference.calls[root.reference]
        if call.parent >= 0 or call.phase != "forward":
            continue
        for side, other in (sides, sides[::-1]):
            hidden = list(_hidden(side, other, root))
            last = _last(side, other, root)
            if last is not None:
                notes.append(
                    f"{call.root} step {call.step}: the {other.name} computes the last {last.real} "
                    f"of {last.width} tokens alone"
                )
            notes += (
                f"{call.root} step {call.step}: {columns.width - columns.real} of {columns.width} "
                f"columns are padding that the {side.name} alone has"
                for columns in hidden
            )
            hidden += [last] if last is not None else []
            todo = [call.id] if hidden else []
            kids = kids or (children(reference.calls) if hidden else {})
            while todo:
                number = todo.pop()
                todo += kids.get(number, ())
                if number in pairs:
                    pairs[number] = side.without(hidden, pairs[number], other)
    if not notes:
        return reference, target, plan
    return (
        sides[0].done(),
        sides[1].done(),
        replace(
            plan,
            pairs=tuple(pairs[pair.reference] for pair in plan.pairs),
            notes=(*plan.notes, *notes),
        ),
    )


class _Side:
    """One run while columns of its tensors are cut off. slot: the field of `SlotPair` with its
    slot.
    """

    def __init__(self, run: Run, slot: str, name: str) -> None:
        self.run, self.name = run, name
        self._slot, self._record = slot, f"{name}_record"
        self._derived = DerivedTensors(run)
        self._calls: dict[int, Call] = {}

    def call(self, pair: CallPair) -> Call:
        number: int = getattr(pair, self.name)
        return self._calls.get(number, self.run.calls[number])

    def slot(self, pair: SlotPair) -> str:
        slot: str = getattr(pair, self._slot)
        return slot

    def record(self, pair: SlotPair) -> Record:
        return self._derived.record(getattr(pair, self._record))

    def array(self, pair: SlotPair) -> Array | None:
        """The elements of this side's tensor; None without them."""
        with contextlib.suppress(ElementsMissing):
            return self.run.array(getattr(pair, self._record))
        return None

    def without(self, hidden: Sequence[Columns], pair: CallPair, other: _Side) -> CallPair:
        """The pair of calls, with this side's tensors cut to the other side's shapes."""
        cut_records: dict[str, int] = {}
        slots = []
        for slot in pair.slots:
            record = self.record(slot)
            node = _cut_to(other.record(slot).shape, record.shape, hidden)
            if node is not None and not is_param(slot.reference_slot):
                number = self._derived.add(
                    node, {"x": [record.id]}, "columns of one run alone are cut off"
                )
                cut_records[self.slot(slot)] = number
                slot = replace(slot, **{self._record: number})
            slots.append(slot)
        if not cut_records:
            return pair
        call = self.call(pair)
        refs = tuple(Ref(r.slot, cut_records.get(r.slot, r.record), r.edge) for r in call.refs)
        note = marks.gathered(f"{hidden[0].real} of {hidden[0].width} columns", 1)
        notes = call.notes if note in call.notes else (*call.notes, note)
        self._calls[call.id] = replace(call, refs=refs, notes=notes)
        return replace(pair, slots=tuple(slots))

    def done(self) -> Run:
        """The run with the cut tensors; the run itself if nothing was cut."""
        if not self._calls:
            return self.run
        return self._derived.done([self._calls.get(call.id, call) for call in self.run.calls])


def _cut_to(
    wanted: tuple[int, ...], shape: tuple[int, ...], hidden: Sequence[Columns]
) -> Node | None:
    """The expression that cuts a tensor to the other run's shape; None if it has that shape, or if
    these columns do not lead to it.
    """
    if len(shape) == len(wanted) + 1 and (shape[0], *shape[2:]) == wanted:
        ones = (columns.cut(Name("x"), 1, shape[1], 1) for columns in hidden)
        one = next((node for node in ones if node is not None), None)
        return Cut(one, (slice(None), 0)) if one is not None else None
    if shape == wanted or len(shape) != len(wanted):
        return None
    node: Node | None = Name("x")
    for axis, extents in enumerate(zip(shape, wanted, strict=True)):
        if extents[0] != extents[1] and node is not None:
            parts = (columns.cut(node, axis, *extents) for columns in hidden)
            node = next((part for part in parts if part is not None), None)
    return node


def _hidden(side: _Side, other: _Side, root: CallPair) -> Iterator[Columns]:
    """The columns to keep in this side's call of a model, for inputs that are wider than the other
    side's by columns which a mask hides.
    """
    masks = {input_name(r.slot): r.record for r in side.call(root).slots("input")}
    for slot in root.slots:
        shape, wanted = side.record(slot).shape, other.record(slot).shape
        name = input_name(side.slot(slot))
        is_wider = len(shape) == len(wanted) > 1 and shape[1] > wanted[1] > 0
        if not is_input(slot.reference_slot) or "mask" in name or not is_wider:
            continue
        if shape[0] != wanted[0] or shape[2:] != wanted[2:]:
            continue
        for mask_name, record in masks.items():
            is_its = "mask" in mask_name and (
                mask_name.startswith(_DECODER) == name.startswith(_DECODER)
            )
            if is_its and side.run.records[record].shape == shape[:2]:
                with contextlib.suppress(ElementsMissing):
                    real = _real(side.run.array(record), "pad" in mask_name)
                    start = _start(side, other, slot, real) if real is not None else None
                    if start is not None:
                        yield Columns(shape[0], shape[1], start, wanted[1])


def _last(side: _Side, other: _Side, root: CallPair) -> Columns | None:
    """The last tokens to keep, if the other side's model has the same inputs but returns outputs
    for these tokens only: an argument asks for their number, or its outputs are nearer to those of
    the last tokens than of any others. None if not.
    """
    arguments = side.call(root).arguments
    asked = {
        value
        for name, value in other.call(root).arguments.items()
        if type(value) is int and arguments.get(name) != value
    }
    shared_inputs = {
        side.record(slot).shape
        for slot in root.slots
        if is_input(slot.reference_slot) and side.record(slot).shape == other.record(slot).shape
    }
    for slot in root.slots:
        shape, wanted = side.record(slot).shape, other.record(slot).shape
        if not is_output(slot.reference_slot) or len(shape) < 3:
            continue
        of_one = (shape[0], *shape[2:]) == wanted
        count = 1 if of_one else (wanted[1] if len(wanted) == len(shape) else 0)
        is_shorter = of_one or shape == (*wanted[:1], shape[1], *wanted[2:])
        is_of_tokens = any(inputs[:2] == shape[:2] for inputs in shared_inputs)
        if is_of_tokens and is_shorter and 0 < count < shape[1]:
            last = Columns(shape[0], shape[1], shape[1] - count, count)
            if count in asked or _is_nearest(last, side.array(slot), other.array(slot)):
                return last
    return None


def _is_nearest(columns: Columns, longer: Array | None, shorter: Array | None) -> bool:
    """Whether the elements of the shorter tensor are nearer to these columns of the longer one than
    to any others.
    """
    if longer is None or shorter is None or not dtypes.of(longer).is_floating:
        return False
    facing, starts = shorter.astype(np.float64), range(columns.width - columns.real + 1)
    parts = (longer[:, s : s + columns.real].astype(np.float64) for s in starts)
    off = [float(np.linalg.norm(part - facing.reshape(part.shape))) for part in parts]
    return all(off[columns.start] < far for s, far in enumerate(off) if s != columns.start)


def _real(mask: Array, is_of_padding: bool) -> tuple[int, int] | None:
    """(start, stop) of the columns that a mask of zeros and ones shows in any row; None if it is
    not such a mask or shows none.
    """
    if mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
        return None
    columns = np.flatnonzero((mask.astype(bool) ^ is_of_padding).any(axis=0))
    return (int(columns[0]), int(columns[-1]) + 1) if columns.size else None


def _start(side: _Side, other: _Side, slot: SlotPair, real: tuple[int, int]) -> int | None:
    """The column at which the other run's input starts, so that all real columns are kept; None if
    there is no such column.
    """
    record, facing = side.record(slot), other.record(slot)
    width, wanted = record.shape[1], facing.shape[1]
    starts: Sequence[int] = range(max(0, real[1] - wanted), min(real[0], width - wanted) + 1)
    if record.dtype in ("int64", "int32") and facing.dtype in ("int64", "int32"):
        wider, narrower = side.run.array(record.id), other.run.array(facing.id)
        starts = [s for s in starts if np.array_equal(wider[:, s : s + wanted], narrower)]
    elif real[1] - real[0] != wanted:
        return None
    return next(iter(starts), None)
