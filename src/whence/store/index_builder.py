"""Builds the index of a journal, in batches of lines, each checked against the lines before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from whence import disk
from whence.records import Call, Dumped, Elements, External, Increment, Kept, Record, Statistics
from whence.store import journal as journal_file
from whence.store import line_digests
from whence.store.columns import Column as FileColumn
from whence.store.columns import FileBlocks
from whence.store.index import (
    EXTERNAL,
    INCREMENT,
    KEPT,
    NONE,
    SCHEMA,
    STATISTICS,
    WIDTHS,
    Column,
    Index,
    load,
    write_index,
)
from whence.store.journal import KINDS, OTHER, Damage, Entry
from whence.store.shards import Bytes

# lines whose Structs are alive at once while an index is made: they stay in the cache
_BATCH = 2048
_NOTHING = (None,) * len(STATISTICS)
_NO_DIGEST = bytes(16)
_LIMIT = 1 << 62


class _Names(dict[str, int]):
    """Numbers names in the order of their first use."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number


class _Doubt(Exception):
    """A line of a batch contradicts another; the caller has to find out which."""


class _Parts(Protocol):
    """Receives parts of columns as they are built."""

    def add(self, name: str, part: Column) -> None: ...


class _InMemory:
    """Parts of columns in memory."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Column]] = {}

    def add(self, name: str, part: Column) -> None:
        self._parts.setdefault(name, []).append(part)

    def columns(self) -> dict[str, Column]:
        """Returns the complete columns."""
        return {name: np.concatenate([_empty(name), *self._parts.get(name, ())]) for name in SCHEMA}


class _Spooled:
    """Parts of columns, one after the other, in an anonymous file, so that an index of any size is
    built in little memory.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._end = file, 0
        self._places: dict[str, list[tuple[int, int]]] = {name: [] for name in SCHEMA}
        self._lengths = dict.fromkeys(SCHEMA, 0)

    def add(self, name: str, part: Column) -> None:
        raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        self._file.write(raw.data)
        self._places[name].append((self._end, raw.size))
        self._end += raw.size
        self._lengths[name] += len(part)

    def columns(self) -> dict[str, FileColumn]:
        """Returns the complete columns, read back in parts."""
        self._file.flush()
        return {
            name: FileColumn(
                (empty := _empty(name)).dtype,
                (self._lengths[name], *empty.shape[1:]),
                self._read(self._places[name]),
            )
            for name in SCHEMA
        }

    def _read(self, places: list[tuple[int, int]]) -> Iterator[Bytes]:
        for start, nbytes in places:
            yield np.frombuffer(os.pread(self._file.fileno(), nbytes, start), np.uint8)


def _empty(name: str) -> Column:
    wide = WIDTHS.get(name)
    return np.empty((0, wide) if wide else 0, SCHEMA[name][0])


class _Builder:
    """Builds the columns of the lines of a journal, in order, and passes them to `parts`.

    Ids and parents of calls stay in memory until the end: a parent is written after its children,
    so its position is known only then.
    """

    def __init__(self, parts: _Parts, journal: Bytes | FileBlocks) -> None:
        self._parts, self._journal = parts, journal
        self.names = _Names()
        self.records = 0
        self._ids: list[Column] = []
        self._parents: list[Column] = []
        self._totals = {"shape_at": 0, "refs_at": 0}
        for name in self._totals:
            parts.add(name, np.zeros(1, np.int64))
        self.end = 0

    def add(self, batch: list[Entry]) -> None:
        """Adds lines. Raises _Doubt, having added nothing, when one contradicts those before it or
        refers to a record or call that does not exist.
        """
        records = [e.line for e in batch if type(e.line) is Record]
        calls = [e.line for e in batch if type(e.line) is Call]
        fresh: dict[str, Any] = {
            "line_start": [e.start for e in batch],
            "line_kind": [KINDS.get(type(e.line), OTHER) for e in batch],
        }
        ids: list[int] = []
        if records:
            fresh |= self._record_columns(records)
        if calls:
            ids = [c.id for c in calls]
            fresh |= self._call_columns(calls)
        fresh |= line_digests.columns(batch, self._journal)
        try:
            columns = {name: np.array(values, SCHEMA[name][0]) for name, values in fresh.items()}
            numbers = np.array(ids, np.int64)
        except OverflowError as error:
            raise _Doubt from error
        if records:
            self._doubt_records(records, columns)
        if calls and not _within(columns["ref_record"], self.records + len(records)):
            raise _Doubt
        if calls:
            self._ids.append(numbers)
            self._parents.append(columns.pop("parent"))
        for name, column in columns.items():
            if name in self._totals:  # lengths, which become the places where each one ends
                column = np.cumsum(column) + self._totals[name]
                self._totals[name] = int(column[-1])
            self._parts.add(name, column)
        self.records += len(records)
        self.end = batch[-1].end if batch else self.end

    def _record_columns(self, batch: list[Record]) -> dict[str, Any]:
        names = self.names
        try:
            digests = b"".join([bytes.fromhex(r.hash) if r.hash else _NO_DIGEST for r in batch])
        except ValueError as error:
            raise _Doubt from error
        if len(digests) != 16 * len(batch) or not {len(r.hash) for r in batch} <= {0, 32}:
            raise _Doubt
        # which no record of a run is
        places = [r.elements for r in batch if not isinstance(r.elements, Dumped)]
        kinds, shards, offsets, sizes, bases, axes = zip(*map(_place, places), strict=True)
        return {
            "dtype": [names[r.dtype] for r in batch],
            "shape_at": [len(r.shape) for r in batch],
            "shape": [extent for r in batch for extent in r.shape],
            "hash": np.frombuffer(digests, "<u8").reshape(-1, 2),
            "elements": kinds,
            "shard": shards,
            "offset": offsets,
            "nbytes": sizes,
            "base": bases,
            "axis": axes,
            "statistics": [_figures(r.statistics) for r in batch],  # None becomes NaN
        }

    def _call_columns(self, batch: list[Call]) -> dict[str, Any]:
        names = self.names
        return {
            "parent": [c.parent for c in batch],
            "order": [c.order for c in batch],
            "rank": [c.rank for c in batch],
            "step": [c.step for c in batch],
            "micro": [c.micro for c in batch],
            "occurrence": [c.occurrence for c in batch],
            "root": [names[c.root] for c in batch],
            "phase": [names[c.phase] for c in batch],
            "scope": [names[c.scope] for c in batch],
            "op": [names[c.op] for c in batch],
            "op_type": [names[c.op_type] for c in batch],
            "refs_at": [len(c.refs) for c in batch],
            "ref_slot": [names[r.slot] for c in batch for r in c.refs],
            "ref_record": [r.record for c in batch for r in c.refs],
        }

    def _doubt_records(self, batch: list[Record], columns: dict[str, Column]) -> None:
        expected = np.arange(self.records, self.records + len(batch))
        base, axis = columns["base"], columns["axis"]
        grown = columns["elements"] == INCREMENT
        sound = (
            [r.id for r in batch] == expected.tolist()
            and _within(columns["shape"], _LIMIT)
            and _within(columns["offset"], _LIMIT)
            and _within(columns["nbytes"], _LIMIT)
            and bool(((base >= 0) == grown).all())
            and bool((base < expected).all())
            and bool((~grown | ((axis >= 0) & (axis < columns["shape_at"]))).all())
        )
        stored = (columns["elements"] == KEPT) | grown
        if not sound or (columns["shard"][stored] < 0).any():
            raise _Doubt

    def finish(self) -> None:
        """Passes on the columns that are known only at the end."""
        self._parts.add("line_start", np.array([self.end], np.int64))
        none = np.empty(0, np.int64)
        ids, parents = (np.concatenate([none, *p]) for p in (self._ids, self._parents))
        self._parts.add("parent", _positions(ids, parents))


def load_or_build(folder: Path, journal: Bytes) -> Index:
    """Returns the index beside a journal, or builds it where there is none or it is invalid."""
    return load(folder, journal.size) or build(journal)


def build(journal: Bytes, tell: Callable[[int, int], None] | None = None) -> Index:
    """Reads a journal into columns, up to its first line that is incomplete or contradicts the
    lines before it.

    tell: called with the number of bytes read so far, and of all bytes.
    """
    parts = _InMemory()
    builder = _Builder(parts, journal)
    damage = _fill(builder, journal, tell)
    return Index(parts.columns(), list(builder.names), builder.end, damage)


def write(
    journal: Bytes | FileBlocks, folder: Path, tell: Callable[[int, int], None] | None = None
) -> None:
    """Writes the index of a journal into its folder, in memory that does not grow with records.
    Raises OSError.
    """
    with disk.scratch_file(folder) as file:
        parts = _Spooled(file)
        builder = _Builder(parts, journal)
        _fill(builder, journal, tell)
        write_index(folder, parts.columns(), list(builder.names), builder.end)


def _fill(
    builder: _Builder, journal: Bytes | FileBlocks, tell: Callable[[int, int], None] | None
) -> Damage | None:
    """Adds all lines of a journal; returns what ended them early."""
    damage = None
    entries = journal_file.read(journal)
    lines = 0
    while damage is None:
        batch: list[Entry] = []
        try:
            batch.extend(islice(entries, _BATCH))
        except Damage as error:
            damage = error
        if not batch:
            break
        try:
            builder.add(batch)
        except _Doubt:
            good, damage = _first_wrong(batch, builder.records, lines)
            builder.add(batch[:good])
        lines += len(batch)
        if tell is not None:
            tell(batch[-1].end, len(journal))
    builder.finish()
    return damage


def _first_wrong(batch: list[Entry], records: int, lines: int) -> tuple[int, Damage]:
    """Returns the position of the wrong line in a doubtful batch, and what is wrong. records,
    lines: counts before the batch.
    """
    for position, (line, start, _) in enumerate(batch):
        reason = ""
        if isinstance(line, Record):
            reason = _wrong_record(line, records)
            records += 1
        elif isinstance(line, Call):
            reason = _wrong_call(line, records)
        if reason:
            return position, Damage(start, lines + position + 1, reason, torn=False)
    return 0, Damage(
        batch[0].start, lines + 1, "the lines from here on contradict each other", torn=False
    )


def _wrong_record(record: Record, expected: int) -> str:
    place = record.elements
    if record.id != expected:
        return f"record {record.id} where record {expected} was expected"
    if not all(0 <= extent < _LIMIT for extent in record.shape):
        return f"record {record.id} has the shape {record.shape}"
    if record.hash and not _is_digest(record.hash):
        return f"record {record.id} has the hash {record.hash[:40]!r}"
    if place is None:
        return ""
    if isinstance(place, Dumped):
        return f"record {record.id} lies in {place.file[:40]!r}, which is no part of a run"
    if not (0 <= place.offset < _LIMIT and 0 <= place.nbytes < _LIMIT):
        return f"record {record.id} lies at {place.offset} with {place.nbytes} bytes"
    if not isinstance(place, External) and not 0 <= place.shard < 1 << 31:
        return f"record {record.id} lies in shard {place.shard}"
    if isinstance(place, Increment) and not (
        0 <= place.base < record.id and 0 <= place.axis < len(record.shape)
    ):
        return f"record {record.id} continues record {place.base} along axis {place.axis}"
    return ""


def _wrong_call(call: Call, records: int) -> str:
    for ref in call.refs:
        if not 0 <= ref.record < records:
            return f"call {call.module_name!r} refers to record {ref.record} of {records}"
    numbers = (call.id, call.parent, call.order, call.step, call.micro, call.occurrence)
    if not all(-(1 << 63) <= n < 1 << 63 for n in numbers) or not -(1 << 31) <= call.rank < 1 << 31:
        return f"call {call.module_name!r} has a number out of range"
    return ""


def _place(place: Elements | None) -> tuple[int, int, int, int, int, int]:
    """Returns (elements, shard, offset, nbytes, base, axis)."""
    if place is None:
        return NONE, -1, 0, 0, -1, -1
    if type(place) is Kept:
        return KEPT, place.shard, place.offset, place.nbytes, -1, -1
    if isinstance(place, Increment):
        return INCREMENT, place.shard, place.offset, place.nbytes, place.base, place.axis
    return EXTERNAL, -1, place.offset, place.nbytes, -1, -1


def _figures(s: Statistics | None) -> tuple[float | None, ...]:
    return (
        _NOTHING
        if s is None
        else (s.count, s.min, s.max, s.mean, s.std, s.norm, s.nan, s.inf, s.zero)
    )


def _within(column: Column, stop: int) -> bool:
    return column.size == 0 or (int(column.min()) >= 0 and int(column.max()) < stop)


def _is_digest(text: str) -> bool:
    if len(text) != 32:
        return False
    try:
        return len(bytes.fromhex(text)) == 16
    except ValueError:
        return False


def _positions(ids: Column, values: Column) -> Column:
    """Returns the position in `ids` of every value, -1 where it is missing (a parent that never
    ended).
    """
    if ids.size == 0:
        return values
    if np.array_equal(ids, np.arange(ids.size)):
        return np.where((values >= 0) & (values < ids.size), values, -1)
    by_id = np.argsort(ids, kind="stable")
    place = np.searchsorted(ids[by_id], values)
    near = by_id[np.minimum(place, ids.size - 1)]
    return np.where(ids[near] == values, near, -1)
