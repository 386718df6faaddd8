"""A run in an object store: its small files are copied to a temporary folder, the shards stay in
the store.
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
from whence.store.mistaken import COMPARISON, is_a_comparison
from whence.store.remote import Absent, Failed, Place
from whence.store.remote_shard import Blocks, FileRange, RemoteShard

_MOST_BESIDE = 64 << 20  # a file beside run.json that is larger is none of ours, and left there
_OF_A_PROCESS = (PROCESS, JOURNAL, INDEX)


class Mirrored(msgspec.Struct, frozen=True):
    """The source of a copied folder. files: process folder -> shard -> bytes."""

    url: str
    files: dict[str, dict[str, int]]


class Mirror:
    """A run in an object store, identified by the folder with the copies of its small files."""

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
                self._place.fetch(f"{folder}/{name}", fresh, size)
                fresh.rename(target)
        except Failed as error:
            raise ElementsMissing(str(error)) from error
        return target


_MIRRORS: weakref.WeakValueDictionary[str, Mirror] = weakref.WeakValueDictionary()


def mirror_of(run: Path) -> Mirror | None:
    """Returns the run in an object store that a folder is a copy of; None for any other folder."""
    return _MIRRORS.get(str(run))


def mirror(url: str) -> Mirror:
    """Copies the small files of a run to a temporary folder, which is deleted with the last
    reference to it. Raises UnreadableRun, MissingDependency.
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
    """Copies all but the shards of a run, and returns the sizes of these."""
    try:
        names = place.names()
    except Absent as error:
        raise UnreadableRun(
            f"no run at {place.url}: nothing is there; check the spelling"
        ) from error
    if RUN not in names:
        raise UnreadableRun(_instead(place.url, names))
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
        [functools.partial(place.fetch, name, path / name, size) for name, size in small.items()]
    )
    return shards


def _instead(url: str, names: Iterable[str]) -> str:
    """Describes what is at a URL that is not a run, by the names there."""
    folder, _, name = url.rpartition("/")
    if name in COMPARISON and list(names) == [name]:
        return f"{url} {is_a_comparison(folder)}"
    if set(COMPARISON) <= set(names):
        return f"{url} {is_a_comparison(url)}"
    found = ", ".join(sorted(names)[:5]) or "nothing"
    return (
        f"no run at {url}: it has no {RUN} (found: {found}); a dump of another tool is copied here "
        "before it is read"
    )


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
