"""Reads the protobuf wire format: fields by number, or by name where a schema lists the fields to
read.

Source: https://protobuf.dev/programming-guides/encoding/. A message is untrusted: nothing larger
than its data is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Buffer = bytes | memoryview
Reader = Callable[[int, Any], list[Any]]
"""Returns the values of one occurrence of a field, given its wire type and value; [] for another
wire type.
"""
Schema = dict[int, tuple[str, Reader]]
"""Field number -> (name, reader) of the fields of a message that are read."""


class Message(dict[str, list[Any]]):
    """The values of the fields of a message, in the order of the file."""

    def last(self, name: str, otherwise: Any = "") -> Any:
        """Returns the value of a singular field; the last occurrence counts."""
        return self[name][-1] if self[name] else otherwise


def read(message: Buffer, schema: Schema) -> Message:
    """Returns the fields of a schema. Raises ValueError, as `fields` does."""
    values = Message({name: [] for name, _ in schema.values()})
    for number, kind, value in fields(message):
        if number in schema:
            name, reader = schema[number]
            values[name] += reader(kind, value)
    return values


def fields(message: Buffer) -> Iterator[tuple[int, int, Any]]:
    """Yields (field number, wire type, value) of every field, in order of the file.

    Value: an unsigned int for VARINT (two's complement of 64 bits for negative ones: `signed`), 8
    or 4 raw bytes for FIXED64 and FIXED32, a memoryview for BYTES (a string, a message, packed
    numbers). Raises ValueError for data that is not a message.
    """
    data = memoryview(message)
    place, end = 0, len(data)
    while place < end:
        tag, place = varint(data, place)
        number, kind = tag >> 3, tag & 7
        if not number:
            raise ValueError(f"field number 0 at byte {place}")
        if kind == VARINT:
            value, place = varint(data, place)
            yield number, kind, value
            continue
        if kind == BYTES:
            length, place = varint(data, place)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {place}")
        if length > end - place:
            raise ValueError(
                f"field {number} at byte {place} says it has {length} bytes, {end - place} are left"
            )
        yield number, kind, data[place : place + length]
        place += length


def varint(data: Buffer, place: int) -> tuple[int, int]:
    """Returns (value, position after it). Raises ValueError when it does not end within ten bytes
    or the data.
    """
    value = 0
    for i in range(10):
        if place + i >= len(data):
            raise ValueError("the data ends within a number")
        byte = data[place + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, place + i + 1
    raise ValueError(f"a number of more than ten bytes at byte {place}")


def signed(value: int) -> int:
    """Converts the VARINT of an int32, int64 or enum field."""
    return value - (1 << 64) if value >> 63 else value


def raw(kind: int, value: Any) -> list[memoryview]:
    """Reads bytes, or a message that is decoded later."""
    return [value] if kind == BYTES else []


def texts(kind: int, value: Any) -> list[str]:
    return [text(value)] if kind == BYTES else []


def integers(kind: int, value: Any) -> list[int]:
    return [signed(value)] if kind == VARINT else []


def messages(schema: Schema) -> Reader:
    """Returns the reader of a field whose value is a message."""
    return lambda kind, value: [read(value, schema)] if kind == BYTES else []


PAIRS = messages({1: ("key", texts), 2: ("value", texts)})
"""Reader of the entries of a map of texts, which `table` turns into a dict."""


def table(entries: Iterable[Message]) -> dict[str, str]:
    return {entry.last("key"): entry.last("value") for entry in entries}


def packed(kind: int, value: Any) -> list[int]:
    """Reads the numbers of one occurrence of a repeated varint field, packed or not."""
    if kind == VARINT:
        return [signed(value)]
    out, place = [], 0
    while place < len(value):
        number, place = varint(value, place)
        out.append(signed(number))
    return out


def floats(kind: int, value: Any) -> list[float]:
    """Reads the numbers of one occurrence of a repeated float field."""
    if kind not in (FIXED32, BYTES) or len(value) % 4:
        raise ValueError("no float field")
    return list(struct.unpack(f"<{len(value) // 4}f", value))


def text(value: Any) -> str:
    """Reads a string field; bytes that are not UTF-8 stay visible."""
    return bytes(value).decode("utf-8", "backslashreplace")
