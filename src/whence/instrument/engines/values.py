"""Form and memory of the values that models of an engine take, return and compute."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from whence import dtypes
from whence.frameworks import host

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Seen(NamedTuple):
    """The form of a value and its bytes, at an address or in `data`. why: reason why it has no
    bytes to read. owner: keeps the memory at the address alive.
    """

    dtype: str
    shape: tuple[int, ...]
    address: int = 0
    nbytes: int = 0
    data: Bytes | None = None
    why: str = ""
    device: str = "cpu"
    owner: Any = None

    def digest(self) -> bytes:
        """xxh3_128 of the bytes."""
        return (
            host.digest_at(self.address, self.nbytes)
            if self.data is None
            else host.digest(self.data)
        )

    def array(self) -> np.ndarray[Any, Any]:
        """The elements, without a copy."""
        data = host.bytes_at(self.address, self.nbytes) if self.data is None else self.data
        return data.view(dtypes.named(self.dtype).numpy).reshape(self.shape)

    def kept(self) -> Seen:
        """A copy of the value, for when its memory may be overwritten."""
        if self.why or self.data is not None or not self.nbytes:
            return self
        return self._replace(data=host.bytes_at(self.address, self.nbytes).copy(), owner=None)


def of_array(array: np.ndarray[Any, Any]) -> Seen:
    """The value of a numpy array, copied only if it is not in C order."""
    if array.dtype.kind in "OUST":
        return Seen("string", array.shape, why="it holds texts")
    try:
        name = dtypes.of(array).name
    except KeyError:
        return Seen(str(array.dtype), array.shape, why=f"dtype {array.dtype} is not known")
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    address = plain.__array_interface__["data"][0] if plain.nbytes else 0
    data = None if address else np.empty(0, np.uint8)
    return Seen(name, array.shape, address, plain.nbytes, data, owner=plain)
