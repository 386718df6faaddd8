"""The first operator of a run whose output is not finite although its inputs were."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Record, Run
from whence.records.program import TENSOR_OPERANDS
from whence.records.region import children
from whence.records.slots import is_read, is_written
from whence.results import Nans, NotFinite, Range

_MOST_OVERFLOWS = 100


def nans(run: str | os.PathLike[str]) -> Nans:
    """Find the first operator of a run whose output has NaN, or overflowed, although its inputs had
    and did not.

    run: a run folder or another tool's dump; statistics are enough. Infinities that a container's
    own code makes (masks) are not counted. Raises UnreadableRun when the run cannot be read.
    """
    from whence.readers.figures import with_figures
    from whence.readers.opening import open_run

    path = os.fspath(run)
    return _Search(with_figures(open_run(path))).result(path)


class _Search:
    """Walks over a run in execution order and collects non-finite tensors."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._kids = children(run.calls)
        self._seen: set[int] = set()

    def result(self, name: str) -> Nans:
        """The finding of the search."""
        nan: NotFinite | None = None
        overflowed: list[NotFinite] = []
        for made in self._made():
            if made.nan:
                nan = made
                break
            overflowed.append(made)
        then: NotFinite | None = None
        cause, overflow = nan, next(iter(overflowed), None)
        if nan is None or (overflow is not None and any(read.infinite for read in nan.read)):
            cause, then = overflow, nan
        cause = _with_operator(cause, self._run)
        after = [c for c in self._run.calls if cause is not None and c.order > cause.order]
        records = self._run.records
        return Nans(
            name,
            cause,
            then,
            tuple(overflowed[:_MOST_OVERFLOWS]),
            sum(any(_is_bad(records[r.record]) for r in c.refs) for c in after),
            len(self._run.calls),
            sum(record.statistics is None and record.count > 0 for record in records),
        )

    def _made(self, parent: int = -1) -> Iterator[NotFinite]:
        """Non-finite tensors that no earlier call contains, in the order in which they were
        produced.
        """
        for place, number in enumerate(self._kids.get(parent, ())):
            call = self._run.calls[number]
            yield from self._handed(call, parent, place)
            yield from self._made(number)
            yield from self._left(call)

    def _handed(self, call: Call, parent: int, place: int) -> Iterator[NotFinite]:
        """Inputs of a call with NaN that no earlier call contains: the enclosing code produced
        them.
        """
        for ref in call.refs:
            if not is_read(ref.slot) or not self._is_new(ref.record):
                continue
            if self._run.records[ref.record].statistics.nan:  # type: ignore[union-attr]
                above = self._run.calls[parent] if parent >= 0 else call
                slot = f"{place}:{ref.slot}" if parent >= 0 else ref.slot
                yield self._found(above, slot, ref.record)

    def _left(self, call: Call) -> Iterator[NotFinite]:
        """Non-finite outputs of a call whose inputs were finite."""
        records = self._run.records
        written = [r for r in call.refs if is_written(r.slot)]
        read = [records[r.record] for r in call.refs if is_read(r.slot)]
        for ref in written:
            if not self._is_new(ref.record):
                continue
            figures = records[ref.record].statistics
            assert figures is not None
            before = [r.statistics for r in read if r.statistics is not None]
            is_first_nan = figures.nan and not any(f.nan for f in before)
            overflows = call.leaf and not figures.nan and not any(f.nan or f.inf for f in before)
            if is_first_nan or overflows:
                yield self._found(call, ref.slot, ref.record)

    def _is_new(self, record: int) -> bool:
        """Whether a record is not finite and appears for the first time; marks it as seen."""
        if record in self._seen or not _is_bad(self._run.records[record]):
            return False
        self._seen.add(record)
        return True

    def _found(self, call: Call, slot: str, number: int) -> NotFinite:
        record = self._run.records[number]
        figures = record.statistics
        assert figures is not None
        dtype = dtypes.DTYPES.get(record.dtype)
        return NotFinite(
            scope=call.scope,
            root=call.root,
            op_type=call.op_type,
            slot=slot,
            step=call.step,
            rank=call.rank,
            order=call.order,
            nan=figures.nan,
            infinite=figures.inf,
            count=figures.count,
            dtype=record.dtype,
            largest=dtype.max_finite if dtype is not None else None,
            phase=call.phase,
            source=call.source,
            read=tuple(
                _range(ref.slot, self._run.records[ref.record])
                for ref in call.refs
                if is_read(ref.slot)
            ),
        )


def _with_operator(found: NotFinite | None, run: Run) -> NotFinite | None:
    """The same finding with the operator that produces the value, when the call's program can be
    run again.
    """
    if found is None:
        return None
    call = next(call for call in run.calls if call.order == found.order)
    program = run.programs.get(call.program or "")
    if program is None:
        return found
    operators = [operation.name for operation in program.operations]
    place = 0 if len(operators) == 1 else _first_place(run, call, is_nan=found.nan > 0)
    if place is None:
        return found
    return msgspec.structs.replace(found, operator=operators[place].split(".")[1])


def _first_place(run: Run, call: Call, *, is_nan: bool) -> int | None:
    """The first operation of a call's program that produces NaN, or infinities from finite
    operands.

    None when the program cannot be run again, or no operation produces one.
    """
    from whence.comparison.replays.side import ReplaySource

    places: list[int] = []
    source = ReplaySource(run)

    def look(place: int, array: Array) -> None:
        operation = program.operations[place]
        is_made = any(operand.kind in TENSOR_OPERANDS for operand in operation.operands())
        if is_made and not places and dtypes.of(array).is_floating:
            values = np.asarray(array, np.float64)
            if (np.isnan(values) if is_nan else np.isinf(values)).any():
                places.append(place)

    try:
        loaded = source.load(call)
        program = loaded.program
        slots = (*program.inputs, *program.params)
        arrays, strides = source.arrays(source.records(call, slots))
        loaded.run(arrays, arrays, strides=strides, trace=look)
    except (ReplayRefused, ElementsMissing):
        return None
    return next(iter(places), None)


def _is_bad(record: Record) -> bool:
    figures = record.statistics
    return figures is not None and bool(figures.nan or figures.inf)


def _range(slot: str, record: Record) -> Range:
    figures = record.statistics
    if figures is None:
        return Range(slot, record.dtype)
    return Range(slot, record.dtype, figures.min, figures.max, figures.inf)
