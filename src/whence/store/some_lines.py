"""Some calls and records of a run on disk, many decoded at once."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from whence.records import Call, Record
from whence.store.index import Column
from whence.store.reader import StoredRun

_force = msgspec.structs.force_setattr


def some_calls(run: StoredRun, numbers: Column) -> Iterator[Call]:
    """Calls of a run of one process, by their numbers in ascending order."""
    (process,) = run.readers
    calls = process.decode_many(process.index.calls_at[numbers], Call)
    parents = process.index.columns["parent"][numbers].tolist()
    for number, parent, call in zip(numbers.tolist(), parents, calls, strict=True):
        _force(call, "id", number)
        _force(call, "parent", parent)
        yield call


def some_records(run: StoredRun, numbers: Column) -> Iterator[Record]:
    """Records of a run of one process, by their numbers in ascending order."""
    (process,) = run.readers
    records = process.decode_many(process.index.records_at[numbers], Record)
    for number, record in zip(numbers.tolist(), records, strict=True):
        _force(record, "id", number)
        yield record
