"""What a listener remembers of Paddle's tensors within one call of a root: which record they are,
known again by their content.

Buffers are used again at once and have no version, so address and form only say where to look; the
bytes decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes
from whence.frameworks import host, paddle_arrays
from whence.instrument.session import Session
from whence.records import External

FindExternal = Callable[[str, bytes, str, int], External | None]
"""(name, digest, dtype, bytes) of a parameter -> where it lies in the user's file of weights, None
when nowhere.
"""
Weight = tuple[str, tuple[int, ...], np.ndarray[Any, np.dtype[np.uint8]]]
"""dtype, shape and bytes of a parameter as they lie in a file."""


class Unshown(NamedTuple):
    """Parameters that operators are given in lists, which hooks do not show. One for a predictor
    and its clones.

    weights: by name, until they are recorded, since the file behind them is deleted already; taken:
    their records and edges then.
    """

    weights: dict[str, Weight]
    taken: dict[str, tuple[int, str]]


_LEAST = 1 << 16  # bytes of a parameter that is worth looking for in a file
_SPOT = 64  # bytes


class SeenTensor:
    """A tensor that was recorded. key: address, dtype and shape; touched: the number of the call
    that saw it last.
    """

    __slots__ = ("digest", "key", "nbytes", "record", "touched")

    def __init__(
        self,
        record: int,
        digest: bytes,
        key: tuple[int, str, tuple[int, ...]],
        nbytes: int,
        touched: int,
    ) -> None:
        self.record, self.digest, self.key, self.nbytes, self.touched = (
            record,
            digest,
            key,
            nbytes,
            touched,
        )


class HeldTensor(NamedTuple):
    """A parameter as it was last hashed: where it lies, some of its bytes in memory and as they
    were then, its record and edge.

    spots: to be read only while the parameter is at `address`; None when it has no bytes or they do
    not lie in host memory.
    """

    address: int
    spots: np.ndarray[Any, np.dtype[np.uint8]] | None
    probe: bytes
    seen: tuple[int, str]


class Look(NamedTuple):
    """A tensor's form and where its bytes are: at an address, or in `data`. why: there are none to
    read.
    """

    dtype: str
    shape: tuple[int, ...]
    place: int
    nbytes: int
    data: np.ndarray[Any, np.dtype[np.uint8]] | None
    why: str = ""

    def digest(self) -> bytes:
        """xxh3_128 of the bytes."""
        return (
            host.digest_at(self.place, self.nbytes) if self.data is None else host.digest(self.data)
        )


def look(tensor: Any) -> Look:
    """The form of a tensor and its bytes, copied only where they do not lie plainly in host
    memory.
    """
    shape, name = tuple(tensor.shape), paddle_arrays.named(tensor.dtype)
    why = (
        ""
        if name and tensor._is_initialized() and tensor.is_dense()
        else paddle_arrays.unreadable(tensor)
    )
    if why:
        return Look(name or str(tensor.dtype), shape, 0, 0, None, why)
    nbytes = dtypes.DTYPES[name].itemsize * math.prod(shape)
    place = paddle_arrays.address(tensor) if nbytes else 0
    return Look(
        name, shape, place, nbytes, None if place or not nbytes else paddle_arrays.canonical(tensor)
    )


class Tensors:
    """Sights of one root. Not thread-safe: who uses it holds a lock."""

    def __init__(self, session: Session, find_external: FindExternal | None = None) -> None:
        self._session, self._find_external = session, find_external
        self._placed: dict[tuple[Any, ...], SeenTensor] = {}
        self._held: dict[str, HeldTensor] = {}
        self._digests: dict[str, tuple[bytes, int]] = {}

    def begin(self) -> None:
        """A call of the root begins: what lay where before means nothing any more."""
        self._placed.clear()

    def known(self, seen: Look, digest: bytes, order: int, *, since: int = -1) -> int | None:
        """The record these bytes at this place are, None when they are none; of calls since the one
        numbered `since`.
        """
        found = self._placed.get((seen.place, seen.dtype, seen.shape)) if seen.place else None
        if found is None or found.digest != digest or found.touched < since:
            return None
        found.touched = order
        return found.record

    def remember(self, seen: Look, digest: bytes, record: int, order: int) -> SeenTensor | None:
        """These bytes at this place are this record from now on. Returns what `unmoved` asks; None
        for bytes without a place.
        """
        if not seen.place:
            return None
        key = seen.place, seen.dtype, seen.shape
        made = self._placed[key] = SeenTensor(record, digest, key, seen.nbytes, order)
        return made

    def unmoved(self, before: SeenTensor, tensor: Any, order: int) -> bool:
        """Does a variable still lie where it was seen, with the same bytes? Then it is remembered
        as `remember` would.
        """
        if (
            tensor.data_ptr() != before.key[0]
            or host.digest_at(before.key[0], before.nbytes) != before.digest
        ):
            return False
        before.touched = order
        self._placed[before.key] = before
        return True

    def record(
        self,
        tensor: Any,
        seen: Look,
        digest: bytes,
        *,
        scope: str,
        slot: str,
        op_type: str,
        keep: bool | None = None,
        external: External | None = None,
    ) -> int:
        """A new record of a readable tensor."""
        data = seen.data if seen.data is not None or seen.place else paddle_arrays.viewed(0, 0)
        # What is read where it lies, lies in host memory.
        place = None if seen.place else getattr(tensor, "place", None)
        device = "cpu" if place is None or place.is_cpu_place() else str(place)[6:-1]
        return self._session.record(
            seen.dtype,
            seen.shape,
            data,
            digest,
            scope=scope,
            slot=slot,
            op_type=op_type,
            value=tensor,
            device=device,
            address=seen.place if seen.data is None else 0,
            nbytes=seen.nbytes,
            keep=keep,
            external=external,
        )

    def sight(
        self,
        tensor: Any,
        order: int,
        *,
        scope: str,
        slot: str,
        op_type: str,
        since: int = -1,
        keep: bool | None = None,
    ) -> tuple[int, str]:
        """(record, edge) of a tensor: one that is known by its bytes (edge "content"), or a new one
        (edge "").
        """
        seen = look(tensor)
        if seen.why:
            return self._session.unreadable(seen.dtype, seen.shape, seen.why), ""
        digest = seen.digest()
        number = self.known(seen, digest, order, since=since)
        if number is not None:
            return number, "content"
        number = self.record(
            tensor, seen, digest, scope=scope, slot=slot, op_type=op_type, keep=keep
        )
        self.remember(seen, digest, number, order)
        return number, ""

    def unchanged(self, tensor: Any, name: str) -> tuple[int, str] | None:
        """(record, edge) of a parameter that lies where it was hashed and of which a sample of
        bytes is what it was, else None.
        """
        held = self._held.get(name)
        if held is None or not tensor._is_initialized() or tensor.data_ptr() != held.address:
            return None
        return held.seen if held.spots is None or held.spots.tobytes() == held.probe else None

    def parameter(
        self, tensor: Any, name: str, *, scope: str, slot: str, op_type: str, sure: bool = False
    ) -> tuple[int, str]:
        """(record, edge) of a parameter, hashed once and again when a sample of its bytes has
        changed. sure: hash it in any case.
        """
        unchanged = None if sure else self.unchanged(tensor, name)
        if unchanged is not None:
            return unchanged
        seen = look(tensor)
        if seen.why:
            return self._session.unreadable(seen.dtype, seen.shape, seen.why), ""
        known, edge = self._weight(tensor, seen, name, scope=scope, slot=slot, op_type=op_type)
        place = int(tensor.data_ptr()) if seen.nbytes else 0
        spots = _spots(place, seen.nbytes) if seen.place else None
        self._held[name] = HeldTensor(
            place, spots, b"" if spots is None else spots.tobytes(), (known, "content")
        )
        return known, edge

    def from_file(
        self, weight: Weight, name: str, *, scope: str, slot: str, op_type: str
    ) -> tuple[int, str]:
        """(record, edge) of a parameter that no hook shows, as the predictor read it from its
        file.
        """
        dtype, shape, data = weight
        return self._weight(
            data,
            Look(dtype, shape, 0, data.nbytes, data),
            name,
            scope=scope,
            slot=slot,
            op_type=op_type,
        )

    def _weight(
        self, value: Any, seen: Look, name: str, *, scope: str, slot: str, op_type: str
    ) -> tuple[int, str]:
        digest = seen.digest()
        before, edge = self._digests.get(name), "content"
        if before is not None and before[0] == digest:
            known = before[1]
        else:
            external, edge = None, ""
            if (
                self._find_external is not None
                and self._session.elements_on
                and seen.nbytes >= _LEAST
            ):
                external = self._find_external(name, digest, seen.dtype, seen.nbytes)
            known = self.record(
                value, seen, digest, scope=scope, slot=slot, op_type=op_type, external=external
            )
        self._digests[name] = (digest, known)
        return known, edge


def _spots(place: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A few of the bytes of a parameter, where they lie: what an update of all its elements cannot
    miss.
    """
    if nbytes <= 3 * _SPOT:
        return host.bytes_at(place, nbytes)
    return np.ndarray(
        (3, _SPOT), np.uint8, host.memory_at(place, nbytes), strides=((nbytes - _SPOT) // 2, 1)
    )
