"""What a writer knows of the elements stored so far, to store equal ones once."""

from __future__ import annotations

import math

from whence.records import Elements, Increment

REMEMBERED = 1 << 17
"""How many digests are remembered; about 300 bytes each, so at most 40 MB. Older ones are
forgotten.
"""

_Stored = tuple[str, tuple[int, ...], Elements]


class StoredElements:
    """Which records have elements, and where the elements of recent digests lie."""

    def __init__(self) -> None:
        self.records = 0  # added so far
        self._has_elements = bytearray()
        # two generations: forgetting costs nothing per record
        self._recent: dict[bytes, _Stored] = {}
        self._older: dict[bytes, _Stored] = {}

    def add(
        self, digest: bytes, dtype: str, shape: tuple[int, ...], elements: Elements | None
    ) -> None:
        """Add the next record."""
        self.records += 1
        self._has_elements.append(elements is not None)
        if elements is None or not digest:
            return
        if len(self._recent) >= REMEMBERED // 2:
            self._older, self._recent = self._recent, {}
        self._recent[digest] = (dtype, shape, elements)

    def find(
        self, digest: bytes, dtype: str, shape: tuple[int, ...], nbytes: int
    ) -> Elements | None:
        """Where equal bytes already lie. Another shape or dtype over the same bytes may share them,
        but not an increment.
        """
        stored = self._recent.get(digest) or self._older.get(digest)
        if stored is None:
            return None
        stored_dtype, stored_shape, elements = stored
        if isinstance(elements, Increment):
            return elements if stored_dtype == dtype and stored_shape == shape else None
        return elements if elements.nbytes == nbytes else None

    def increment_shape(
        self, shape: tuple[int, ...], base: tuple[int, int], nbytes: int, itemsize: int
    ) -> tuple[int, ...] | str:
        """Shape of the increment that `nbytes` are, or why they cannot be one."""
        record, axis = base
        if not 0 <= record < self.records:
            raise ValueError(f"base record {record} of {self.records}")
        if not 0 <= axis < len(shape):
            raise ValueError(f"increment along axis {axis} of shape {shape}")
        if not self._has_elements[record]:
            return f"only what follows record {record} was seen, and its elements were not kept"
        row = math.prod(shape[:axis] + shape[axis + 1 :]) * itemsize
        extent, remainder = divmod(nbytes, row) if row else (0, nbytes)
        if remainder or extent > shape[axis]:
            raise ValueError(f"{nbytes} bytes are no part of shape {shape} along axis {axis}")
        return (*shape[:axis], extent, *shape[axis + 1 :])

    def forget(self) -> None:
        """Forget the digests."""
        self._recent, self._older = {}, {}
