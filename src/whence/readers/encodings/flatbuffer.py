"""FlatBuffers: tables whose fields are told by number, by a schema that the reader knows.

Source: https://flatbuffers.dev/internals/. A file is untrusted: every place is looked up within it,
and no more tables are read than it has room for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

_TABLE_BYTES = 4  # the least of a table: where the list of its fields stands


class Flatbuffer:
    """The bytes of a file. Raises ValueError where it leads out of them, here as everywhere."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._left = len(data) // _TABLE_BYTES

    def at(self, place: int, kind: str) -> tuple[Any, ...]:
        """Numbers from a byte on; kind: as `struct` has it."""
        if not 0 <= place <= len(self.data) - struct.calcsize(f"<{kind}"):
            raise ValueError(f"it leads to byte {place} of {len(self.data)}")
        return struct.unpack_from(f"<{kind}", self.data, place)

    def behind(self, place: int) -> int:
        """The place that an offset leads to."""
        return place + int(self.at(place, "I")[0])

    def table(self, place: int) -> Table:
        """The table at a place."""
        self._left -= 1
        if self._left < 0:
            raise ValueError("it holds tables within themselves")
        fields = place - self.at(place, "i")[0]
        (size,) = self.at(fields, "H")
        return Table(self, place, self.at(fields + 4, f"{max(size - 4, 0) // 2}H"))


class Table:
    """A table: its fields by number, each of which may be left out."""

    def __init__(self, file: Flatbuffer, place: int, fields: tuple[int, ...]) -> None:
        self._file, self._place, self._fields = file, place, fields

    def number(self, field: int, kind: str, default: int = 0) -> Any:
        """A number; kind: as `struct` has it."""
        place = self._where(field)
        return self._file.at(place, kind)[0] if place else default

    def text(self, field: int) -> str:
        """A text, "" where it is left out."""
        return bytes(self.numbers(field, "B")).decode("utf-8", "replace")

    def numbers(self, field: int, kind: str) -> tuple[int, ...]:
        """A vector of numbers."""
        place = self._behind(field)
        return self._file.at(place + 4, f"{self._file.at(place, 'I')[0]}{kind}") if place else ()

    def table(self, field: int) -> Table | None:
        """A table, or what is one of several."""
        place = self._behind(field)
        return self._file.table(place) if place else None

    def tables(self, field: int) -> Iterator[Table]:
        """A vector of tables."""
        place = self._behind(field)
        for n in range(self._file.at(place, "I")[0] if place else 0):
            yield self._file.table(self._file.behind(place + 4 + 4 * n))

    def _where(self, field: int) -> int:
        offset = self._fields[field] if field < len(self._fields) else 0
        return self._place + offset if offset else 0

    def _behind(self, field: int) -> int:
        place = self._where(field)
        return self._file.behind(place) if place else 0
