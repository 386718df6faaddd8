"""Reads Paddle's weights, `.pdiparams`: tensors concatenated in the order of their names, which are
in the program beside it.

Each: u32 version 0, u64 levels of detail with their bytes, u32 version 0, i32 n, n bytes of
TensorDesc (protobuf), the elements in little endian. Read without Paddle; a `.pdparams` is a pickle
and is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.assembly.builder import Building
from whence.readers.encodings import limits
from whence.readers.formats import paddle_program
from whence.readers.paddle.program import Variable
from whence.readers.paddle.program_desc import description
from whence.readers.source import Place
from whence.records import Lack, Run

LOOKS_LIKE = "Paddle weights, .pdiparams"
ORDER = 31
_LEVELS = 16
_DESCRIPTION_BYTES = 4096
_PROGRAMS = (".pdmodel", ".json")


class Stream(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def sniff(place: Place) -> bool:
    """Whether a tensor of a known dtype begins here."""
    if place.is_folder or place.size < 20:
        return False
    try:
        _stream(Bytes(place.head), 0)
    except UnreadableRun:
        return False
    return True


class Bytes:
    """Bytes by position, of a file or in memory."""

    def __init__(self, data: bytes | np.memmap[tuple[int], np.dtype[np.uint8]]) -> None:
        self.data = data

    def part(self, start: int, nbytes: int) -> bytes:
        return bytes(self.data[start : start + nbytes])


def _streams(data: Bytes, size: int) -> Iterator[Stream]:
    """Returns the tensors of a file, without their elements. Raises UnreadableRun where the next
    one is malformed.
    """
    place = 0
    while place < size:
        stream = _stream(data, place)
        yield stream
        place = stream.start + stream.nbytes


def _stream(data: Bytes, place: int) -> Stream:
    began = place
    try:
        version, levels = struct.unpack("<IQ", data.part(place, 12))
        place += 12
        if version or levels > _LEVELS:
            raise UnreadableRun(
                f"no tensor begins at byte {began}: version {version}, {levels} levels of detail"
            )
        for _ in range(levels):
            (nbytes,) = struct.unpack("<Q", data.part(place, 8))
            place += 8 + nbytes
        version, length = struct.unpack("<Ii", data.part(place, 8))
        place += 8
        if version or not 0 < length <= _DESCRIPTION_BYTES:
            raise UnreadableRun(
                f"no tensor begins at byte {began}: version {version}, a description of {length} "
                "bytes"
            )
        dtype, shape = description(data.part(place, length))
    except (struct.error, ValueError) as error:
        raise UnreadableRun(f"no tensor begins at byte {began}: {error}") from error
    if dtype not in dtypes.DTYPES:
        raise UnreadableRun(
            f"the tensor at byte {began} has a dtype that is not known: {dtype or 'none'}"
        )
    extents = limits.extents(shape, f"the tensor at byte {began}")
    return Stream(
        dtype, extents, place + length, limits.count(extents) * dtypes.named(dtype).itemsize
    )


def open_run(place: Place) -> Run:
    """Returns memory-mapped parameters by layer; tensors behind a damaged one are lost
    and listed.
    """
    mapped = np.memmap(place.path, np.uint8, "r")
    building = Building(place.path, "paddle params")
    streams: list[Stream] = []
    try:
        # keeps the tensors before the first damaged one
        streams.extend(_streams(Bytes(mapped), place.size))
    except UnreadableRun as error:
        if not streams:
            raise
        building.lacks(Lack.DAMAGED, place.path.name, f"read up to tensor {len(streams)}: {error}")
    names = _names(building, place, streams)
    root = building.call("", kind="module")
    layers: dict[str, dict[str, int]] = {}
    for name, stream in zip(names, streams, strict=True):
        scope, _, last = name.rpartition(".")
        layers.setdefault(scope, {})[last] = _tensor(building, mapped, place.size, stream)
    for scope, params in layers.items():
        if scope:
            building.call(scope, kind="module", parent=root, params=params)
        else:
            building.fill(root, params=params)
    return building.run()


def places(place: Place, program: Place) -> dict[str, Stream]:
    """Returns tensor name -> its position in a file, with the names of the program of these
    weights.

    {} when the program has other weights. Raises UnreadableRun, ValueError, OSError.
    """
    parameters = paddle_program.described(program).parameters
    streams = list(_streams(Bytes(np.memmap(place.path, np.uint8, "r")), place.size))
    names = _fitting(parameters, streams)
    return dict(zip(names or (), streams))


def _fitting(parameters: Mapping[str, Variable], streams: list[Stream]) -> list[str] | None:
    """Returns the names of tensors in file order, None when these are other parameters."""
    names = sorted(parameters)
    fits = len(names) == len(streams) and all(
        (parameters[n].dtype, parameters[n].shape) == (s.dtype, s.shape)
        for n, s in zip(names, streams)
    )
    return names if fits else None


def _tensor(
    building: Building, mapped: np.memmap[tuple[int], np.dtype[np.uint8]], size: int, stream: Stream
) -> int:
    if stream.start + stream.nbytes > size:
        available = max(size - stream.start, 0)
        return building.tensor(
            stream.dtype,
            stream.shape,
            why=f"{stream.dtype} {stream.shape} needs {stream.nbytes} bytes, {available} are left",
        )

    def load() -> Array:
        data = mapped[stream.start : stream.start + stream.nbytes]
        if data.size != stream.nbytes:
            raise ElementsMissing(
                f"the file has become shorter: {data.size} of {stream.nbytes} bytes"
            )
        return data.view(dtypes.named(stream.dtype).numpy).reshape(stream.shape)

    return building.tensor(stream.dtype, stream.shape, load)


def _names(building: Building, place: Place, streams: list[Stream]) -> list[str]:
    """Returns the names from the program beside the file; numbers where there is no program, or one
    of other tensors.
    """
    plain = [f"tensor.{i}" for i in range(len(streams))]
    for suffix in _PROGRAMS:
        file_name = f"{place.path.stem}{suffix}"
        if not place.inside(file_name).is_file():
            continue
        try:
            parameters = paddle_program.described(place.within(file_name)).parameters
        except Exception as error:  # noqa: BLE001 - whatever a damaged program does to its parser
            building.note(
                "error",
                f"{file_name} cannot be read ({type(error).__name__}: {error}), so parameters have "
                "numbers for names",
            )
            continue
        names = _fitting(parameters, streams)
        if names is not None:
            return names
        problem = f"is the program of other weights ({len(parameters)} against {len(streams)})"
        building.note("error", f"{file_name} {problem}, so parameters have numbers for names")
    return plain
