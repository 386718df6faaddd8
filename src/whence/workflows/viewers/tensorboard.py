"""Scalars for TensorBoard, written without the tensorboard package.

An event file consists of records with checksums; each record is an event of TensorFlow's
event.proto.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from whence.errors import OutputExists
from whence.frameworks import protobuf_fields as wire
from whence.records.slots import is_output
from whence.results import Comparison
from whence.workflows.saved import AnyComparison, AnyPath, as_comparison, write_file

Scalars: TypeAlias = Mapping[tuple[str, int], float]
"""Values by tag and step."""
_POLYNOMIAL, _MASK = 0x82F63B78, 0xA282EAD8


def tensorboard(comparison: AnyComparison, folder: AnyPath) -> int:
    """Write the relative error of each module at each step as scalars of TensorBoard, and return
    how many there are.

    folder: new or empty; each rank gets a folder in it where there are several. Raises
    UnreadableRun, OutputExists, StoreFailed.
    """
    place = Path(folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise OutputExists(f"{place} exists and is not empty; choose another folder")
    by_rank = scalars(as_comparison(comparison))
    now = time.time()
    for rank, values in by_rank.items():
        below = place if len(by_rank) == 1 else place / f"rank{rank}"
        write_file(below / f"events.out.tfevents.{int(now)}.whence", event_file(values, now))
    return sum(len(values) for values in by_rank.values())


def scalars(result: Comparison) -> dict[int, dict[tuple[str, int], float]]:
    """By rank: the relative 2-norm of each module's worst output at each step.

    A step at which a module was not measured has no scalar.
    """
    by_rank: dict[int, dict[tuple[str, int], float]] = {}
    for row in result.rows:
        error = row.measured.values.get("rel_l2")
        if error is not None and is_output(row.reference_slot):
            values = by_rank.setdefault(row.rank, {})
            key = (f"rel_l2/{row.name}", row.step)
            values[key] = max(error, values.get(key, 0.0))
    return by_rank


def event_file(values: Scalars, now: float) -> Iterator[bytes]:
    """The records of the file. now: in seconds since 1970."""
    yield _record(wire.float64(1, now) + wire.text(3, "brain.Event:2"))
    for (tag, step), value in sorted(values.items(), key=lambda item: item[0][1]):
        summary = wire.field(1, wire.text(1, tag) + wire.float32(2, value))
        yield _record(wire.float64(1, now) + wire.integer(2, max(step, 0)) + wire.field(5, summary))


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, masked as the record format requires."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = [_entry(value) for value in range(256)]
