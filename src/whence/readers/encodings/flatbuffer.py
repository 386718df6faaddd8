"""Reads FlatBuffers: tables whose fields have numbers, by a schema that the reader knows.

Source: https://flatbuffers.dev/internals/. A file is untrusted: every offset is checked against its
size, and no more tables are read than fit into it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

_TABLE_BYTES = 4  # the least of a table: where the list of its fields stands


class Flatbuffer:
    """The bytes of a file. Every method raises ValueError for an offset outside them."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._left = len(data) // _TABLE_BYTES

    def at(self, place: int, kind: str) -> tuple[Any, ...]:
        """Returns numbers that start at a byte. kind: a `struct` format."""
        if not 0 <= place <= len(self.data) - struct.calcsize(f"<{kind}"):
            raise ValueError(f"it leads to byte {place} of {len(self.data)}")
        return struct.unpack_from(f"<{kind}", self.data, place)

    def behind(self, place: int) -> int:
        """Returns the position that an offset points to."""
        return place + int(self.at(place, "I")[0])

    def table(self, place: int) -> Table:
        """Returns the table at a position."""
        self._left -= 1
        if self._left < 0:
            raise ValueError("it holds tables within themselves")
        fields = place - self.at(place, "i")[0]
        (size,) = self.at(fields, "H")
        return Table(self, place, self.at(fields + 4, f"{max(size - 4, 0) // 2}H"))


class Table:
    """A table: its fields by number, each of which may be absent."""

    def __init__(self, file: Flatbuffer, place: int, fields: tuple[int, ...]) -> None:
        self._file, self._place, self._fields = file, place, fields

    def number(self, field: int, kind: str, default: int = 0) -> Any:
        """Returns a number. kind: a `struct` format."""
        place = self._where(field)
        return self._file.at(place, kind)[0] if place else default

    def text(self, field: int) -> str:
        """Returns a text, "" where it is absent."""
        return bytes(self.numbers(field, "B")).decode("utf-8", "replace")

    def numbers(self, field: int, kind: str) -> tuple[int, ...]:
        """Returns a vector of numbers."""
        place = self._behind(field)
        return self._file.at(place + 4, f"{self._file.at(place, 'I')[0]}{kind}") if place else ()

    def table(self, field: int) -> Table | None:
        """Returns a table, or the member of a union."""
        place = self._behind(field)
        return self._file.table(place) if place else None

    def tables(self, field: int) -> Iterator[Table]:
        """Returns a vector of tables."""
        place = self._behind(field)
        for n in range(self._file.at(place, "I")[0] if place else 0):
            yield self._file.table(self._file.behind(place + 4 + 4 * n))

    def _where(self, field: int) -> int:
        offset = self._fields[field] if field < len(self._fields) else 0
        return self._place + offset if offset else 0

    def _behind(self, field: int) -> int:
        place = self._where(field)
        return self._file.behind(place) if place else 0
