"""Object stores by URL (`s3://bucket/run`), through fsspec: each request tried again where the
connection is cut, and then told in a sentence.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from whence import disk, extras
from whence.errors import MissingDependency, UnreadableRun

T = TypeVar("T")
TRIES = 4
_NOT_THERE = (404, 410)  # of HTTP
_PART = 64 << 20
AT_ONCE = 16  # small requests that wait side by side
FIRST_WAIT_S = 0.2
_FINAL = (PermissionError, NotImplementedError, IsADirectoryError)


class Failed(Exception):
    """A request failed finally. `str` says what was tried, and how often."""


class Absent(Failed):
    """There is no such file."""


class Place:
    """A folder of an object store. Raises MissingDependency where fsspec, or the package for this
    kind of URL, is not installed; UnreadableRun for a URL that nothing understands.
    """

    def __init__(self, url: str) -> None:
        core = extras.needed("fsspec", f"a run at {url}").core
        self.url = url.rstrip("/")
        try:
            self._files, self._root = core.url_to_fs(self.url)
        except ImportError as error:
            raise MissingDependency(
                f"cannot open {url}: {error}; install what it names with pip"
            ) from error
        except ValueError as error:
            raise UnreadableRun(f"cannot open {url}: {error}; check its scheme") from error
        self._root = self._root.rstrip("/")

    def names(self, below: str = "") -> dict[str, int | None]:
        """Returns files and folders directly in a folder: name -> bytes, None for a folder. Raises
        Failed.
        """

        def listed() -> list[dict[str, Any]]:
            self._files.invalidate_cache()
            found: list[dict[str, Any]] = self._files.ls(self._path(below), detail=True)
            return found

        out: dict[str, int | None] = {}
        without_size: list[str] = []  # a page of links says none
        for entry in self._tried(listed, f"list {self.url}/{below}"):
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if not name or name in (".", "..") or "?" in name:
                continue
            is_folder, size = entry["type"] == "directory", entry.get("size")
            if not is_folder and size is None:
                without_size.append(name)
            out[name] = None if is_folder else int(size or 0)
        sizes = self.together(
            [functools.partial(self.size, _joined(below, name)) for name in without_size]
        )
        return out | dict(zip(without_size, sizes, strict=True))

    def together(self, requests: Sequence[Callable[[], T]]) -> list[T]:
        """Runs requests to the store concurrently and returns their answers. Raises the exception
        of one that fails.
        """
        if len(requests) < 2:
            return [request() for request in requests]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(AT_ONCE, len(requests))) as threads:
            return list(threads.map(lambda request: request(), requests))

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Returns a file, or bytes [start, stop) of it, in one request. Raises Failed."""
        what = f"read {self.url}/{name}" + (f" bytes {start} to {stop}" if stop else "")
        data = self._tried(
            lambda: self._files.cat_file(self._path(name), start=start, end=stop), what
        )
        return bytes(data)

    def fetch(self, name: str, target: Path, size: int) -> None:
        """Copies a file of known size to this machine, in parts. Raises Failed, also when another
        number of bytes arrives, as from a server without range requests.
        """
        with disk.whole_file(target) as file:
            for start in range(0, size, _PART):
                stop = min(size, start + _PART)
                part = self.read(name, start, stop)
                if len(part) != stop - start:
                    raise Failed(
                        f"cannot read {self.url}/{name} bytes {start} to {stop}: {len(part)} bytes "
                        "came; is it written just now, or does the server answer no ranges?"
                    )
                file.write(part)

    def size(self, name: str) -> int:
        """Bytes of a file. Raises Failed."""
        return int(
            self._tried(
                lambda: self._files.info(self._path(name))["size"], f"look at {self.url}/{name}"
            )
        )

    def exists(self, name: str = "") -> bool:
        """Whether there is such a file or folder. Raises Failed."""
        return bool(
            self._tried(lambda: self._files.exists(self._path(name)), f"look at {self.url}/{name}")
        )

    def put(self, local: str, name: str) -> None:
        """Write a local file, in parts where the store takes these. Raises Failed."""
        self._write(name, lambda path: self._files.put_file(local, path))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file. Raises Failed."""
        self._write(name, lambda path: self._files.pipe_file(path, data))

    def _write(self, name: str, write: Callable[[str], object]) -> None:
        path = self._path(name)

        def upload() -> None:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            write(path)

        self._tried(upload, f"write {self.url}/{name}")

    def delete(self) -> None:
        """Delete the folder with all that is in it. Raises Failed."""
        self._tried(lambda: self._files.rm(self._root, recursive=True), f"delete {self.url}")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _tried(self, work: Callable[[], T], what: str) -> T:
        for attempt in range(TRIES):
            try:
                return work()
            except FileNotFoundError as error:
                if not _is_cut(error):
                    raise Absent(f"cannot {what}: it is not there ({_words(error)})") from error
                if attempt + 1 == TRIES:
                    raise _given_up(what, error.__cause__ or error) from error
            except _FINAL as error:
                raise Failed(f"cannot {what}: {_words(error)}") from error
            except Exception as error:  # each kind of store has errors of its own for a cut line
                if attempt + 1 == TRIES:
                    raise _given_up(what, error) from error
            time.sleep(FIRST_WAIT_S * 2**attempt)
        raise AssertionError("unreachable")


def _given_up(what: str, error: BaseException) -> Failed:
    return Failed(
        f"cannot {what}: {_words(error)} ({TRIES} tries); check the connection and try again"
    )


def _is_cut(error: FileNotFoundError) -> bool:
    """Whether a "file not found" is in fact a failed connection: fsspec reports both alike for
    HTTP.
    """
    cause = error.__cause__
    aiohttp = sys.modules.get("aiohttp")
    if aiohttp is not None and isinstance(cause, aiohttp.ClientError):
        return getattr(cause, "status", 0) not in _NOT_THERE
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _words(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
