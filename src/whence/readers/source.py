"""A path that may hold a dump, read once: all readers examine the same `Place`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from whence.errors import UnreadableRun
from whence.readers.encodings import limits
from whence.readers.encodings.raw_form import Forms
from whence.records import Run
from whence.regular_files import is_regular


def suffix_of(name: str) -> str:
    """Returns the suffix of a file's name, with its dot, in lower case."""
    last = name.rpartition("/")[2]
    return last[last.rfind(".") :].lower() if "." in last else ""


_OF_RUN = re.compile(r"(|.*/)rank\d{5}-[^/]+/(?:index|journal|process|shard|status)[^/]*$")
"""A file of a run of whence, behind the folder of the run."""


class Place:
    """A file or a folder.

    path: as given. head: the first 64 KiB of a file, b"" for a folder. size: of a file in bytes.
    hidden: files of a folder, relative, that other readers have read. asked_for: files, relative,
    whose paths a reader requested. left: those of them that hold no tensor of their own. forms:
    dtypes and shapes of raw bytes, by name. Raises UnreadableRun when there is no readable file or
    folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        hidden: frozenset[str] = frozenset(),
        forms: Forms = MappingProxyType({}),
    ) -> None:
        self.path, self.forms = Path(path), forms
        self.is_folder = self.path.is_dir()
        self.head, self.size = b"", 0
        self.hidden, self.asked_for, self.left = hidden, set[str](), set[str]()
        self._above: tuple[Place, str] | None = None
        self._root = self.path if self.is_folder else self.path.parent
        self._inner_folders: dict[str, bool] = {}
        self._not_followed = set[str]()
        if self.is_folder:
            return
        if not self.path.exists():
            raise UnreadableRun(f"nothing at {self.path}; check the path")
        if not is_regular(self.path):
            raise UnreadableRun(f"{self.path} is neither a file nor a folder on a disk")
        try:
            with self.path.open("rb") as file:
                self.head = file.read(limits.HEAD_BYTES)
            self.size = self.path.stat().st_size
        except OSError as error:
            raise UnreadableRun(f"cannot read {self.path}: {error.strerror or error}") from error

    @property
    def suffix(self) -> str:
        """The suffix of a file's name, in lower case, "" for a folder."""
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
                        if entry.name not in self.hidden
                        and (entry.is_dir(follow_symlinks=False) or _is_there(entry))
                    )
                )
        except OSError as error:
            raise UnreadableRun(f"cannot list {self.path}: {error.strerror or error}") from error

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Every regular file below a folder, relative with forward slashes, sorted. Links to
        folders are not followed; a run of whence beside a dump is left out.

        Raises UnreadableRun beyond two million files.
        """
        names = set(self._walk("", 0)) - self.hidden
        runs = {match[1] for name in names if (match := _OF_RUN.match(name))}
        return tuple(
            sorted(
                name
                for name in names
                if not runs or not (_OF_RUN.match(name) or name.removesuffix("run.json") in runs)
            )
        )

    @cached_property
    def not_followed(self) -> tuple[str, ...]:
        """Entries below a folder that are not in `files`, sorted: links to outside folders, broken
        links, pipes, folders nested too deep.
        """
        _ = self.files
        return tuple(sorted(self._not_followed - self.hidden))

    def _walk(self, below: str, depth: int) -> Iterator[str]:
        if not self.is_folder:
            return
        if depth > limits.DEPTH:
            self._not_followed.add(below)
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
                    elif not self._is_inner_folder(entry):
                        self._not_followed.add(name)
        except OSError as error:
            raise UnreadableRun(
                f"cannot list {self.path / below}: {error.strerror or error}"
            ) from error

    def _is_inner_folder(self, entry: os.DirEntry[str]) -> bool:
        """Whether this is a link to a folder inside this one, whose files are listed at their own
        paths.
        """
        try:
            return entry.is_dir() and Path(entry.path).resolve().is_relative_to(self._real_root)
        except OSError:
            return False

    @cached_property
    def _real_root(self) -> Path:
        return self._root.resolve()

    def inside(self, name: str) -> Path:
        """Returns the file that a dump calls `name`, relative to this folder (for a file: to its
        folder).

        A name is untrusted: one that leads outside, by `..`, as an absolute path or through a link,
        raises UnreadableRun.
        """
        path = self._root / name
        if "\0" in name or not self._holds(name, path):
            raise UnreadableRun(
                f"{self.path} names {name!r}, which is outside of it; it is not followed"
            )
        self._ask_for(name)
        return path

    def _ask_for(self, name: str, *, is_left: bool = False) -> None:
        path = os.path.normpath(name).replace(os.sep, "/")
        self.asked_for.add(path)
        if is_left:
            self.left.add(path)
        if self._above is not None:
            place, folder = self._above
            place._ask_for(f"{folder}/{name}", is_left=is_left)

    def _holds(self, name: str, path: Path) -> bool:
        """Whether a name leads to something inside. Resolves a folder once for all files in it, a
        file only where it is a link.
        """
        folder, last = os.path.split(name)
        if last in ("", ".", "..") or path.is_symlink():
            return path.resolve().is_relative_to(self._real_root)
        if folder not in self._inner_folders:
            inner = (self._root / folder).resolve()
            self._inner_folders[folder] = inner.is_relative_to(self._real_root)
        return self._inner_folders[folder]

    def within(self, name: str) -> Place:
        """Returns the place called `name` in this folder, for a reader that opens other files.
        Raises UnreadableRun as `inside` and `Place` do.
        """
        folder = f"{name}/"
        hidden = frozenset(h[len(folder) :] for h in self.hidden if h.startswith(folder))
        place = Place(self.inside(name), hidden, self.forms)
        if place.is_folder:
            place._above = self, name
        return place

    def shows(self, name: str, suffixes: Container[str], sniff: Callable[[Place], bool]) -> bool:
        """Whether the file called `name` in this folder has one of these suffixes and `sniff`
        accepts its first bytes. Does not count as a request for the file.
        """
        path = self._root / name
        try:
            return (
                suffix_of(name) in suffixes
                and self._holds(name, path)
                and sniff(Place(path, forms=self.forms))
            )
        except UnreadableRun:
            return False

    def leave(self, name: str) -> None:
        """Marks a file as known to a reader and free of tensors to compare."""
        self._ask_for(name, is_left=True)

    def without(self, files: Iterable[str]) -> Place:
        """Returns this folder without these files (relative paths)."""
        return Place(self.path, self.hidden | frozenset(files), self.forms)


def _is_there(entry: os.DirEntry[str]) -> bool:
    """Whether this is a file or folder, or a link to one. A pipe is excluded, since opening it
    could block; so is a link to itself.
    """
    try:
        return entry.is_file() or entry.is_dir()
    except OSError:
        return False


class Reader(Protocol):
    """The interface of a reader's module.

    Three further names are optional. LOOSE: it reads every file of its kind in a folder, and none
    of these needs another. ALONE: describes a file of its kind that is not read as part of a
    folder. HOLDS_TENSORS: False where files of its kind hold none.
    """

    LOOKS_LIKE: str
    ORDER: int

    def sniff(self, place: Place) -> bool: ...
    def open_run(self, place: Place) -> Run: ...
