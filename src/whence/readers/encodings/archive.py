"""Reads bytes in files and zip archives: memory-mapped or read where they are stored as is,
decompressed within limits where they are not.
"""

from __future__ import annotations

import io
import mmap
import os
import zipfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.encodings import limits

Bytes = npt.NDArray[np.uint8]
MAPPED_FROM = 1 << 16
"""Size in bytes from which a part of a file is mapped. Smaller parts are read: that is faster than
a mapping, which also keeps the file open.
"""


def words(data: Bytes, word: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """Returns bytes as elements; copies only where an archive stores them unaligned."""
    return np.require(data.view(word), requirements="A")


def bytes_of(path: Path, start: int, nbytes: int) -> Bytes:
    """Returns bytes of a file, read-only, memory-mapped from `MAPPED_FROM` on. Raises OSError, and
    ValueError where the file has fewer.
    """
    if not nbytes:
        return np.empty(0, np.uint8)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        if nbytes >= MAPPED_FROM:
            before = start % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(
                handle, before + nbytes, access=mmap.ACCESS_READ, offset=start - before
            )
            return np.frombuffer(mapped, np.uint8, nbytes, before)
        os.lseek(handle, start, os.SEEK_SET)
        data = os.read(handle, nbytes)
    finally:
        os.close(handle)
    if len(data) != nbytes:
        raise ValueError(f"it ends after {len(data)} of {nbytes} bytes from byte {start} on")
    return np.frombuffer(data, np.uint8)


def unpacked(data: Bytes, name: str, bits: int, count: int) -> npt.NDArray[Any]:
    """Unpacks elements of less than a byte to the narrowest available type; the first is in the
    lowest bits. name: of their type: "uint.." is unsigned, "float.." is one of ml_dtypes.
    """
    flags = np.unpackbits(data, bitorder="little")[: count * bits].reshape(count, bits)
    codes: npt.NDArray[Any] = (flags << np.arange(bits, dtype=np.uint8)).sum(1, np.uint8)
    if name.startswith("float"):
        codes = codes.view(getattr(ml_dtypes, f"{name}fn"))
        return codes.astype(np.float32)
    sign = 0 if name.startswith("u") else 1 << (bits - 1)
    signed: npt.NDArray[Any] = (codes.astype(np.int16) ^ sign) - sign
    return signed


_LOOK = 4096  # elements of each end


def ends(load: Callable[[], npt.NDArray[Any]]) -> Hashable | None:
    """Returns a stand-in for a tensor that is equal for equal tensors: dtype, shape and both ends
    of its elements; None for a single element, and where they cannot be read.
    """
    try:
        array = load()
    except Exception:  # noqa: BLE001 - a damaged tensor tells nothing
        return None
    flat = array.reshape(-1)
    ends = flat[:_LOOK].tobytes(), flat[-_LOOK:].tobytes()
    return (str(array.dtype), array.shape, *ends) if array.size > 1 else None


def all_read(rest: Bytes, name: str, where: str = "behind") -> None:
    """Raises UnreadableRun where a reader leaves these bytes and they are not zeros and blanks, as
    where several things were saved into one file.
    """
    if rest.size and bytes(rest).strip(b"\0 \t\r\n"):
        raise UnreadableRun(
            f"{name} has {rest.size} bytes {where} what is read of it; save each thing into a file "
            "of its own"
        )


_ZIP_END, _ZIP_TAIL = b"PK\5\6", (1 << 16) + 22
"""How the last part of a zip archive begins, and the most bytes that it has."""


class File:
    """A file, or bytes, read in parts. name: in errors. Raises UnreadableRun when there is no such
    file.

    written: modification time in nanoseconds.
    """

    def __init__(self, source: Path | bytes, name: str = "") -> None:
        self.source, self.name = (
            source,
            name or (str(source) if isinstance(source, Path) else "the data"),
        )
        try:
            if isinstance(source, bytes):
                self.size, self.modified_ns = len(source), 0
            else:
                about = source.stat()
                self.size, self.modified_ns = about.st_size, about.st_mtime_ns
        except OSError as error:
            raise UnreadableRun(f"cannot read {self.name}: {error.strerror or error}") from error

    def part(self, start: int, nbytes: int) -> Bytes:
        """Returns bytes of the file, as `bytes_of` does. Raises ElementsMissing when there are
        fewer.
        """
        if start < 0 or nbytes < 0 or start + nbytes > self.size:
            raise ElementsMissing(
                f"{self.name} has {self.size} bytes; {nbytes} from byte {start} on are wanted"
            )
        if not nbytes:
            return np.empty(0, np.uint8)
        if isinstance(self.source, bytes):
            return np.frombuffer(self.source, np.uint8, nbytes, start)
        try:
            return bytes_of(self.source, start, nbytes)
        except (OSError, ValueError) as error:
            raise ElementsMissing(f"cannot read {self.name}: {error}") from error

    def head(self, nbytes: int) -> bytes:
        """Returns the first bytes, fewer where the file ends."""
        return bytes(self.part(0, min(nbytes, self.size)))

    def all_read(self, start: int, end: int) -> None:
        """Raises UnreadableRun where something is in front of `start` or behind `end`."""
        all_read(self.part(0, start), self.name, "in front of")
        all_read(self.part(end, self.size - end), self.name)

    def entries(self) -> dict[str, zipfile.ZipInfo]:
        """Returns the entries of a zip archive by name, in its order. Raises UnreadableRun, also
        where the file holds more than the archive.
        """
        try:
            with self._open() as file, zipfile.ZipFile(file) as archive:
                entries = {info.filename: info for info in archive.infolist()}
        except Exception as error:  # whatever a damaged directory does to zipfile
            raise UnreadableRun(f"{self.name} is a damaged zip archive: {error}") from error
        tail = bytes(self.part(max(0, self.size - _ZIP_TAIL), min(self.size, _ZIP_TAIL)))
        end = tail.rfind(_ZIP_END)
        comment = int.from_bytes(tail[end + 20 : end + 22], "little")
        self.all_read(
            min((info.header_offset for info in entries.values()), default=0),
            min(self.size, self.size - len(tail) + end + 22 + comment),
        )
        return entries

    def entry(self, info: zipfile.ZipInfo, nbytes: int | None = None) -> Bytes:
        """Returns the bytes of one entry, or its first `nbytes`: mapped where it is stored
        uncompressed, else decompressed. Raises ElementsMissing.
        """
        label = f"{self.name}: {info.filename}"
        if info.flag_bits & 1:
            raise ElementsMissing(f"{label} is encrypted")
        if info.compress_type == zipfile.ZIP_STORED:
            if info.compress_size != info.file_size:
                raise ElementsMissing(f"{label} is stored with two sizes")
            return self.part(
                self._start(info, label),
                info.file_size if nbytes is None else min(nbytes, info.file_size),
            )
        try:
            if nbytes is None:
                limits.unpacked(info.file_size, min(info.compress_size, self.size), label)
            with self._open() as file:
                file.seek(self._start(info, label))
                # zipfile.ZipFile would read the whole directory again for each of its entries.
                with zipfile.ZipExtFile(file, "r", info) as packed:
                    return np.frombuffer(
                        packed.read(info.file_size if nbytes is None else nbytes), np.uint8
                    )
        except Exception as error:  # a damaged entry costs what is in it
            raise ElementsMissing(f"{label} cannot be unpacked: {error}") from error

    def _start(self, info: zipfile.ZipInfo, label: str) -> int:
        """Returns where the bytes of an entry begin, behind its own header. Raises
        ElementsMissing.
        """
        head = bytes(self.part(info.header_offset, 30))
        if head[:4] != b"PK\x03\x04":
            raise ElementsMissing(f"{label} is not where the archive says")
        return (
            info.header_offset
            + 30
            + int.from_bytes(head[26:28], "little")
            + int.from_bytes(head[28:30], "little")
        )

    def _open(self) -> IO[bytes]:
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")
