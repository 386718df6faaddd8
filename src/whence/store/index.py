"""The columnar index: what is needed to open a run of 10^6 records without parsing its journal.

It holds where every line of the journal starts, and the fields by which records and calls are planned as plain columns.
It is made from the journal alone: at close, by `recover`, or in memory when a run without one is opened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from whence.dtypes import DTYPES
from whence.records import Call, External, Increment, Kept, Record, Statistics
from whence.store import journal as journal_file
from whence.store.folder import FORMAT, INDEX
from whence.store.journal import CALL, KINDS, OTHER, RECORD, Damage
from whence.store.shards import Bytes, map_file, parse_header, save

Column = np.ndarray[Any, np.dtype[Any]]

NONE, KEPT, INCREMENT, EXTERNAL = range(4)
"""Codes of the column `elements`."""
ELEMENTS = {type(None): NONE, Kept: KEPT, Increment: INCREMENT, External: EXTERNAL}

STATISTICS = Statistics.__struct_fields__
_BATCH = 8192
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
RECORD_COLUMNS = ("dtype", "hash", "elements", "shard", "offset", "nbytes", "base", "axis", "statistics")
CALL_COLUMNS = ("parent", "order", "rank", "step", "micro", "occurrence", "root", "phase", "scope", "op", "op_type")
NAME_COLUMNS = ("dtype", "root", "phase", "scope", "op", "op_type", "ref_slot")
_WIDE = {"hash": 2, "statistics": len(STATISTICS)}


class Index:
    """Columns of one process. `damage`: why the journal could not be followed to its end, None when it could."""

    def __init__(self, columns: dict[str, Column], names: list[str], journal_bytes: int, damage: Damage | None = None) -> None:
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
        """Shape of what a record itself holds in its shard: all of it, or its increment. None when the numbers contradict each other."""
        columns, shape = self.columns, self.shape(record)
        dtype = DTYPES.get(self.names[columns["dtype"][record]])
        if columns["elements"][record] == INCREMENT:
            axis, before = int(columns["axis"][record]), self.shape(int(columns["base"][record]))
            if len(before) != len(shape) or not 0 <= axis < len(shape) or before[axis] > shape[axis]:
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
        save(folder / INDEX, columns.items(), {"format": str(FORMAT), "journal_bytes": str(self.journal_bytes)})


class _Builder:
    def __init__(self) -> None:
        self.parts: dict[str, list[Column]] = {name: [] for name in _SCHEMA}
        self.names: dict[str, int] = {}
        self.records = 0
        self.ids: list[Column] = []

    def name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def put(self, name: str, values: Iterable[Any]) -> None:
        self.parts[name].append(np.array(list(values), _SCHEMA[name][0]))

    def add_records(self, batch: list[Record]) -> None:
        name, put = self.name, self.put
        put("dtype", [name(r.dtype) for r in batch])
        put("shape_at", [len(r.shape) for r in batch])
        put("shape", chain.from_iterable(r.shape for r in batch))
        digests = b"".join(bytes.fromhex(r.hash) if r.hash else bytes(16) for r in batch)
        self.parts["hash"].append(np.frombuffer(digests, "<u8").reshape(-1, 2))
        places = [r.elements for r in batch]
        put("elements", [ELEMENTS[type(p)] for p in places])
        put("shard", [p.shard if isinstance(p, (Kept, Increment)) else -1 for p in places])
        put("offset", [p.offset if p is not None else 0 for p in places])
        put("nbytes", [p.nbytes if p is not None else 0 for p in places])
        put("base", [p.base if isinstance(p, Increment) else -1 for p in places])
        put("axis", [p.axis if isinstance(p, Increment) else -1 for p in places])
        nothing = (None,) * len(STATISTICS)
        rows = [
            (s.count, s.min, s.max, s.mean, s.std, s.norm, s.nan, s.inf, s.zero) if (s := r.statistics) is not None else nothing
            for r in batch
        ]
        self.parts["statistics"].append(np.array(rows, np.float64).reshape(-1, len(STATISTICS)))  # None becomes NaN

    def add_calls(self, batch: list[Call]) -> None:
        name, put = self.name, self.put
        self.ids.append(np.array([c.id for c in batch], np.int64))
        for field in ("parent", "order", "rank", "step", "micro", "occurrence"):
            put(field, [getattr(c, field) for c in batch])
        for field in ("root", "phase", "scope", "op", "op_type"):
            put(field, [name(getattr(c, field)) for c in batch])
        put("refs_at", [len(c.refs) for c in batch])
        put("ref_slot", [name(r.slot) for c in batch for r in c.refs])
        put("ref_record", [r.record for c in batch for r in c.refs])

    def finish(self, starts: list[int], kinds: bytearray, end: int, damage: Damage | None) -> Index:
        columns: dict[str, Column] = {}
        for name, (dtype, _) in _SCHEMA.items():
            wide = _WIDE.get(name)
            empty = np.empty((0, wide) if wide else 0, dtype)
            columns[name] = np.concatenate(self.parts[name]) if self.parts[name] else empty
        for name in ("shape_at", "refs_at"):
            columns[name] = np.concatenate([np.zeros(1, np.int64), np.cumsum(columns[name], dtype=np.int64)])
        columns["line_start"] = np.array([*starts, end], np.int64)
        columns["line_kind"] = np.frombuffer(bytes(kinds), np.uint8)
        columns["parent"] = _positions(np.concatenate(self.ids) if self.ids else np.empty(0, np.int64), columns["parent"])
        return Index(columns, list(self.names), end, damage)


def build(journal: Bytes) -> Index:
    """Read a journal into columns, up to its first line that is not whole or contradicts the lines before it."""
    builder = _Builder()
    records: list[Record] = []
    calls: list[Call] = []
    starts: list[int] = []
    kinds = bytearray()
    count = end = 0
    damage = None
    try:
        for line, start, stop in journal_file.read(journal):
            kind = KINDS.get(type(line), OTHER)
            if isinstance(line, Record):
                _check_record(line, count, start, len(kinds) + 1)
                records.append(line)
                count += 1
                if len(records) == _BATCH:
                    builder.add_records(records)
                    records.clear()
            elif isinstance(line, Call):
                _check_call(line, count, start, len(kinds) + 1)
                calls.append(line)
                if len(calls) == _BATCH:
                    builder.add_calls(calls)
                    calls.clear()
            starts.append(start)
            kinds.append(kind)
            end = stop
    except Damage as found:
        damage = found
    if records:
        builder.add_records(records)
    if calls:
        builder.add_calls(calls)
    return builder.finish(starts, kinds, end, damage)


def load(folder: Path, journal_bytes: int) -> Index | None:
    """The index beside a journal of `journal_bytes`, or None when there is none, it is stale, or it is not sound."""
    try:
        data = map_file(folder / INDEX)
        tensors = {t.name: t for t in parse_header(data)}
        columns: dict[str, Column] = {}
        for name, (dtype, _) in _SCHEMA.items():
            found = tensors[name]
            column = data[found.offset : found.offset + found.nbytes].view(dtype).reshape(-1, *([_WIDE[name]] if name in _WIDE else []))
            if column.shape != found.shape:
                return None
            columns[name] = column
    except (OSError, ValueError, KeyError):
        return None
    return _sound(columns, journal_bytes)


def _sound(columns: dict[str, Column], journal_bytes: int) -> Index | None:
    """Lengths agree, offsets rise, codes and record numbers lie in range: nothing in it can lead outside a file."""
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
    in_range = [(columns[name], lengths["names"]) for name in NAME_COLUMNS] + [(columns["ref_record"], lengths["records"])]
    if any(c.size and (int(c.min()) < 0 or int(c.max()) >= stop) for c, stop in in_range):
        return None
    if (columns["base"] >= np.arange(lengths["records"])).any() or (columns["shape"] < 0).any():
        return None
    if (columns["parent"] >= lengths["calls"]).any() or (columns["parent"] < -1).any():
        return None
    text = blob.tobytes()
    try:
        names = [text[a:b].decode("utf-8", "surrogatepass") for a, b in zip(names_at[:-1].tolist(), names_at[1:].tolist(), strict=True)]
    except UnicodeDecodeError:
        return None
    return Index(columns, names, journal_bytes)


def _check_record(record: Record, expected: int, at: int, line: int) -> None:
    reason = ""
    place = record.elements
    if record.id != expected:
        reason = f"record {record.id} where record {expected} was expected"
    elif not all(0 <= extent < _LIMIT for extent in record.shape):
        reason = f"record {record.id} has the shape {record.shape}"
    elif record.hash and not _is_digest(record.hash):
        reason = f"record {record.id} has the hash {record.hash[:40]!r}"
    elif place is not None:
        if not (0 <= place.offset < _LIMIT and 0 <= place.nbytes < _LIMIT):
            reason = f"record {record.id} lies at {place.offset} with {place.nbytes} bytes"
        elif not isinstance(place, External) and not 0 <= place.shard < 1 << 31:
            reason = f"record {record.id} lies in shard {place.shard}"
        elif isinstance(place, Increment) and not (0 <= place.base < record.id and 0 <= place.axis < len(record.shape)):
            reason = f"record {record.id} continues record {place.base} along axis {place.axis}"
    if reason:
        raise Damage(at, line, reason, torn=False)


def _check_call(call: Call, records: int, at: int, line: int) -> None:
    for ref in call.refs:
        if not 0 <= ref.record < records:
            raise Damage(at, line, f"call {call.scope or call.root!r} refers to record {ref.record} of {records}", torn=False)
    if (
        max(abs(n) for n in (call.id, call.parent, call.order, call.step, call.micro, call.occurrence)) >= _LIMIT
        or abs(call.rank) >= 1 << 31
    ):
        raise Damage(at, line, f"call {call.scope or call.root!r} has a number out of range", torn=False)


def _is_digest(text: str) -> bool:
    if len(text) != 32:
        return False
    try:
        return len(bytes.fromhex(text)) == 16
    except ValueError:
        return False


def _positions(ids: Column, wanted: Column) -> Column:
    """Position in `ids` of every value of `wanted`, -1 where it is not there (a parent that never ended)."""
    if ids.size == 0:
        return wanted
    if np.array_equal(ids, np.arange(ids.size)):
        return np.where((wanted >= 0) & (wanted < ids.size), wanted, -1)
    by_id = np.argsort(ids, kind="stable")
    place = np.searchsorted(ids[by_id], wanted)
    near = by_id[np.minimum(place, ids.size - 1)]
    return np.where(ids[near] == wanted, near, -1)
