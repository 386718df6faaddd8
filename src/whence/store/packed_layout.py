"""Which pieces lie where in the shards that a packed run stands for: where they lay, or closed up
where elements were dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from whence.errors import StoreFailed
from whence.store.index import INCREMENT, KEPT, Column, Index
from whence.store.packed_shard import MOST_GAP_BYTES, Piece
from whence.store.shards import (
    ALIGN,
    DIRECT_BYTES,
    HEADER_BYTES,
    PAGE,
    SHARD_BYTES,
    Bytes,
    Header,
    map_file,
    tensor_name,
)

At = Callable[[int, int], Piece]
"""Makes the piece of a record at an offset."""
_SHARD = re.compile(r"shard-(\d{5,})\.safetensors")


class ShardPlan(NamedTuple):
    """One shard that is packed: its header area, and the pieces in its data area."""

    number: int
    head: Bytes
    data_bytes: int
    pieces: list[Piece]


Shards = Iterable[ShardPlan]


def as_they_are(folder: Path, index: Index, at: At) -> Shards:
    """The shards of a process folder. What lies between the tensors is a piece of its own, unless
    it is a few zeros.
    """
    stored = _stored(index)
    columns = index.columns
    for file in sorted(folder.glob("shard-*.safetensors")):
        match = _SHARD.fullmatch(file.name)
        if match is None:
            continue
        number = int(match[1])
        data = map_file(file)
        length = int.from_bytes(data[:8].tobytes(), "little") if data.size >= 8 else data.size
        if 8 + length > data.size:
            raise StoreFailed(f"{file} was cut off: `whence recover` the run, then pack it")
        head, data = data[: 8 + length], data[8 + length :]
        records = stored[columns["shard"][stored] == number]
        _, firsts = np.unique(columns["offset"][records], return_index=True)
        pieces: list[Piece] = []
        end = 0
        for record in records[firsts].tolist():
            offset, nbytes = int(columns["offset"][record]), int(columns["nbytes"][record])
            if offset + nbytes > data.size:
                break  # it was cut off, and stays so
            pieces += _gap(data, end, offset)
            pieces.append(at(record, offset))
            end = offset + nbytes
        pieces += _gap(data, end, data.size)
        yield ShardPlan(number, head, data.size, pieces)


def _gap(data: Bytes, start: int, stop: int) -> list[Piece]:
    between = data[start:stop]
    if between.size < MOST_GAP_BYTES and not between.any():
        return []
    return [Piece(start, between.size, 1, None, lambda: between)]


def closed_up(
    index: Index, dropped: Column, at: At, header_bytes: int
) -> tuple[list[ShardPlan], dict[tuple[int, int], tuple[int, int]]]:
    """Shards of what stays when the elements of some records are dropped, and where each piece is
    moved to: old (shard, offset) -> new.
    """
    columns, reserved = index.columns, header_bytes or HEADER_BYTES
    plans: list[ShardPlan] = []
    moved: dict[tuple[int, int], tuple[int, int]] = {}
    header, pieces = Header(), list[Piece]()

    def finish() -> None:
        if pieces:
            head = np.frombuffer(header.encode(reserved), np.uint8)
            plans.append(ShardPlan(len(plans), head, header.end, [*pieces]))
            pieces.clear()

    for record in _stored(index).tolist():
        place = int(columns["shard"][record]), int(columns["offset"][record])
        if dropped[record] or place in moved:
            continue
        nbytes = int(columns["nbytes"][record])
        is_crowded = header.nbytes * 10 > (reserved - 8) * 9
        if is_crowded or (header.end and header.end + nbytes > SHARD_BYTES):
            finish()
            header = Header()
        unit = PAGE if nbytes >= DIRECT_BYTES else ALIGN
        start = (header.end + unit - 1) & -unit
        shape = index.stored_shape(record)
        if shape is None:
            raise StoreFailed(f"record {record} is damaged: its shape is not that of its bytes")
        grown = bool(columns["elements"][record] == INCREMENT)
        header.add(
            tensor_name(record, increment=grown),
            index.names[columns["dtype"][record]],
            shape,
            start,
            nbytes,
            columns["hash"][record].tobytes(),
        )
        pieces.append(at(record, start))
        moved[place] = len(plans), start
    finish()
    return plans, moved


def _stored(index: Index) -> Column:
    """Records whose elements lie in shards and have bytes."""
    columns = index.columns
    return np.flatnonzero(np.isin(columns["elements"], (KEPT, INCREMENT)) & (columns["nbytes"] > 0))
