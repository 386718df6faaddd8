"""The statistics of a run as arrays: which call read or wrote which tensor, when, and its
figures.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whence.dtypes import DTYPES
from whence.records import Run, Sketch, Statistics
from whence.records.columns import HasColumns, columns_of

Column = np.ndarray[Any, np.dtype[Any]]

FIGURES = (
    *("count", "min", "max", "mean", "norm", "nan", "inf", "zero"),
    *("abs_sum", "cube_sum", "fourth_sum"),
)
"""Columns of `RunFigures.values`."""
SLOTS = 1 << 24
_CHUNK = 1 << 16
_NO_ARGUMENTS = msgspec.Raw(b"{}")


class CallKey(NamedTuple):
    """Identifies a call in both runs, independent of its step."""

    rank: int
    root: str
    phase: str
    scope: str
    op: str
    occurrence: int
    micro: int


class _CallFields(msgspec.Struct):
    scope: str = ""
    root: str = ""
    rank: int = 0
    micro: int = 0
    phase: str = "forward"
    op: str = ""
    occurrence: int = 0
    op_type: str = ""
    source: str = ""
    arguments: msgspec.Raw = _NO_ARGUMENTS


class _RecordFields(msgspec.Struct):
    dtype: str = ""
    shape: tuple[int, ...] = ()
    hash: str = ""
    statistics: Statistics | None = None
    sketch: Sketch | None = None


class Names:
    """Assigns numbers to calls, slots, dtypes and shapes; a number means the same in every run."""

    def __init__(self) -> None:
        self.calls: dict[CallKey, int] = {}
        self.keys: list[CallKey] = []
        self.types: list[tuple[str, str]] = []
        self._numbers: dict[Any, int] = {}
        self.words: list[Any] = []

    def call(self, key: CallKey, op_type: str, source: str) -> int:
        """The number of a call. op_type, source: of the first call with this key."""
        number = self.calls.get(key)
        if number is None:
            number = self.calls[key] = len(self.keys)
            self.keys.append(key)
            self.types.append((op_type, source))
        return number

    def word(self, word: Any) -> int:
        """The number of a slot, a dtype, a shape or a text of arguments."""
        number = self._numbers.get(word)
        if number is None:
            number = self._numbers[word] = len(self.words)
            self.words.append(word)
        return number


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run as arrays.

    key, step, begin, end, parent, arguments: of each call; begin and end are moments of one clock,
    ends of calls lie between the beginnings of others. call, slot, record, place: of each
    reference; a place is a call's number and a slot. values: FIGURES of each record, NaN where
    there is none.
    dtype, shape, digest, checksum: of each record, digest 0 where there is no hash.
    """

    run: Run
    key: Column
    step: Column
    begin: Column
    end: Column
    parent: Column
    arguments: Column
    call: Column
    slot: Column
    record: Column
    place: Column
    values: Column
    dtype: Column
    shape: Column
    digest: Column
    checksum: Column

    @property
    def steps(self) -> Column:
        """Numbers of the steps that have calls, ascending."""
        return np.unique(self.step)


def read_figures(run: Run, names: Names) -> RunFigures:
    """Read a run into arrays. Elements are not read."""
    columns = columns_of(run)
    fields = run.calls_as(_CallFields) if isinstance(run, HasColumns) else map(_taken, run.calls)
    keys, arguments = [], []
    for call in fields:
        key = CallKey(
            *(call.rank, call.root, call.phase, call.scope, call.op, call.occurrence, call.micro)
        )
        keys.append(names.call(key, call.op_type, call.source))
        arguments.append(names.word(bytes(call.arguments)))
    key_of = np.array(keys, np.int64)
    call_of = np.repeat(np.arange(len(keys)), columns.refs)
    slots = columns.of_names(names.word) if len(columns.names) else np.zeros(0, np.int64)
    slot = slots[columns.slot] if columns.slot.size else columns.slot.astype(np.int64)
    order, parent = columns.order.astype(np.int64), _parents(run)
    values, dtype, shape, digest, checksum = _records(run, names)
    return RunFigures(
        *(run, key_of, columns.step.astype(np.int64), 2 * order, _ends(order, parent)),
        parent,
        *(np.array(arguments, np.int64), call_of, slot, columns.record.astype(np.int64)),
        key_of[call_of] * SLOTS + slot if len(keys) else call_of,
        *(values, dtype, shape, digest, checksum),
    )


def _taken(call: Any) -> _CallFields:
    return _CallFields(
        *(call.scope, call.root, call.rank, call.micro, call.phase, call.op, call.occurrence),
        *(call.op_type, call.source, msgspec.Raw(msgspec.json.encode(call.arguments))),
    )


def _parents(run: Run) -> Column:
    """Position of the enclosing call for each call, -1 for none."""
    if isinstance(run, HasColumns):
        return run.parents()
    return np.array([call.parent for call in run.calls], np.int64)


def _ends(order: Column, parent: Column) -> Column:
    """When each call ended, on the clock of `2 * order`: the moment at which its last inner call
    began.
    """
    last = order.copy()
    inner = np.flatnonzero(parent >= 0)
    while True:
        before = last[parent[inner]]
        np.maximum.at(last, parent[inner], last[inner])
        if (last[parent[inner]] == before).all():
            return 2 * last + 1


def _records(run: Run, names: Names) -> tuple[Column, ...]:
    fields = run.records_as(_RecordFields) if isinstance(run, HasColumns) else iter(run.records)
    parts: list[tuple[Column, ...]] = []
    while chunk := list(itertools.islice(fields, _CHUNK)):
        rows = [_row(record.statistics, record.sketch) for record in chunk]
        parts.append(
            (
                np.array(rows, np.float64),
                np.array([names.word(record.dtype) for record in chunk], np.int64),
                np.array([names.word(record.shape) for record in chunk], np.int64),
                np.array([_digest(record.hash) for record in chunk], np.uint64),
                np.array([r.sketch.checksum if r.sketch else 0 for r in chunk], np.uint64),
            )
        )
    if not parts:
        none = np.zeros(0, np.int64)
        return np.zeros((0, len(FIGURES))), none, none, none.view(np.uint64), none.view(np.uint64)
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


_NOTHING = (None,) * len(FIGURES)


def _row(s: Statistics | None, sketch: Sketch | None) -> tuple[float | None, ...]:
    if s is None:
        return _NOTHING
    sums = (
        (None, None, None)
        if sketch is None
        else (sketch.abs_sum, sketch.cube_sum, sketch.fourth_sum)
    )
    return (s.count, s.min, s.max, s.mean, s.norm, s.nan, s.inf, s.zero, *sums)


def _digest(text: str) -> int:
    try:
        return int(text[:16], 16) if len(text) == 32 else 0
    except ValueError:
        return 0


def roundoff(dtype: str) -> float:
    """The unit roundoff of a floating-point dtype, 0 for other dtypes."""
    known = DTYPES.get(dtype)
    return (known.unit_roundoff or 0.0) if known is not None else 0.0
