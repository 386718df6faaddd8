"""A run in an object store: what is small of it is copied to a temporary folder, the shards stay
where they are.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import weakref
from pathlib import Path

import msgspec

from whence import disk
from whence.errors import ElementsMissing, UnreadableRun
from whence.store.folder import INDEX, JOURNAL, PROCESS, PROCESS_FOLDER, RUN, STATUS
from whence.store.remote import Failed, Place
from whence.store.remote_shard import Blocks, RemoteShard

_AT_ONCE = 64 << 20
_MOST_BESIDE = 64 << 20  # a file beside run.json that is larger is none of ours, and left there
_OF_A_PROCESS = (PROCESS, STATUS, JOURNAL, INDEX)


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
        made = Mirror(path, Mirrored(place.url, _copy(place, path)))
    except Failed as error:
        shutil.rmtree(path, ignore_errors=True)
        raise UnreadableRun(str(error)) from error
    except UnreadableRun:
        shutil.rmtree(path, ignore_errors=True)
        raise
    weakref.finalize(made, shutil.rmtree, str(path), ignore_errors=True)
    return made


def _copy(place: Place, path: Path) -> dict[str, dict[str, int]]:
    """Copy all but the shards of a run, and give the sizes of these."""
    names = place.names()
    if RUN not in names:
        found = ", ".join(sorted(names)[:5]) or "nothing"
        raise UnreadableRun(
            f"no run at {place.url}: it has no {RUN} (found: {found}); a dump of another tool is "
            "copied here before it is read"
        )
    shards: dict[str, dict[str, int]] = {}
    for name, size in sorted(names.items()):
        if size is not None:
            if name == RUN or size <= _MOST_BESIDE:
                _fetch(place, name, path / name, size)
        elif PROCESS_FOLDER.fullmatch(name):
            (path / name).mkdir()
            shards[name] = {}
            # the journal first: what it speaks of was written before it
            inner = sorted(place.names(name).items(), key=lambda item: item[0] != JOURNAL)
            for file, nbytes in inner:
                if nbytes is not None and file.startswith("shard-"):
                    shards[name][file] = nbytes
                elif nbytes is not None and file in _OF_A_PROCESS:
                    _fetch(place, f"{name}/{file}", path / name / file, nbytes)
    return shards


def _fetch(place: Place, name: str, target: Path, size: int) -> None:
    """Copy a file in parts."""
    with disk.whole_file(target) as file:
        for start in range(0, size, _AT_ONCE):
            file.write(place.read(name, start, min(size, start + _AT_ONCE)))
