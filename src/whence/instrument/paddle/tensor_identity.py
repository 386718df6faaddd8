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
from whence.instrument.session import Content, Form, Origin, Session
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
    folded: dict[str, tuple[int, str]]


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
    record_and_edge: tuple[int, str]


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
        self._parameters: dict[str, HeldTensor] = {}
        self._digests: dict[str, tuple[bytes, int]] = {}

    def begin(self) -> None:
        """A call of the root begins: what lay where before means nothing any more."""
        self._placed.clear()

    def known(self, sight: Look, digest: bytes, order: int, *, since: int = -1) -> int | None:
        """The record these bytes at this place are, None when they are none; of calls since the one
        numbered `since`.
        """
        previous = (
            self._placed.get((sight.place, sight.dtype, sight.shape)) if sight.place else None
        )
        if previous is None or previous.digest != digest or previous.touched < since:
            return None
        previous.touched = order
        return previous.record

    def remember(self, sight: Look, digest: bytes, record: int, order: int) -> SeenTensor | None:
        """These bytes at this place are this record from now on. Returns what `unmoved` asks; None
        for bytes without a place.
        """
        if not sight.place:
            return None
        key = sight.place, sight.dtype, sight.shape
        remembered = self._placed[key] = SeenTensor(record, digest, key, sight.nbytes, order)
        return remembered

    def unmoved(self, previous: SeenTensor, tensor: Any, order: int) -> bool:
        """Does a variable still lie where it was seen, with the same bytes? Then it is remembered
        as `remember` would.
        """
        if (
            tensor.data_ptr() != previous.key[0]
            or host.digest_at(previous.key[0], previous.nbytes) != previous.digest
        ):
            return False
        previous.touched = order
        self._placed[previous.key] = previous
        return True

    def record(
        self,
        tensor: Any,
        sight: Look,
        digest: bytes,
        origin: Origin,
        external: External | None = None,
    ) -> int:
        """A new record of a readable tensor."""
        data = sight.data if sight.data is not None or sight.place else paddle_arrays.viewed(0, 0)
        # What is read where it lies, lies in host memory.
        place = None if sight.place else getattr(tensor, "place", None)
        device = "cpu" if place is None or place.is_cpu_place() else str(place)[6:-1]
        address = sight.place if sight.data is None else 0
        content = Content(digest, address, sight.nbytes, data, external=external)
        return self._session.record(
            Form(sight.dtype, sight.shape, device=device), content, origin, tensor
        )

    def unreadable(self, sight: Look) -> int:
        """A record of a tensor that has no bytes to read."""
        return self._session.unreadable(Form(sight.dtype, sight.shape, device=""), sight.why)

    def sight(self, tensor: Any, order: int, origin: Origin, since: int = -1) -> tuple[int, str]:
        """(record, edge) of a tensor: one that is known by its bytes (edge "content"), or a new one
        (edge "").
        """
        sight = look(tensor)
        if sight.why:
            return self.unreadable(sight), ""
        digest = sight.digest()
        number = self.known(sight, digest, order, since=since)
        if number is not None:
            return number, "content"
        number = self.record(tensor, sight, digest, origin)
        self.remember(sight, digest, number, order)
        return number, ""

    def unchanged(self, tensor: Any, name: str) -> tuple[int, str] | None:
        """(record, edge) of a parameter that lies where it was hashed and of which a sample of
        bytes is what it was, else None.
        """
        parameter = self._parameters.get(name)
        if (
            parameter is None
            or not tensor._is_initialized()
            or tensor.data_ptr() != parameter.address
        ):
            return None
        return (
            parameter.record_and_edge
            if parameter.spots is None or parameter.spots.tobytes() == parameter.probe
            else None
        )

    def parameter(
        self, tensor: Any, name: str, origin: Origin, *, sure: bool = False
    ) -> tuple[int, str]:
        """(record, edge) of a parameter, hashed once and again when a sample of its bytes has
        changed. sure: hash it in any case.
        """
        unchanged = None if sure else self.unchanged(tensor, name)
        if unchanged is not None:
            return unchanged
        sight = look(tensor)
        if sight.why:
            return self.unreadable(sight), ""
        record, edge = self._weight(tensor, sight, name, origin)
        place = int(tensor.data_ptr()) if sight.nbytes else 0
        spots = _spots(place, sight.nbytes) if sight.place else None
        self._parameters[name] = HeldTensor(
            place, spots, b"" if spots is None else spots.tobytes(), (record, "content")
        )
        return record, edge

    def from_file(self, weight: Weight, name: str, origin: Origin) -> tuple[int, str]:
        """(record, edge) of a parameter that no hook shows, as the predictor read it from its
        file.
        """
        dtype, shape, data = weight
        return self._weight(data, Look(dtype, shape, 0, data.nbytes, data), name, origin)

    def _weight(self, value: Any, sight: Look, name: str, origin: Origin) -> tuple[int, str]:
        digest = sight.digest()
        previous, edge = self._digests.get(name), "content"
        if previous is not None and previous[0] == digest:
            record = previous[1]
        else:
            external, edge = None, ""
            if (
                self._find_external is not None
                and self._session.elements_on
                and sight.nbytes >= _LEAST
            ):
                external = self._find_external(name, digest, sight.dtype, sight.nbytes)
            record = self.record(value, sight, digest, origin, external)
        self._digests[name] = (digest, record)
        return record, edge


def _spots(place: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A few of the bytes of a parameter, where they lie: what an update of all its elements cannot
    miss.
    """
    if nbytes <= 3 * _SPOT:
        return host.bytes_at(place, nbytes)
    return np.ndarray(
        (3, _SPOT), np.uint8, host.memory_at(place, nbytes), strides=((nbytes - _SPOT) // 2, 1)
    )
