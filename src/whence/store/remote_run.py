"""A run in an object store: what is small of it is copied to a temporary folder, the shards stay
where they are.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

import msgspec

from whence import disk
from whence.errors import ElementsMissing, UnreadableRun
from whence.store.folder import INDEX, JOURNAL, PROCESS, PROCESS_FOLDER, RUN, STATUS
from whence.store.remote import Absent, Failed, Place
from whence.store.remote_shard import Blocks, FileRange, RemoteShard

_AT_ONCE = 64 << 20
_MOST_BESIDE = 64 << 20  # a file beside run.json that is larger is none of ours, and left there
_OF_A_PROCESS = (PROCESS, JOURNAL, INDEX)


class Mirrored(msgspec.Struct, frozen=True):
    """What a folder is a copy of. files: process folder -> shard -> bytes."""

    url: str
    files: dict[str, dict[str, int]]


class Mirror:
    """A run in an object store, by the folder that holds what is small of it."""

    def __init__(self, path: Path, described: Mirrored) -> None:
        self.path, self.described = path, described
        _MIRRORS[str(path)] = self

    @property
    def url(self) -> str:
        """Where the run lies."""
        return self.described.url

    @functools.cached_property
    def _place(self) -> Place:
        return Place(self.url)

    @functools.cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self._place)

    def shard(self, folder: str, name: str) -> RemoteShard:
        """A shard of a process folder."""
        size = self.described.files.get(folder, {}).get(name)
        return RemoteShard(self._blocks, self.url, f"{folder}/{name}", size)

    def announce(self, ranges: Iterable[FileRange]) -> None:
        """As `Blocks.announce`."""
        self._blocks.announce(ranges)

    def packed(self, folder: str, name: str) -> Path | None:
        """A packed shard, copied now; None where there is none. Raises ElementsMissing."""
        size = self.described.files.get(folder, {}).get(name)
        if size is None:
            return None
        target = self.path / folder / name
        try:
            if not target.exists():
                fresh = target.with_suffix(".part")
                _fetch(self._place, f"{folder}/{name}", fresh, size)
                fresh.rename(target)
        except Failed as error:
            raise ElementsMissing(str(error)) from error
        return target


_MIRRORS: weakref.WeakValueDictionary[str, Mirror] = weakref.WeakValueDictionary()


def mirror_of(run: Path) -> Mirror | None:
    """The run in an object store that a folder is a copy of; None where it is a run of its own."""
    return _MIRRORS.get(str(run))


def mirror(url: str) -> Mirror:
    """Copy what is small of a run to a temporary folder, which goes with the last that refers to
    it. Raises UnreadableRun, MissingDependency.
    """
    place, path = Place(url), Path(tempfile.mkdtemp(prefix="whence-remote-"))
    try:
        mirrored = Mirror(path, Mirrored(place.url, _copy(place, path)))
    except Failed as error:
        shutil.rmtree(path, ignore_errors=True)
        raise UnreadableRun(str(error)) from error
    except UnreadableRun:
        shutil.rmtree(path, ignore_errors=True)
        raise
    weakref.finalize(mirrored, shutil.rmtree, str(path), ignore_errors=True)
    return mirrored


def _copy(place: Place, path: Path) -> dict[str, dict[str, int]]:
    """Copy all but the shards of a run, and give the sizes of these."""
    names = place.names()
    if RUN not in names:
        found = ", ".join(sorted(names)[:5]) or "nothing"
        raise UnreadableRun(
            f"no run at {place.url}: it has no {RUN} (found: {found}); a dump of another tool is "
            "copied here before it is read"
        )
    folders = [name for name in sorted(names) if PROCESS_FOLDER.fullmatch(name)]
    processes = place.together([functools.partial(_process, place, name) for name in folders])
    shards: dict[str, dict[str, int]] = {}
    small = {
        name: size
        for name, size in names.items()
        if size is not None and (name == RUN or size <= _MOST_BESIDE)
    }
    for folder, (status, sizes) in zip(folders, processes, strict=True):
        (path / folder).mkdir()
        if status is not None:
            disk.write_file(path / folder / STATUS, [status])
        shards[folder] = {name: n for name, n in sizes.items() if name.startswith("shard-")}
        small |= {f"{folder}/{name}": n for name, n in sizes.items() if name in _OF_A_PROCESS}
    place.together(
        [functools.partial(_fetch, place, name, path / name, size) for name, size in small.items()]
    )
    return shards


def _process(place: Place, folder: str) -> tuple[bytes | None, dict[str, int]]:
    """The status of a process, and the sizes of its files as they are after that: who says that it
    ended has a journal that is whole.
    """
    try:
        status = place.read(f"{folder}/{STATUS}")
    except Absent:
        status = None
    sizes = {name: size for name, size in place.names(folder).items() if size is not None}
    return status, sizes


def _fetch(place: Place, name: str, target: Path, size: int) -> None:
    """Copy a file in parts."""
    with disk.whole_file(target) as file:
        for start in range(0, size, _AT_ONCE):
            file.write(place.read(name, start, min(size, start + _AT_ONCE)))
