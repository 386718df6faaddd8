"""The run that another one is packed against: its path, and a check that it is still that run."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import xxhash

from whence import disk
from whence.errors import ElementsMissing, UnreadableRun
from whence.store.folder import JOURNAL, PACKED, PROCESS_FOLDER, indented, shard_name
from whence.store.packed_shard import FORMAT, Base
from whence.store.shards import Bytes, Shard, map_file

_MOST_BYTES = 64 << 20
_PART_BYTES = 8 << 20


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identifies one process folder of a run: the first `journal_bytes` of its journal have this
    xxh3_128. The journal holds the hash of every tensor.
    """

    folder: str
    journal_bytes: int
    journal: str


class ReferenceIdentity(msgspec.Struct, frozen=True):
    """The run that another one is packed against. path: absolute; relative: from the packed run, so
    that both can be moved together.
    """

    path: str
    relative: str
    processes: tuple[ProcessIdentity, ...]

    @property
    def short(self) -> str:
        """Returns a few digits that identify the run in messages."""
        return self.processes[0].journal[:12] if self.processes else ""


class Packing(msgspec.Struct, frozen=True):
    """packed.json: how a run is packed. reference: None where its tensors are compressed alone.
    nbytes: of its shards before.
    """

    reference: ReferenceIdentity | None
    nbytes: int
    format: int = FORMAT


class PackingState(msgspec.Struct, frozen=True):
    """How a run is packed, and whether it can be read. reference: the path that it says, "" where
    tensors are compressed alone. found: where that run was found, "" for nowhere. problem: why not,
    and what to do. nbytes, packed_nbytes: of its shards before and now.
    """

    reference: str
    found: str
    problem: str
    nbytes: int
    packed_nbytes: int


def load_packing(run: Path) -> Packing | None:
    """Returns how a run is packed; None where it is not. Raises UnreadableRun."""
    file = run / PACKED
    if not file.exists():
        return None
    try:
        if file.stat().st_size > _MOST_BYTES or not file.is_file():
            raise ValueError("it is too large")
        packing = msgspec.json.decode(file.read_bytes(), type=Packing)
        if packing.format != FORMAT:
            raise ValueError(f"it has format {packing.format}, this whence reads {FORMAT}")
        if packing.reference is not None and not all(
            PROCESS_FOLDER.fullmatch(process.folder) for process in packing.reference.processes
        ):
            raise ValueError("it names a folder that is none of a process")
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise UnreadableRun(f"cannot understand {file}: {error}") from error
    return packing


def save_packing(run: Path, packing: Packing) -> None:
    """Writes packed.json. Raises OSError."""
    disk.write_file(run / PACKED, indented(msgspec.to_builtins(packing)))


def identify(reference: Path, folders: list[tuple[str, int]], packed: Path) -> ReferenceIdentity:
    """Returns the identity of a run. folders: names of its process folders -> bytes of their
    journals that count. Raises OSError.
    """
    return ReferenceIdentity(
        str(reference.resolve()),
        os.path.relpath(reference.resolve(), packed.resolve()),
        tuple(
            ProcessIdentity(name, nbytes, _hash(reference / name / JOURNAL, nbytes))
            for name, nbytes in folders
        ),
    )


def difference(identity: ReferenceIdentity, place: Path) -> str:
    """Returns why the run at a path is not the expected one; "" where it is."""
    if not place.is_dir():
        return "there is nothing"
    for process in identity.processes:
        file = place / process.folder / JOURNAL
        try:
            if _hash(file, process.journal_bytes) != process.journal:
                return f"{file} is another one, or was changed"
        except (OSError, ValueError) as error:
            return f"{getattr(error, 'strerror', None) or error} ({file})"
    return ""


class PackedReference:
    """The reference of a packed run, looked for and identified when the first piece of it is
    wanted. at: where it lies, if it is not where the packed run says.
    """

    def __init__(self, run: Path, at: Path | None = None) -> None:
        self._run, self._at = run, at
        self._folders: list[Path] | None = None
        self._problem = ""
        self._shards: dict[tuple[int, int], Shard] = {}

    def found(self) -> tuple[Path | None, str]:
        """Returns the path of the reference; None, and where it was searched, if it was
        not found.
        """
        if self._folders is None and not self._problem:
            self._find()
        return (self._folders[0].parent if self._folders else None), self._problem

    def piece(self, base: Base, nbytes: int) -> Bytes:
        """Returns `nbytes` of a shard of the reference. Raises ElementsMissing that says where the
        reference was searched and what it has to be.
        """
        if self._folders is None and not self._problem:
            self._find()
        if self._folders is None:
            raise ElementsMissing(self._problem)
        process, number, offset = base
        if not 0 <= process < len(self._folders) or number < 0 or offset < 0:
            raise ElementsMissing(f"{self._run}: a piece of it lies nowhere; it is damaged")
        shard = self._shards.get((process, number))
        if shard is None:
            file = self._folders[process] / shard_name(number)
            shard = self._shards[process, number] = Shard(file)
        return shard.data(offset, nbytes)

    def _find(self) -> None:
        try:
            packing = load_packing(self._run)
        except UnreadableRun as error:
            self._problem = str(error)
            return
        if packing is None or packing.reference is None:
            self._problem = f"{self._run} does not say what it is packed against; it is damaged"
            return
        identity, why = packing.reference, {}
        places = [self._run.resolve() / identity.relative, Path(identity.path)]
        for place in dict.fromkeys([self._at.resolve()] if self._at is not None else places):
            at = Path(os.path.normpath(place))
            why[at] = difference(identity, at)
            if not why[at]:
                self._folders = [at / process.folder for process in identity.processes]
                return
        looked = "; ".join(f"at {place}: {problem}" for place, problem in why.items())
        self._problem = (
            f"{self._run} is packed against run {identity.short}, which was not found ({looked}); "
            f"put it back, or say where it is: whence pack {self._run} --against REF"
        )


def _hash(file: Path, nbytes: int) -> str:
    """Returns the xxh3_128 of the first bytes of a file. Raises OSError, ValueError where it has
    fewer.
    """
    data = map_file(file)
    if not 0 <= nbytes <= data.size:
        raise ValueError(f"{data.size} bytes of journal, {nbytes} are expected")
    digest = xxhash.xxh3_128()
    for start in range(0, nbytes, _PART_BYTES):
        digest.update(data[start : min(nbytes, start + _PART_BYTES)].data)
    return digest.hexdigest()
