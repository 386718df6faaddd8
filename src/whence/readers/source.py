"""A path that may hold a dump, looked at once: all readers are asked about the same `Place`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from whence.errors import UnreadableRun
from whence.readers.encodings import limits


class Place:
    """A file or a folder.

    path: as given. head: the first 64 KiB of a file, b"" for a folder. size: of a file in bytes.
    Raises UnreadableRun when nothing that can be read is there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.is_folder = self.path.is_dir()
        self.head, self.size = b"", 0
        self._root = self.path if self.is_folder else self.path.parent
        self._inner_folders: dict[str, bool] = {}
        if self.is_folder:
            return
        if not self.path.exists():
            raise UnreadableRun(f"nothing at {self.path}; check the path")
        if not self.path.is_file():
            raise UnreadableRun(f"{self.path} is neither a file nor a folder")
        try:
            with self.path.open("rb") as file:
                self.head = file.read(limits.HEAD_BYTES)
            self.size = self.path.stat().st_size
        except OSError as error:
            raise UnreadableRun(f"cannot read {self.path}: {error.strerror or error}") from error

    @property
    def suffix(self) -> str:
        """Of a file's name, in small letters, "" for a folder."""
        return "" if self.is_folder else self.path.suffix.lower()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of files and folders directly inside a folder, sorted; () for a file. Raises
        UnreadableRun when it cannot be listed.
        """
        if not self.is_folder:
            return ()
        try:
            with os.scandir(self.path) as entries:
                return tuple(
                    sorted(
                        entry.name
                        for entry in entries
                        if entry.is_dir(follow_symlinks=False) or _is_there(entry)
                    )
                )
        except OSError as error:
            raise UnreadableRun(f"cannot list {self.path}: {error.strerror or error}") from error

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Every regular file below a folder, relative with forward slashes, sorted. Links to
        folders are not followed.

        Raises UnreadableRun beyond two million files.
        """
        return tuple(sorted(self._walk("", 0)))

    def _walk(self, below: str, depth: int) -> Iterator[str]:
        if not self.is_folder or depth > limits.DEPTH:
            return
        count = 0
        try:
            with os.scandir(self.path / below) as entries:
                for entry in entries:
                    name = f"{below}/{entry.name}" if below else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        yield from self._walk(name, depth + 1)
                    elif _is_there(entry) and entry.is_file():
                        count += 1
                        if count > limits.FILES:
                            raise UnreadableRun(
                                f"{self.path} holds more than {limits.FILES} files; give the "
                                "folder of one dump"
                            )
                        yield name
        except OSError as error:
            raise UnreadableRun(
                f"cannot list {self.path / below}: {error.strerror or error}"
            ) from error

    @cached_property
    def _real_root(self) -> Path:
        return self._root.resolve()

    def inside(self, name: str) -> Path:
        """The file that a dump calls `name`, relative to this folder (for a file: to the folder it
        lies in).

        A name is untrusted: one that leads outside, by `..`, as an absolute path or through a link,
        raises UnreadableRun.
        """
        path = self._root / name
        if "\0" in name or not self._holds(name, path):
            raise UnreadableRun(
                f"{self.path} names {name!r}, which is outside of it; it is not followed"
            )
        return path

    def _holds(self, name: str, path: Path) -> bool:
        """Does a name lead to something inside? A folder is followed once for all files in it, a
        file where it is a link.
        """
        folder, last = os.path.split(name)
        if last in ("", ".", "..") or path.is_symlink():
            return path.resolve().is_relative_to(self._real_root)
        if folder not in self._inner_folders:
            inner = (self._root / folder).resolve()
            self._inner_folders[folder] = inner.is_relative_to(self._real_root)
        return self._inner_folders[folder]

    def within(self, name: str) -> Place:
        """The place called `name` in this folder, for a reader that opens others. Raises
        UnreadableRun as `inside` and `Place` do.
        """
        return Place(self.inside(name))


def _is_there(entry: os.DirEntry[str]) -> bool:
    """Is this a file or folder, or a link to one? Opening a pipe would wait for ever; a link to
    itself is nothing.
    """
    try:
        return entry.is_file() or entry.is_dir()
    except OSError:
        return False
