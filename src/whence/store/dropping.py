"""Take elements out of a journal that stands: which records go with others, and the lines without
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from whence import disk
from whence.records import Elements, Increment, Kept
from whence.store.folder import INDEX, JOURNAL
from whence.store.index import Column, Index
from whence.store.journal import decode_record, encoder
from whence.store.shards import Bytes
from whence.store.status import Ended, leave_status, read_status

Places = Mapping[tuple[int, int], tuple[int, int]]
"""Old (shard, offset) -> new (shard, offset)."""


def with_dependents(columns: dict[str, Column], chosen: Column) -> Column:
    """Also the records that share stored bytes with a chosen one, and the increments that follow
    one.
    """
    place = np.stack([columns["shard"], columns["offset"]], axis=1)
    stored = (columns["shard"] >= 0) & (columns["nbytes"] > 0)
    _, group = np.unique(place, axis=0, return_inverse=True)
    group = group.reshape(-1)
    base = columns["base"]
    while True:
        hit = np.zeros(int(group.max()) + 1 if group.size else 0, bool)
        hit[group[chosen & stored]] = True
        wider = chosen | (stored & hit[group]) | ((base >= 0) & chosen[base])
        if np.array_equal(wider, chosen):
            return wider
        chosen = wider


def lines_without(
    journal: Bytes, index: Index, dropped: Column, moved: Places, why: str
) -> Iterator[bytes | memoryview]:
    """The lines of a journal in which these records have no elements, for the reason `why`, and
    others lie where they were moved to.
    """
    places = {int(line): record for record, line in enumerate(index.records_at)}
    for number in range(index.columns["line_kind"].size):
        start, end = index.span(number)
        raw = journal[start:end].data
        record = places.get(number)
        if record is None:
            yield raw
            continue
        line = decode_record(raw)
        if dropped[record]:
            yield encoder.encode(msgspec.structs.replace(line, elements=None, why=why)) + b"\n"
        elif (
            isinstance(line.elements, Kept | Increment)
            and (line.elements.shard, line.elements.offset) in moved
        ):
            moved_line = msgspec.structs.replace(line, elements=_moved(line.elements, moved))
            yield encoder.encode(moved_line) + b"\n"
        else:
            yield raw


def replace_journal(folder: Path, lines: Iterable[bytes | memoryview]) -> None:
    """Replace the journal of a process folder, and take away its index. From that moment on what is
    gone from it is gone for every reader. Raises OSError.
    """
    status, count, digest = read_status(folder), 0, xxhash.xxh3_128()
    is_stated = status.lines >= 0
    with disk.whole_file(folder / JOURNAL) as file:
        for line in lines:
            file.write(line)
            digest.update(line)
            count += 1
        file.flush()
        disk.system.sync(file.fileno())
        (folder / INDEX).unlink(missing_ok=True)
        if is_stated:  # until the other journal stands, neither is told to be whole
            leave_status(folder, Ended(status.ended, status.error))
    if is_stated:
        leave_status(folder, Ended(status.ended, status.error, count, digest.hexdigest()))


def _moved(place: Kept | Increment, moved: Places) -> Elements:
    shard, offset = moved[place.shard, place.offset]
    return msgspec.structs.replace(place, shard=shard, offset=offset)
