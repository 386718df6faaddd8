"""Streamed safetensors: a shard whose header area is reserved first and filled in last, and the
mapping it is read through.

A shard is `8 bytes: header length N | N bytes: JSON padded with spaces | data`. N is written with
the first bytes, so the place of the data is known at any moment; the JSON is `{}` until the shard
is finished. The official reader refuses a shard that is not finished ("not fully covered"), and
accepts it afterwards: no holes, nothing behind the last tensor. Space between tensors (64-byte
alignment, or bytes whose record was interrupted) is named as a U8 tensor for that reason.
"""

from __future__ import annotations

import errno
import functools
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import orjson
import xxhash

from whence import disk
from whence.disk import Descriptor, OwnFile, write_all
from whence.dtypes import DTYPES
from whence.errors import ElementsMissing
from whence.regular_files import regular

ALIGN = 64
HEADER_BYTES = 512 << 10
SHARD_BYTES = 256 << 20
MAX_HEADER_BYTES = 100_000_000  # the limit of the official reader
DIRECT_BYTES = (
    128 << 10
    # payloads from here on are written from the caller's memory; below, one copy is cheaper than a
    # system call
)
PAGE = 4096
"""Alignment of a payload that is written from the caller's memory: whole pages cost the kernel a
fifth less than parts of them.
"""
STAGING_BYTES = 1 << 20
ROOM_BYTES = 32 << 20
"""Bytes that a shard requests from the kernel beyond those written now."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The safetensors code and shape of a tensor: complex128 has no code and is F64 with a last
    axis of 2.
    """
    return DTYPES[dtype].safetensors, (*shape, 2) if dtype == "complex128" else shape


def tensor_name(record: int, *, increment: bool = False) -> str:
    """Returns the name of a record's elements in a shard."""
    return f"record.{record}.increment" if increment else f"record.{record}"


@functools.lru_cache(maxsize=1 << 10)
def _form(dtype: str, shape: tuple[int, ...]) -> str:
    """An entry of a header up to its offsets."""
    code, stored = stored_as(dtype, shape)
    return f'{{"dtype":"{code}","shape":{list(stored)},"data_offsets":'


_HOLDS = b'{"__metadata__":{"holds":"'
_HOLDS_BYTES = 32
_NO_DIGEST = bytes(16)


def holds(digests: Iterable[bytes | bytearray]) -> str:
    """Returns one hash over those of the tensors of a shard that have bytes, in the order of their
    positions: it binds the shard to the journal that names them.
    """
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


class Header:
    """The JSON header of a shard as it grows. Gaps between tensors are named as padding."""

    def __init__(self) -> None:
        self.end = 0
        self.nbytes = 1 + len(_HOLDS) + _HOLDS_BYTES
        self._entries: list[str] = []
        self._digests = bytearray()

    def add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        start: int,
        nbytes: int,
        digest: bytes,
    ) -> None:
        """Name the tensor at data offset `start` (not before the end of the last one). digest: of
        the record, b"" when not taken.
        """
        if nbytes:
            self._digests += digest or _NO_DIGEST
        self.pad(start)
        self.end = end = start + nbytes
        self._append(f'"{name}":{_form(dtype, shape)}[{start},{end}]}}')

    def pad(self, end: int) -> None:
        """Name what lies between the last tensor and `end`."""
        if end > self.end:
            self._append(
                f'"pad.{self.end}":{{"dtype":"U8","shape":[{end - self.end}],"data_offsets":[{self.end},{end}]}}'  # noqa: E501
            )
            self.end = end

    def _append(self, entry: str) -> None:
        self._entries.append(entry)
        self.nbytes += len(entry) + 1

    def encode(self, reserved: int) -> bytes:
        """The header area of `reserved` bytes. Raises ValueError when the entries do not fit."""
        metadata = (
            [f'"__metadata__":{{"holds":"{holds([self._digests])}"}}'] if self._digests else []
        )
        text = ("{" + ",".join([*metadata, *self._entries]) + "}").encode()
        if len(text) > reserved - 8:
            raise ValueError(f"{len(text)} bytes of header do not fit the {reserved - 8} reserved")
        return (reserved - 8).to_bytes(8, "little") + text.ljust(reserved - 8)


class Room:
    """Preallocates blocks of a growing file: data that waits in memory then fits even when the disk
    becomes full, and the kernel allocates once instead of page by page. The file size stays as it
    is; unused blocks are freed when the file is cut.
    """

    def __init__(self, file: OwnFile) -> None:
        self._file = file
        self.end: float = 0  # infinite where the file system reserves nothing

    def have(self, end: int, ahead: int) -> None:
        """Allocates room up to `end`, and for `ahead` bytes more where the disk has as much. Raises
        OSError where there is none.
        """
        if end <= self.end:
            return
        start = int(self.end)
        for until in (end + ahead, end):
            try:
                with self._file as fd:
                    can = disk.system.reserve(fd, start, until - start)
            except OSError:
                if until == end:
                    raise
            else:
                self.end = until if can else math.inf
                return


class ShardWriter:
    """Appends tensors to one shard file. Small ones wait in a staging buffer until `flush`. Every
    method may raise OSError.
    """

    def __init__(
        self, path: Path, header_bytes: int = HEADER_BYTES, staging: bytearray | None = None
    ) -> None:
        self.path = path
        self.header_bytes = header_bytes
        self.header = Header()
        self.end = 0  # of the data, staged bytes included
        self._flushed_end = 0  # data bytes handed to the kernel
        self._staging = memoryview(staging if staging is not None else bytearray(STAGING_BYTES))
        self.file = OwnFile(path)
        self._room = Room(self.file)
        try:
            # Real bytes, so that the header can still be written at the end when the disk has
            # become full.
            write_all(self.file, Header().encode(header_bytes), 0)
        except OSError:
            self.file.close()
            raise

    @property
    def staged(self) -> int:
        """Bytes not yet handed to the kernel."""
        return self.end - self._flushed_end

    @property
    def crowded(self) -> bool:
        """Whether the header area is 90 % full."""
        return self.header.nbytes * 10 > (self.header_bytes - 8) * 9

    def put(self, data: Bytes, nbytes: int) -> int:
        """Append the bytes of a contiguous array at the next aligned offset and return it. They are
        named by `name` afterwards.
        """
        if nbytes >= DIRECT_BYTES:
            start = (self.end + PAGE - 1) & -PAGE
            self.flush()
            self._room.have(self.header_bytes + start + nbytes, ROOM_BYTES)
            write_all(self.file, data.data, self.header_bytes + start)
            # The gap before it has to be real bytes too, but pwrite behind the end of a file fills
            # it with zeros.
            self._flushed_end = self.end = start + nbytes
            return start
        start = (self.end + ALIGN - 1) & -ALIGN
        if self.header_bytes + start + nbytes > self._room.end:
            self._room.have(self.header_bytes + start + nbytes, len(self._staging))
        place = start - self._flushed_end
        if place + nbytes > len(self._staging):
            self.flush()
            place = start - self._flushed_end
        staging = self._staging
        if place != self.end - self._flushed_end:
            staging[self.end - self._flushed_end : place] = bytes(start - self.end)
        if nbytes:
            staging[place : place + nbytes] = data.data
        self.end = start + nbytes
        return start

    def name(
        self,
        record: int,
        dtype: str,
        shape: tuple[int, ...],
        start: int,
        nbytes: int,
        digest: bytes,
        *,
        increment: bool = False,
    ) -> None:
        """Put a tensor that was `put` into the header."""
        name = tensor_name(record, increment=increment)
        self.header.add(name, dtype, shape, start, nbytes, digest)

    def flush(self) -> None:
        """Hand the staged bytes to the kernel."""
        if self.end > self._flushed_end:
            write_all(
                self.file,
                self._staging[: self.end - self._flushed_end],
                self.header_bytes + self._flushed_end,
            )
            self._flushed_end = self.end

    def cut(self) -> None:
        """Cuts off what was written after the last tensor that was `put`."""
        with self.file as fd:
            disk.system.cut(fd, self.header_bytes + self._flushed_end)
        self._room = Room(self.file)

    def finish(self) -> None:
        """Make the file a valid safetensors file and close it."""
        try:
            self.flush()
            self.header.pad(self.end)
            finish_file(self.file, self.header, self.header_bytes)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes without finishing; `recover` can still finish the file."""
        self.file.close()


def finish_file(file: Descriptor, header: Header, reserved: int) -> None:
    """Cut the file behind the last named tensor and write its header. Raises OSError; ValueError
    when the header does not fit.
    """
    text = header.encode(reserved)
    with file as fd:
        disk.system.cut(fd, reserved + header.end)
    write_all(file, text, 0)


class Tensor(NamedTuple):
    """One entry of a safetensors header; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def parse_header(data: Bytes) -> list[Tensor]:
    """Entries of a safetensors file given as bytes. Untrusted: raises ValueError for anything that
    does not lie inside the file.
    """
    if data.size < 8:
        raise ValueError(f"{data.size} bytes are too few for a safetensors file")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if not 2 <= length <= min(data.size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {data.size}")
    fields = orjson.loads(data[8 : 8 + length].tobytes())
    if not isinstance(fields, dict):
        raise ValueError("the header is not a JSON object")
    tensors = []
    for name, entry in fields.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"entry {name!r} is not an object")
        dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if (
            not isinstance(dtype, str)
            or not _naturals(shape)
            or not _naturals(span)
            or len(span) != 2
        ):
            raise ValueError(f"entry {name!r} is malformed")
        if not span[0] <= span[1] <= data.size - 8 - length:
            raise ValueError(f"entry {name!r} lies outside the file")
        tensors.append(Tensor(name, dtype, tuple(shape), 8 + length + span[0], span[1] - span[0]))
    return tensors


def _naturals(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def map_file(path: Path | str) -> Bytes:
    """A regular file on a disk as read-only memory-mapped bytes. Raises OSError, also where it is a
    link: that may lead out of the run. Never blocks on a pipe, never opens a device.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = disk.system.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path} is a link, which is not followed") from error
        raise
    try:
        status = os.fstat(fd)
        if not regular(status):
            raise OSError(f"{path} is not a regular file")
        if status.st_size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(disk.system.map(fd, status.st_size), np.uint8)
    finally:
        os.close(fd)


def forget(data: Bytes, start: int, stop: int) -> None:
    """Frees the memory of bytes of a mapped file that were read and are not needed again."""
    page = mmap.ALLOCATIONGRANULARITY
    start, stop = (start + page - 1) // page * page, stop // page * page
    base: Any = data.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if isinstance(mapped, mmap.mmap) and start < stop and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)


class ReadShard(ABC):
    """A shard that is read, wherever its bytes lie."""

    path: PurePath

    @abstractmethod
    def data(self, offset: int, nbytes: int) -> Bytes:
        """Bytes [offset, offset + nbytes) of the data area, read-only. Raises ElementsMissing with
        file, wanted and found bytes.
        """

    @abstractmethod
    def available(self) -> int:
        """Returns the bytes of the data area, 0 where the file cannot be read."""

    def require(self, stop: int) -> None:
        """Raises ElementsMissing where the data area ends before `stop`, or cannot be read."""
        self.data(0, stop)

    def lost(self, offsets: Any, ends: Any) -> int:
        """Of how many places the bytes cannot be had where `require` fails."""
        del offsets
        return int((ends > self.available()).sum())

    def forget(self) -> None:  # noqa: B027 - nothing to do is right for a cache with a limit
        """Frees the memory of bytes that were read, unless that has a limit of its own."""


class Shard(ReadShard):
    """Mapped at first use, and again when it has grown since (a run that is being written)."""

    path: Path

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes: Bytes | None = None
        self._older: list[Bytes] = []  # addresses handed out by `address` stay good
        self._data_at = 0
        self._address = 0

    def data(self, offset: int, nbytes: int) -> Bytes:
        mapped = self._bytes
        if mapped is None or self._data_at + offset + nbytes > mapped.size:
            mapped = self._map()
        start = self._data_at + offset
        if offset < 0 or nbytes < 0 or start + nbytes > mapped.size:
            raise ElementsMissing(
                f"{self.path}: wanted bytes {start} to {start + nbytes}, the file has "
                f"{mapped.size}; it was cut off, "
                "for instance by an interrupted copy: copy the run again"
            )
        return mapped[start : start + nbytes]

    def forget(self) -> None:
        if self._bytes is not None:
            forget(self._bytes, 0, self._bytes.size)

    def available(self) -> int:
        try:
            return int(self._map().size) - self._data_at
        except ElementsMissing:
            return 0

    def said_to_hold(self) -> str:
        """What `holds` gave as the shard was finished, "" where it does not say. Raises
        ElementsMissing.
        """
        mapped = self._bytes if self._bytes is not None else self._map()
        start = 8 + len(_HOLDS)
        if mapped[8:start].tobytes() != _HOLDS:
            return ""
        return mapped[start : start + _HOLDS_BYTES].tobytes().decode("ascii", "replace")

    def offset(self) -> int:
        """Where the data area starts in the file."""
        self.data(0, 0)
        return self._data_at

    def address(self, offset: int, nbytes: int) -> int:
        """Where bytes [offset, offset + nbytes) lie in memory, for as long as this object lives.
        Raises as `data` does.
        """
        self.data(offset, nbytes)
        return self._address + self._data_at + offset

    def _map(self) -> Bytes:
        try:
            mapped = map_file(self.path)
        except OSError as error:
            raise ElementsMissing(f"cannot read {self.path}: {error.strerror or error}") from error
        if mapped.size < 8:
            raise ElementsMissing(
                f"{self.path}: wanted a header, the file has {mapped.size} bytes; it was cut off"
            )
        length = int.from_bytes(mapped[:8].tobytes(), "little")
        if length > min(mapped.size - 8, MAX_HEADER_BYTES):
            raise ElementsMissing(
                f"{self.path}: wanted a header of {length} bytes, the file has {mapped.size}; it "
                "was cut off"
            )
        if self._bytes is not None:
            self._older.append(self._bytes)
        self._bytes, self._data_at = mapped, 8 + length
        self._address = int(mapped.__array_interface__["data"][0])
        return mapped
