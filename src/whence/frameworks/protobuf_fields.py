"""Fields of protobuf messages, written without a schema. A message is its fields, one behind the
other.
"""

from __future__ import annotations

import struct


def text(number: int, value: str) -> bytes:
    """A string field."""
    return field(number, value.encode("utf-8", "surrogateescape"))


def field(number: int, value: bytes) -> bytes:
    """A field of bytes, or of a message."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def integer(number: int, value: int) -> bytes:
    """An integer field; value >= 0."""
    return varint(number << 3) + varint(value)


def float32(number: int, value: float) -> bytes:
    """A float field."""
    return varint(number << 3 | 5) + struct.pack("<f", value)


def float64(number: int, value: float) -> bytes:
    """A double field."""
    return varint(number << 3 | 1) + struct.pack("<d", value)


def varint(value: int) -> bytes:
    """A number >= 0, seven bits a byte."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))
