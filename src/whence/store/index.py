"""The columnar index: what is needed to open a run of 10^6 records without parsing its journal.

It holds where every line of the journal starts, and the fields by which records and calls are
planned as plain columns. It is made from the journal alone: at close, by `recover`, or in memory
when a run without one is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from whence.dtypes import DTYPES
from whence.records import Call, Dumped, Elements, External, Increment, Kept, Record, Statistics
from whence.store import journal as journal_file
from whence.store.folder import FORMAT, INDEX
from whence.store.journal import CALL, KINDS, OTHER, RECORD, Damage, Entry
from whence.store.shards import Bytes, map_file, parse_header, save

Column = np.ndarray[Any, np.dtype[Any]]

NONE, KEPT, INCREMENT, EXTERNAL = range(4)
"""Codes of the column `elements`."""

STATISTICS = Statistics.__struct_fields__
# lines whose Structs are alive at once while an index is made: they stay in the cache
_BATCH = 2048
_NOTHING = (None,) * len(STATISTICS)
_NO_DIGEST = bytes(16)
_LIMIT = 1 << 62

# name -> (dtype, which length it has)
_SCHEMA: dict[str, tuple[str, str]] = {
    "line_start": ("<i8", "lines+1"),
    "line_kind": ("|u1", "lines"),
    "names": ("|u1", "free"),
    "names_at": ("<i8", "names+1"),
    "dtype": ("<i4", "records"),
    "shape": ("<i8", "free"),
    "shape_at": ("<i8", "records+1"),
    "hash": ("<u8", "records"),
    "elements": ("|u1", "records"),
    "shard": ("<i4", "records"),
    "offset": ("<i8", "records"),
    "nbytes": ("<i8", "records"),
    "base": ("<i8", "records"),
    "axis": ("<i4", "records"),
    "statistics": ("<f8", "records"),
    "parent": ("<i8", "calls"),
    "order": ("<i8", "calls"),
    "rank": ("<i4", "calls"),
    "step": ("<i8", "calls"),
    "micro": ("<i8", "calls"),
    "occurrence": ("<i8", "calls"),
    "root": ("<i4", "calls"),
    "phase": ("<i4", "calls"),
    "scope": ("<i4", "calls"),
    "op": ("<i4", "calls"),
    "op_type": ("<i4", "calls"),
    "refs_at": ("<i8", "calls+1"),
    "ref_slot": ("<i4", "refs"),
    "ref_record": ("<i8", "refs"),
}
RECORD_COLUMNS = (
    "dtype",
    "hash",
    "elements",
    "shard",
    "offset",
    "nbytes",
    "base",
    "axis",
    "statistics",
)
CALL_COLUMNS = (
    "parent",
    "order",
    "rank",
    "step",
    "micro",
    "occurrence",
    "root",
    "phase",
    "scope",
    "op",
    "op_type",
)
NAME_COLUMNS = ("dtype", "root", "phase", "scope", "op", "op_type", "ref_slot")
_WIDE = {"hash": 2, "statistics": len(STATISTICS)}


class Index:
    """Columns of one process. `damage`: why the journal could not be followed to its end, None when
    it could.
    """

    def __init__(
        self,
        columns: dict[str, Column],
        names: list[str],
        journal_bytes: int,
        damage: Damage | None = None,
    ) -> None:
        self.columns = columns
        self.names = names
        self.journal_bytes = journal_bytes
        self.damage = damage
        self.records_at = np.flatnonzero(columns["line_kind"] == RECORD)
        self.calls_at = np.flatnonzero(columns["line_kind"] == CALL)

    def shape(self, record: int) -> tuple[int, ...]:
        """Shape of a record."""
        at = self.columns["shape_at"]
        return tuple(self.columns["shape"][at[record] : at[record + 1]].tolist())

    def stored_shape(self, record: int) -> tuple[int, ...] | None:
        """Shape of what a record itself holds in its shard: all of it, or its increment. None when
        the numbers contradict each other.
        """
        columns, shape = self.columns, self.shape(record)
        dtype = DTYPES.get(self.names[columns["dtype"][record]])
        if columns["elements"][record] == INCREMENT:
            axis, before = int(columns["axis"][record]), self.shape(int(columns["base"][record]))
            if (
                len(before) != len(shape)
                or not 0 <= axis < len(shape)
                or before[axis] > shape[axis]
            ):
                return None
            shape = (*shape[:axis], shape[axis] - before[axis], *shape[axis + 1 :])
        if dtype is None or math.prod(shape) * dtype.itemsize != columns["nbytes"][record]:
            return None
        return shape

    def span(self, line: int) -> tuple[int, int]:
        """Bytes [start, end) of a line in the journal, its newline included."""
        at = self.columns["line_start"]
        return int(at[line]), int(at[line + 1])

    def lines(self, kind: int) -> list[int]:
        """Numbers of the lines of a kind."""
        return [int(n) for n in np.flatnonzero(self.columns["line_kind"] == kind)]

    def save(self, folder: Path) -> None:
        """Write it beside its journal. Raises OSError."""
        encoded = [name.encode("utf-8", "surrogatepass") for name in self.names]
        at = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(e) for e in encoded], out=at[1:])
        blob = np.frombuffer(b"".join(encoded), np.uint8)
        columns = {**self.columns, "names": blob, "names_at": at}
        save(
            folder / INDEX,
            columns.items(),
            {"format": str(FORMAT), "journal_bytes": str(self.journal_bytes)},
        )


class _Names(dict[str, int]):
    """Numbers names in the order in which they are first asked for."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number


class _Doubt(Exception):
    """Something in a batch of lines cannot be true; which line it is has to be looked up."""


class _Builder:
    def __init__(self) -> None:
        self.parts: dict[str, list[Column]] = {name: [] for name in _SCHEMA}
        self.names = _Names()
        self.records = 0
        self.ids: list[Column] = []
        self.end = 0

    def add(self, batch: list[Entry]) -> None:
        """Add lines. Raises _Doubt, having added nothing, when one of them contradicts what came
        before or leads nowhere.
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
        try:
            columns = {name: np.array(values, _SCHEMA[name][0]) for name, values in fresh.items()}
            numbers = np.array(ids, np.int64)
        except OverflowError as error:
            raise _Doubt from error
        if records:
            self._doubt_records(records, columns)
        if calls and not _within(columns["ref_record"], self.records + len(records)):
            raise _Doubt
        for name, column in columns.items():
            self.parts[name].append(column)
        self.ids.append(numbers)
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

    def finish(self, damage: Damage | None) -> Index:
        columns: dict[str, Column] = {}
        for name, (dtype, _) in _SCHEMA.items():
            wide = _WIDE.get(name)
            empty = np.empty((0, wide) if wide else 0, dtype)
            columns[name] = np.concatenate(self.parts[name]) if self.parts[name] else empty
        for name in ("shape_at", "refs_at"):
            columns[name] = np.concatenate(
                [np.zeros(1, np.int64), np.cumsum(columns[name], dtype=np.int64)]
            )
        columns["line_start"] = np.append(columns["line_start"], self.end)
        columns["parent"] = _positions(
            np.concatenate([np.empty(0, np.int64), *self.ids]), columns["parent"]
        )
        return Index(columns, list(self.names), self.end, damage)


def build(journal: Bytes, tell: Callable[[int, int], None] | None = None) -> Index:
    """Read a journal into columns, up to its first line that is not whole or contradicts the lines
    before it.

    tell: called with how many bytes of it were read, and how many it has.
    """
    builder = _Builder()
    damage = None
    entries = journal_file.read(journal)
    lines = 0
    while damage is None:
        batch: list[Entry] = []
        try:
            batch.extend(islice(entries, _BATCH))
        except Damage as found:
            damage = found
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
    return builder.finish(damage)


def load(folder: Path, journal_bytes: int) -> Index | None:
    """The index beside a journal of `journal_bytes`, or None when there is none, it is stale, or it
    is not sound.
    """
    try:
        data = map_file(folder / INDEX)
        tensors = {t.name: t for t in parse_header(data)}
        columns: dict[str, Column] = {}
        for name, (dtype, _) in _SCHEMA.items():
            found = tensors[name]
            column = (
                data[found.offset : found.offset + found.nbytes]
                .view(dtype)
                .reshape(-1, *([_WIDE[name]] if name in _WIDE else []))
            )
            if column.shape != found.shape:
                return None
            columns[name] = column
    except (OSError, ValueError, KeyError):
        return None
    return _sound(columns, journal_bytes)


def _sound(columns: dict[str, Column], journal_bytes: int) -> Index | None:
    """Lengths agree, offsets rise, codes and record numbers lie in range: nothing in it can lead
    outside a file.
    """
    kinds = columns["line_kind"]
    blob, names_at = columns.pop("names"), columns.pop("names_at")
    if names_at.size == 0:
        return None
    lengths = {
        "lines": kinds.size,
        "records": int((kinds == RECORD).sum()),
        "calls": int((kinds == CALL).sum()),
        "refs": columns["ref_record"].size,
        "names": names_at.size - 1,
    }
    for name, column in columns.items():
        wanted, _, more = _SCHEMA[name][1].partition("+")
        if wanted in lengths and len(column) != lengths[wanted] + int(more or 0):
            return None
    rising = [
        (columns["line_start"], journal_bytes),
        (columns["shape_at"], columns["shape"].size),
        (columns["refs_at"], columns["ref_record"].size),
        (names_at, blob.size),
    ]
    for at, last in rising:
        if at[0] != 0 or at[-1] != last or (np.diff(at) < 0).any():
            return None
    in_range = [(columns[name], lengths["names"]) for name in NAME_COLUMNS] + [
        (columns["ref_record"], lengths["records"])
    ]
    if any(c.size and (int(c.min()) < 0 or int(c.max()) >= stop) for c, stop in in_range):
        return None
    if (columns["base"] >= np.arange(lengths["records"])).any() or (columns["shape"] < 0).any():
        return None
    if (columns["parent"] >= lengths["calls"]).any() or (columns["parent"] < -1).any():
        return None
    text = blob.tobytes()
    try:
        names = [
            text[a:b].decode("utf-8", "surrogatepass")
            for a, b in zip(names_at[:-1].tolist(), names_at[1:].tolist(), strict=True)
        ]
    except UnicodeDecodeError:
        return None
    return Index(columns, names, journal_bytes)


def _first_wrong(batch: list[Entry], records: int, lines: int) -> tuple[int, Damage]:
    """Position in a doubtful batch of the line that is wrong, and what is. records, lines: how many
    came before the batch.
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
            return f"call {call.scope or call.root!r} refers to record {ref.record} of {records}"
    numbers = (call.id, call.parent, call.order, call.step, call.micro, call.occurrence)
    if not all(-(1 << 63) <= n < 1 << 63 for n in numbers) or not -(1 << 31) <= call.rank < 1 << 31:
        return f"call {call.scope or call.root!r} has a number out of range"
    return ""


def _place(place: Elements | None) -> tuple[int, int, int, int, int, int]:
    """(elements, shard, offset, nbytes, base, axis)."""
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


def _positions(ids: Column, wanted: Column) -> Column:
    """Position in `ids` of every value of `wanted`, -1 where it is not there (a parent that never
    ended).
    """
    if ids.size == 0:
        return wanted
    if np.array_equal(ids, np.arange(ids.size)):
        return np.where((wanted >= 0) & (wanted < ids.size), wanted, -1)
    by_id = np.argsort(ids, kind="stable")
    place = np.searchsorted(ids[by_id], wanted)
    near = by_id[np.minimum(place, ids.size - 1)]
    return np.where(ids[near] == wanted, near, -1)
