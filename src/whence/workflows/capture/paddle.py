"""Readers' functions that the capture of Paddle uses: names, programs, and weights in the user's
file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.errors import WhenceError
from whence.readers import Place
from whence.readers.formats import paddle_params, paddle_program
from whence.readers.paddle.names import plain_name, plain_type
from whence.records import External
from whence.store.shards import Bytes, map_file

if TYPE_CHECKING:
    from whence.instrument.paddle.saved_programs import NameTable
    from whence.instrument.paddle.tensor_identity import FindExternal, Weight


def reading() -> tuple[NameTable, Callable[[str, str], FindExternal]]:
    """The readers' functions for Paddle: names, programs, and the place of a program's parameters
    in its file of weights.
    """
    from whence.instrument.paddle.saved_programs import NameTable

    return NameTable(plain_name, plain_type, _described, _of_file), _weights


def _described(file: str) -> Any:
    return paddle_program.described(Place(Path(file)))


def _of_file(program: str, weights: str, names: Collection[str]) -> dict[str, Weight]:
    """Parameters of a program by name, memory-mapped from its file of weights; those that the file
    lacks are left out.
    """
    data = map_file(weights)
    streams = paddle_params.places(Place(Path(weights)), Place(Path(program)))
    return {
        name: (s.dtype, s.shape, data[s.start : s.start + s.nbytes])
        for name, s in streams.items()
        if name in names
    }


def _weights(program: str, weights: str) -> Callable[[str, bytes, str, int], External | None]:
    """A function that finds parameters of a program by name in its file of weights, and returns the
    place of their bytes when these are equal.
    """
    places: dict[str, paddle_params.Stream] = {}
    data: Bytes | None = None
    try:
        places = paddle_params.places(Place(Path(weights)), Place(Path(program)))
        data = map_file(weights)
    except (WhenceError, OSError, ValueError):
        pass  # then parameters are copied

    def find(name: str, digest: bytes, dtype: str, nbytes: int) -> External | None:
        from whence.frameworks import host

        stream = places.get(name)
        if data is None or stream is None or (stream.dtype, stream.nbytes) != (dtype, nbytes):
            return None
        if host.digest(data[stream.start : stream.start + nbytes]) != digest:
            return None
        return External(str(Path(weights).resolve()), stream.start, nbytes)

    return find
