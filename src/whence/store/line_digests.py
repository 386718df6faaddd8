"""Digests of the lines of a journal, which two runs are compared by, and marks of special calls;
both are columns of the index, so that no journal is read line by line again.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import xxhash

from whence.records import Call, Collective, Note, Record
from whence.store import journal as journal_file
from whence.store.columns import FileBlocks
from whence.store.journal import Damage, Entry
from whence.store.shards import Bytes

KINDS = ("other", "module", "operator", "label", "graph", "region")
"""Kinds of calls; the column `call_kind` holds indices into it."""
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_BATCH = 2048  # lines whose Structs are alive at once
_TIMING_NOTE = "programs"  # the note that says in how much time programs were recorded


class Says(enum.IntFlag):
    """Further properties of a call: bits of the column `call_says`."""

    PROGRAM = 1
    ARGUMENTS = 2
    NOTES = 4
    ERROR = 8
    PLACEMENTS = 16
    FILES = 32


def columns(batch: Sequence[Entry], journal: Bytes | FileBlocks) -> dict[str, Any]:
    """Returns `line_digest`, `call_kind` and `call_says` of some lines.

    A digest is the xxh3_64 of a line's content without times, and 0 for a record, whose tensor has
    columns of its own.
    """
    calls = [e.line for e in batch if type(e.line) is Call]
    of_calls = _of_calls(calls)
    digests = [
        0
        if type(entry.line) is Record
        else _digest(entry, journal, next(of_calls) if type(entry.line) is Call else None)
        for entry in batch
    ]
    fresh: dict[str, Any] = {"line_digest": digests}
    if calls:
        fresh["call_kind"] = [_CODES.get(c.kind, 0) for c in calls]
        fresh["call_says"] = [_says(c) for c in calls]
    return fresh


def of_journal(journal: Bytes, lines: int) -> Mapping[str, np.ndarray[Any, np.dtype[Any]]]:
    """Returns the same columns for the first `lines` lines of a journal whose index lacks them."""
    parts: dict[str, list[Any]] = {"line_digest": [], "call_kind": [], "call_says": []}
    entries = islice(journal_file.read(journal), lines)
    while batch := _next(entries):
        for name, values in columns(batch, journal).items():
            parts[name] += values
    return {
        name: np.array(values, np.uint64 if name == "line_digest" else np.uint8)
        for name, values in parts.items()
    }


def _next(entries: Iterator[Entry]) -> list[Entry]:
    batch: list[Entry] = []
    with contextlib.suppress(Damage):  # what follows was not read for the index either
        batch.extend(islice(entries, _BATCH))
    return batch


def _of_calls(calls: list[Call]) -> Iterator[bytes | None]:
    """Returns the text of each call without its time; None where a text in one is not valid
    Unicode.
    """
    for call in calls:
        msgspec.structs.force_setattr(call, "seconds", 0.0)
    try:
        return iter(journal_file.encoder.encode_lines(calls).split(b"\n"))
    except UnicodeEncodeError:
        return iter([None] * len(calls))


def _digest(entry: Entry, journal: Bytes | FileBlocks, text: bytes | None) -> int:
    line = entry.line
    if isinstance(line, Collective):
        text = journal_file.encoded([msgspec.structs.replace(line, at=0.0)])
    elif isinstance(line, Note) and line.kind == _TIMING_NOTE:
        text = _TIMING_NOTE.encode()
    if text is None:
        text = journal[entry.start : entry.end].tobytes()
    return xxhash.xxh3_64_intdigest(text)


def _says(call: Call) -> int:
    return (
        (Says.PROGRAM.value if call.program else 0)
        | (Says.ARGUMENTS.value if call.arguments else 0)
        | (Says.NOTES.value if call.notes else 0)
        | (Says.ERROR.value if call.error else 0)
        | (Says.PLACEMENTS.value if call.placements else 0)
        | (Says.FILES.value if call.files else 0)
    )
