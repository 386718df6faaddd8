"""Some calls and records of a run on disk, many decoded at once. What repeats from one to the next
(names, slots, shapes) is one object in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from whence.records import Call, Record
from whence.store.index import Column
from whence.store.reader import StoredRun

_OF_CALLS = ("scope", "root", "op_type", "source", "number", "program", "no_program")
_OF_RECORDS = ("dtype", "shape")
_force = msgspec.structs.force_setattr


def some_calls(run: StoredRun, numbers: Column) -> Iterator[Call]:
    """Calls of a run of one process, by their numbers in ascending order."""
    (process,) = run.readers
    calls = process.decode_many(process.index.calls_at[numbers], Call)
    parents = process.index.columns["parent"][numbers].tolist()
    known: dict[Any, Any] = {}
    for number, parent, call in zip(numbers.tolist(), parents, calls, strict=True):
        _share(call, _OF_CALLS, known)
        for ref in call.refs:
            _share(ref, ("slot",), known)
        _force(call, "id", number)
        _force(call, "parent", parent)
        yield call


def some_records(run: StoredRun, numbers: Column) -> Iterator[Record]:
    """Records of a run of one process, by their numbers in ascending order."""
    (process,) = run.readers
    records = process.decode_many(process.index.records_at[numbers], Record)
    known: dict[Any, Any] = {}
    for number, record in zip(numbers.tolist(), records, strict=True):
        _share(record, _OF_RECORDS, known)
        _force(record, "id", number)
        yield record


def _share(item: msgspec.Struct, fields: Sequence[str], known: dict[Any, Any]) -> None:
    """Let fields hold the objects of equal values that were seen before."""
    for name in fields:
        value = getattr(item, name)
        _force(item, name, known.setdefault(value, value))
