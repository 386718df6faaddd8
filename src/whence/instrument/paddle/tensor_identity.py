"""Recognises Paddle's tensors within one call of a root by their content.

Buffers are reused at once and have no version, so address and form only tell where to look; the
bytes decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes
from whence.frameworks import host, paddle_arrays
from whence.instrument.engines.tensors import Records
from whence.instrument.engines.values import Seen
from whence.instrument.session import Origin, Session
from whence.records import External

FindExternal = Callable[[str, bytes, str, int], External | None]
"""(name, digest, dtype, bytes) of a parameter -> where it lies in the user's file of weights, None
when nowhere.
"""
Weight = tuple[str, tuple[int, ...], np.ndarray[Any, np.dtype[np.uint8]]]
"""dtype, shape and bytes of a parameter as they lie in a file."""


class Unshown(NamedTuple):
    """Parameters that operators get in lists, which hooks do not show. Shared by a predictor and
    its clones.

    weights: by name, until they are recorded, since their file is already deleted; folded: (record,
    edge) by name after that.
    """

    weights: dict[str, Weight]
    folded: dict[str, tuple[int, str]]


_LEAST = 1 << 16  # bytes of a parameter that is worth looking for in a file
_SPOT = 64  # bytes


class SeenTensor:
    """A recorded tensor. key: address, dtype and shape; touched: number of the last call that saw
    it.
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
    """A parameter as it was last hashed: its address, views of some of its bytes and their content
    then, its record and edge.

    spots: read only while the parameter is at `address`; None when it has no bytes or they are not
    in host memory.
    """

    address: int
    spots: np.ndarray[Any, np.dtype[np.uint8]] | None
    probe: bytes
    record_and_edge: tuple[int, str]


def look(tensor: Any) -> Seen:
    """The form of a tensor and its bytes, copied unless they are contiguous in host memory."""
    shape, name = tuple(tensor.shape), paddle_arrays.named(tensor.dtype)
    why = (
        ""
        if name and tensor._is_initialized() and tensor.is_dense()
        else paddle_arrays.unreadable(tensor)
    )
    if why:
        return Seen(name or str(tensor.dtype), shape, why=why, device="")
    nbytes = dtypes.DTYPES[name].itemsize * math.prod(shape)
    if not nbytes:
        data = paddle_arrays.viewed(0, 0)
    elif address := paddle_arrays.address(tensor):  # what is read where it lies is in host memory
        return Seen(name, shape, address, nbytes)
    else:
        data = paddle_arrays.canonical(tensor)
    device = "cpu" if tensor.place.is_cpu_place() else str(tensor.place)[6:-1]
    return Seen(name, shape, 0, nbytes, data, device=device)


class Tensors(Records):
    """Records the tensors of one root."""

    def __init__(self, session: Session, find_external: FindExternal | None = None) -> None:
        super().__init__(session)
        self._find_external = find_external
        self._placed: dict[tuple[Any, ...], SeenTensor] = {}
        self._parameters: dict[str, HeldTensor] = {}
        self._digests: dict[str, tuple[bytes, int]] = {}

    def begin(self) -> None:
        """Begin a call of the root: forget which tensors were at which address."""
        self._placed.clear()

    def known(self, sight: Seen, digest: bytes, order: int, *, since: int = -1) -> int | None:
        """The record of these bytes at this address, None if there is none from call number `since`
        on.
        """
        previous = (
            self._placed.get((sight.address, sight.dtype, sight.shape)) if sight.address else None
        )
        if previous is None or previous.digest != digest or previous.touched < since:
            return None
        previous.touched = order
        return previous.record

    def remember(self, sight: Seen, digest: bytes, record: int, order: int) -> SeenTensor | None:
        """Remember the record of these bytes at this address. Returns what `unmoved` needs; None
        for bytes without an address.
        """
        if not sight.address:
            return None
        key = sight.address, sight.dtype, sight.shape
        remembered = self._placed[key] = SeenTensor(record, digest, key, sight.nbytes, order)
        return remembered

    def unmoved(self, previous: SeenTensor, tensor: Any, order: int) -> bool:
        """Whether a variable is still at the same address with the same bytes. If so, it is
        remembered again.
        """
        if (
            tensor.data_ptr() != previous.key[0]
            or host.digest_at(previous.key[0], previous.nbytes) != previous.digest
        ):
            return False
        previous.touched = order
        self._placed[previous.key] = previous
        return True

    def sight(self, tensor: Any, order: int, origin: Origin, since: int = -1) -> tuple[int, str]:
        """(record, edge) of a tensor: an earlier record with the same bytes (edge "content"), or a
        new one (edge "").
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
        """(record, edge) of a parameter that is still at its address with an unchanged sample of
        bytes, else None.
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
        """(record, edge) of a parameter. It is hashed once, and again when a sample of its bytes
        has changed. sure: hash it in any case.
        """
        unchanged = None if sure else self.unchanged(tensor, name)
        if unchanged is not None:
            return unchanged
        sight = look(tensor)
        if sight.why:
            return self.unreadable(sight), ""
        record, edge = self._weight(tensor, sight, name, origin)
        place = int(tensor.data_ptr()) if sight.nbytes else 0
        spots = _spots(place, sight.nbytes) if sight.address else None
        self._parameters[name] = HeldTensor(
            place, spots, b"" if spots is None else spots.tobytes(), (record, "content")
        )
        return record, edge

    def from_file(self, weight: Weight, name: str, origin: Origin) -> tuple[int, str]:
        """(record, edge) of a parameter that no hook shows, as the predictor read it from its
        file.
        """
        dtype, shape, data = weight
        return self._weight(data, Seen(dtype, shape, 0, data.nbytes, data), name, origin)

    def _weight(self, value: Any, sight: Seen, name: str, origin: Origin) -> tuple[int, str]:
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
    """Views of a few bytes of a parameter in place, which any update of all its elements
    changes.
    """
    if nbytes <= 3 * _SPOT:
        return host.bytes_at(place, nbytes)
    return np.ndarray(
        (3, _SPOT), np.uint8, host.memory_at(place, nbytes), strides=((nbytes - _SPOT) // 2, 1)
    )
