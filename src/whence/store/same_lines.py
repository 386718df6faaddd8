"""Do two runs on disk say the same? Told from their journals; lines that differ are decoded."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from whence.store import journal
from whence.store.journal import CALL, COLLECTIVE, NOTE, RECORD
from whence.store.process_reader import ProcessReader
from whence.store.reader import StoredRun
from whence.store.shards import Bytes, forget


def say_the_same(reference: StoredRun, target: StoredRun) -> bool:
    """Do both runs hold the same calls, programs, notes and steps, line by line, and tensors of
    equal dtype, shape and hash?

    How long calls and the recording of programs took may differ, when collectives were issued, and
    where and how elements are kept. A tensor whose hash was not taken equals none, and a damaged
    journal no other.
    """
    sides = reference.readers, target.readers
    return len(sides[0]) == len(sides[1]) and all(
        _say_the_same(a, b) for a, b in zip(*sides, strict=True)
    )


def _say_the_same(a: ProcessReader, b: ProcessReader) -> bool:
    if a.index.damage is not None or b.index.damage is not None:
        return False
    if not a.index.columns["hash"].any(axis=1).all():
        return False
    if _have_equal_bytes(a.journal, b.journal):
        return True
    kinds = a.index.columns["line_kind"]
    return (
        np.array_equal(kinds, b.index.columns["line_kind"])
        and _have_equal_tensors(a, b)
        and _have_equal_lines(a, b, np.flatnonzero(kinds != RECORD).tolist())
    )


def _have_equal_bytes(a: Bytes, b: Bytes) -> bool:
    if a.size != b.size:
        return False
    for start in range(0, a.size, _PIECE):
        pieces = [data[start : start + _PIECE] for data in (a, b)]
        if pieces[0].data != pieces[1].data:
            return False
        for data in (a, b):
            forget(data, start, start + pieces[0].size)
    return True


_PIECE = 8 << 20


def _have_equal_tensors(a: ProcessReader, b: ProcessReader) -> bool:
    columns, others = a.index.columns, b.index.columns
    return all(
        np.array_equal(columns[name], others[name]) for name in ("hash", "shape", "shape_at")
    ) and np.array_equal(a.column("dtype"), b.column("dtype"))


def _have_equal_lines(a: ProcessReader, b: ProcessReader, lines: list[int]) -> bool:
    kinds = a.index.columns["line_kind"]
    for line in lines:
        own, other = (bytes(p.journal[slice(*p.index.span(line))].data) for p in (a, b))
        if own == other:
            continue
        untimed = _UNTIMED.get(int(kinds[line]))
        if untimed is None:
            return False
        one, another = (untimed(p, line) for p in (a, b))
        if one != another:
            return False
    return True


def _untimed_call(process: ProcessReader, line: int) -> bytes:
    call = process.decode_line(line, journal.decode_call)
    return msgspec.json.encode(msgspec.structs.replace(call, seconds=0.0))


def _untimed_note(process: ProcessReader, line: int) -> bytes:
    note = process.decode_line(line, journal.decode_note)
    return msgspec.json.encode(_PROGRAMS if note.kind == _PROGRAMS else note)


def _untimed_collective(process: ProcessReader, line: int) -> bytes:
    collective = process.decode_line(line, journal.decode_collective)
    return msgspec.json.encode(msgspec.structs.replace(collective, at=0.0))


_PROGRAMS = "programs"  # the note that says in how much time programs were recorded
_UNTIMED: dict[int, Callable[[ProcessReader, int], bytes]] = {
    CALL: _untimed_call,
    NOTE: _untimed_note,
    COLLECTIVE: _untimed_collective,
}
