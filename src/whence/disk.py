"""Every call to the operating system by which files of whence come about, in one place.

`system` is what asks the operating system; `tests/faulty_disk.py` puts another one there, whose
n-th call fails. The functions below are how files are written: all of one or nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import mmap
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

Parts = Iterable[str | bytes | memoryview]

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MAP_FIXED = 0x10
HIGH = 200
"""Descriptors that stay open in a program lie from here on, out of the way of its own."""


class System:
    """The calls of the operating system. Each raises OSError."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        # Linux has it
        self._fallocate = getattr(library, "fallocate", None)
        self._mmap = library.mmap
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)

    def open(self, path: str | Path, flags: int, mode: int = 0o666) -> int:
        """A descriptor that is not inherited."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at an offset; how many bytes were taken."""
        return os.pwrite(fd, data, offset)

    def append(self, fd: int, data: bytes) -> int:
        """Write at the end of a file that was opened so; how many bytes were taken."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Wait until what was written is on the medium."""
        os.fsync(fd)

    def cut(self, fd: int, size: int) -> None:
        """Give a file this size; what was reserved behind it goes."""
        os.ftruncate(fd, size)

    def reserve(self, fd: int, start: int, nbytes: int) -> bool:
        """Have blocks for bytes from `start` on; the size of the file stays. False where the file
        system cannot; raises OSError where there is no room.
        """
        if self._fallocate is None:
            return False
        long = ctypes.c_int64
        if self._fallocate(fd, _KEEP_SIZE, long(start), long(nbytes)) == 0:
            return True
        code = ctypes.get_errno()
        if code in _NO_ROOM:
            raise OSError(code, os.strerror(code))
        return False

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in place of what has it."""
        os.replace(old, new)  # noqa: PTH105 - one call of the system each

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        """Make a folder, which must not be there."""
        os.mkdir(path, mode)  # noqa: PTH102 - one call of the system each

    def map(self, fd: int, nbytes: int) -> mmap.mmap:
        """The first bytes of a file, read-only. It holds no descriptor, as one that Python maps
        does: a program that closes all would have its own file closed with the mapping.
        """
        import numpy as np

        mapped = mmap.mmap(-1, nbytes, prot=mmap.PROT_READ)
        place = np.frombuffer(mapped, np.uint8).ctypes.data
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if self._mmap(place, nbytes, mmap.PROT_READ, flags, fd, 0) != place:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return mapped

    def raise_number(self, fd: int) -> int:
        """Another descriptor of the same file, from `HIGH` on, not inherited. Raises OSError where
        the limit of the process lies below.
        """
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH)


system = System()


class OwnFile:
    """A new file that is written while a program runs in the same process. The program may close
    every descriptor, and give the number to a file of its own: which file a number stands for is
    looked at before each use, and what is lost is opened again by its path.

    No descriptor stays open where the limit of the process lies below `HIGH`. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._process = path, os.getpid()
        self._held = self._used = -1
        fd = system.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        self._identity = _identity(fd)
        if self._hold(fd) == fd:
            os.close(fd)

    def __enter__(self) -> int:
        """A descriptor of this very file, until the block ends; not for two threads at once. Raises
        OSError where it cannot be had: the file was deleted, or is that of the process that forked
        this one.
        """
        if os.getpid() != self._process:
            raise OSError(errno.EPERM, "the file is that of the process that forked this one")
        try:
            status = os.fstat(self._held)  # -1 is none
        except OSError:
            status = None
        if status is None or (status.st_dev, status.st_ino) != self._identity:
            self._held = -1
            self._used = self._hold(self._again())
            status = os.fstat(self._used)
        else:
            self._used = self._held
        if status.st_nlink == 0:
            self.__exit__()
            raise FileNotFoundError(errno.ENOENT, "a file was deleted while it was written")
        return self._used

    def __exit__(self, *_: object) -> None:
        if self._used != self._held:
            os.close(self._used)

    def close(self) -> None:
        """Close what is open of it. Idempotent."""
        if self._held >= 0 and _identity(self._held) == self._identity:
            os.close(self._held)
        self._held = -1

    def _again(self) -> int:
        fd = system.open(self._path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        if _identity(fd) != self._identity:
            os.close(fd)
            raise OSError(errno.ESTALE, "another file lies where a file of the run did")
        return fd

    def _hold(self, fd: int) -> int:
        """Keep the file open, out of the way, in place of this descriptor, which is returned where
        there is no room there.
        """
        try:
            self._held = system.raise_number(fd)
        except OSError:
            return fd
        os.close(fd)
        return self._held


def _identity(fd: int) -> tuple[int, int] | None:
    """Device and inode of an open file, None where none is open."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


Descriptor = contextlib.AbstractContextManager[int]
"""A descriptor of a file while it is used: an `OwnFile`, or `contextlib.nullcontext(fd)`."""


def write_all(file: Descriptor, data: memoryview | bytes | bytearray, offset: int) -> None:
    """Write all of `data` at an offset. A short write is continued, so that a full disk shows its
    errno; one that fails is tried once more, which is harmless: a signal, a network that was away
    or a file that somebody deletes in the same moment loses nothing.
    """
    view, nbytes = memoryview(data), len(data)
    written_bytes = 0
    failed = False
    while written_bytes < nbytes:
        try:
            with file as fd:
                taken = system.write(fd, view[written_bytes:], offset + written_bytes)
            if taken <= 0:
                raise OSError(errno.EIO, "the medium takes nothing")
        except OSError:
            if failed:
                raise
            failed = True
        else:
            written_bytes += taken


def append_line(path: Path, text: bytes) -> None:
    """Add to a private file in one write, so that lines of several threads and processes do not
    mix. Raises OSError.
    """
    fd = system.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        system.append(fd, text)
    finally:
        os.close(fd)


def _beside(path: Path) -> Path:
    """The name under which this thread writes a file before it stands at `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")


class _Raw(io.RawIOBase):
    """A file that is written from its start on, by `write_all`."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd, self._end = fd, 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # a buffer, says io.RawIOBase
        write_all(contextlib.nullcontext(self._fd), view, self._end)
        self._end += len(view)
        return len(view)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


@contextlib.contextmanager
def scratch_file(folder: Path) -> Iterator[IO[bytes]]:
    """A file in `folder` that has no name, to write and, with `os.pread`, to read. Raises
    OSError.
    """
    path = _beside(folder / "scratch")
    path.unlink(missing_ok=True)
    fd = system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    with _buffered(_Raw(fd)) as file:
        yield file


@contextlib.contextmanager
def _buffered(raw: _Raw) -> Iterator[IO[bytes]]:
    """A file that is closed at the end; after a failure nothing more is written to it."""
    file = io.BufferedWriter(raw, 1 << 20)
    try:
        yield file
        file.flush()
    finally:
        raw.close()
        with contextlib.suppress(OSError, ValueError):
            file.close()


@contextlib.contextmanager
def whole_file(
    path: str | Path, *, mode: int = 0o666, through_link: bool = False
) -> Iterator[IO[bytes]]:
    """A file to write from start to end, which stands at `path` when the block ends, in place of
    what was there; where the block or the medium fails, what was there stays and nothing is left
    beside it. Raises OSError.

    through_link: a user named the path, so a link is followed, and what is not a file, such as a
    pipe or /dev/stdout, is written as it comes. Otherwise it is replaced.
    """
    final = Path(os.path.realpath(path) if through_link else path)
    with contextlib.suppress(FileNotFoundError):
        kind = final.lstat().st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if through_link and not stat.S_ISREG(kind):
            with final.open("wb", buffering=0) as special, io.BufferedWriter(special) as file:
                yield file
            return
        if stat.S_ISREG(kind):
            mode = stat.S_IMODE(kind)
    fresh = _beside(final)
    try:
        with _written(fresh, mode) as file:
            yield file
        system.rename(fresh, final)
    except BaseException:  # Ctrl-C too leaves nothing beside the file
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


@contextlib.contextmanager
def _written(path: Path, mode: int) -> Iterator[IO[bytes]]:
    """A fresh file to write."""
    try:
        fd = system.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with _buffered(_Raw(fd)) as file:
            yield file
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_file(
    path: str | Path, parts: str | bytes | Parts, *, mode: int = 0o666, through_link: bool = False
) -> None:
    """Write a file, all of it or nothing (`whole_file`). Text becomes UTF-8. Raises OSError."""
    with whole_file(path, mode=mode, through_link=through_link) as file:
        _fill(file, parts)


def _fill(file: IO[bytes], parts: str | bytes | Parts) -> None:
    for piece in [parts] if isinstance(parts, str | bytes) else parts:
        file.write(piece.encode() if isinstance(piece, str) else piece)


def write_together(folder: Path, files: Mapping[str, str | bytes | Parts]) -> None:
    """Write files that belong together: none of them changes before all are written, and the last
    one, without which nobody takes them for whole, is away while the others change. Raises OSError.
    """
    ready = {name: _beside(folder / name) for name in files}
    *_, mark = files
    try:
        for name, parts in files.items():
            with _written(ready[name], 0o666) as file:
                _fill(file, parts)
        (folder / mark).unlink(missing_ok=True)
        for name, fresh in ready.items():
            system.rename(fresh, folder / name)
    except BaseException:  # Ctrl-C too leaves nothing beside the file
        for fresh in ready.values():
            with contextlib.suppress(OSError):
                fresh.unlink()
        raise


def make_folders(path: Path) -> None:
    """Make a folder and those above it, as far as they are missing. Raises OSError."""
    if not path.is_dir():
        if path.parent != path:
            make_folders(path.parent)
        try:
            system.make_folder(path)
        except FileExistsError:
            if not path.is_dir():
                raise


@contextlib.contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which stands at `path` when the block ends, in place of the folder there;
    where the block fails, that one stays. Raises OSError.
    """
    fresh = _beside(path)
    shutil.rmtree(fresh, ignore_errors=True)
    make_folders(path.parent)
    try:
        system.make_folder(fresh)
        yield fresh
        if path.exists():
            shutil.rmtree(path)
        system.rename(fresh, path)
    except BaseException:  # Ctrl-C too leaves nothing beside the file
        shutil.rmtree(fresh, ignore_errors=True)
        raise
