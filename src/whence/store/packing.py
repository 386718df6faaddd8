"""Packs a run: its shards are stored as steps from those of a reference run. All other files stay
byte for byte, and unpacking restores the shards byte for byte.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from whence import disk
from whence.dtypes import DTYPES
from whence.errors import ElementsMissing, OutputExists, StoreFailed, UnreadableRun, UsageError
from whence.store.folder import PACKED, is_run, process_folders, shard_name
from whence.store.index import INCREMENT, KEPT, Column, Index
from whence.store.packed_reference import (
    PackedReference,
    Packing,
    PackingState,
    ReferenceIdentity,
    difference,
    identify,
    load_packing,
    save_packing,
)
from whence.store.packed_shard import (
    MOST_GAP_BYTES,
    Base,
    PackedShard,
    Piece,
    packed_name,
    write_packed,
)
from whence.store.process_reader import ProcessReader
from whence.store.reader import StoredRun
from whence.store.recovering import is_written
from whence.store.remote_run import mirror_of
from whence.store.shards import (
    Bytes,
    map_file,
)

Tell = Callable[[int, int, str], None]
_SHARD = re.compile(r"shard-(\d{5,})\.safetensors")
_PACKED_SHARD = re.compile(r"shard-(\d{5,})\.packed")


class Packed(msgspec.Struct, frozen=True):
    """The result of packing a run. nbytes, packed_nbytes: of its shards before and after."""

    path: str
    nbytes: int
    packed_nbytes: int


def is_packed(path: str | Path) -> bool:
    """Whether the run at `path` is packed."""
    return (Path(path) / PACKED).exists()


def packing_state(run: StoredRun) -> PackingState | None:
    """Returns how an opened run is packed; None where it is not. Raises UnreadableRun where
    packed.json is damaged.
    """
    folder = run.readers[0].folder.parent
    packing = load_packing(folder)
    if packing is None:
        return None
    mirror = mirror_of(folder)
    sizes = (
        [n for files in mirror.described.files.values() for n in files.values()]
        if mirror is not None
        else [f.stat().st_size for p in process_folders(folder) for f in p.glob("shard-*.packed")]
    )
    place, problem = None, ""
    if packing.reference is not None:
        place, problem = PackedReference(folder).found()
    return PackingState(
        packing.reference.path if packing.reference is not None else "",
        str(place) if place is not None else "",
        problem.replace(str(folder), run.path),
        packing.nbytes,
        sum(sizes),
    )


def refuse_packed(path: Path, what: str) -> None:
    """Raises UsageError where a run is packed, and `what` cannot be done with a packed run."""
    if is_packed(path):
        raise UsageError(f"{path} is packed and cannot be {what}: whence unpack {path} -o RUN")


def pack(
    run: StoredRun,
    out: str | Path,
    *,
    reference: StoredRun | None = None,
    partners: Column | None = None,
    tell: Tell | None = None,
) -> Packed:
    """Writes a run packed to the new folder `out`.

    partners: for every record the nearest record of `reference`, -1 for none. The smallest of three
    forms is kept: steps from the partner (where both have as many bytes), compressed bytes, plain
    bytes. Every piece is decoded again and compared by hash before `out` is complete. Raises
    UsageError (packed already, or still being written), OutputExists, StoreFailed,
    MissingDependency.
    """
    source, final = Path(run.path), Path(out)
    refuse_packed(source, "packed again")
    if reference is not None:
        refuse_packed(Path(reference.path), "a reference")
    for path in [run.path, *([reference.path] if reference is not None else [])]:
        if is_written(Path(path)):
            raise UsageError(f"a process still writes {path}: wait until it ends")
    bases = _Bases(reference, partners)
    before = after = 0
    with _copy(source, final, "pack", _SHARD) as unfinished:
        for number, reader in enumerate(run.readers):
            if tell is not None:
                tell(number, len(run.readers), reader.folder.name)
            sizes = _pack_process(reader, unfinished / reader.folder.name, bases)
            before, after = before + sizes[0], after + sizes[1]
        save_packing(unfinished, Packing(bases.identity(final), before))
    return Packed(str(final), before, after)


def unpack(path: str | Path, out: str | Path, *, reference: str | Path | None = None) -> Packed:
    """Writes a packed run as it was to the new folder `out`, every file byte for byte (without the
    elements that were not kept).

    reference: path of the run that it is packed against, if it was moved. Raises UsageError (not
    packed), OutputExists, UnreadableRun (the reference is another run, or a piece is damaged),
    StoreFailed, MissingDependency.
    """
    source, final = Path(path), Path(out)
    packing = _packing_of(source)
    _check_free(final)
    if reference is not None and packing.reference is not None:
        _check_is(packing.reference, source, Path(reference))
    found = PackedReference(source, Path(reference) if reference is not None else None)
    after = 0
    with _copy(source, final, "unpack", _PACKED_SHARD) as unfinished:
        _check_room(packing, source, final.parent)
        for folder in sorted(process_folders(source)):
            for file in sorted(folder.glob("shard-*.packed")):
                match = _PACKED_SHARD.fullmatch(file.name)
                if match is None:
                    continue
                after += file.stat().st_size
                target = unfinished / folder.name / shard_name(int(match[1]))
                _write_whole(PackedShard(file, found.piece), target)
    return Packed(str(final), packing.nbytes, after)


def relocate(path: str | Path, reference: str | Path) -> None:
    """Sets the path of the run that a packed run is packed against. Raises UsageError,
    UnreadableRun (it is another run), StoreFailed.
    """
    run, place = Path(path), Path(reference)
    packing = _packing_of(run)
    if packing.reference is None:
        raise UsageError(f"{run} is packed without a reference and needs none")
    _check_is(packing.reference, run, place)
    moved = msgspec.structs.replace(
        packing.reference,
        path=str(place.resolve()),
        relative=os.path.relpath(place.resolve(), run.resolve()),
    )
    try:
        save_packing(run, msgspec.structs.replace(packing, reference=moved))
    except OSError as error:
        raise StoreFailed(f"cannot write to {run}: {error.strerror or error}") from error


def _packing_of(run: Path) -> Packing:
    packing = load_packing(run)
    if packing is None:
        raise UsageError(
            f"{run} is {'not packed' if is_run(run) else 'no packed run'}: `whence pack` makes one"
        )
    return packing


def _check_is(identity: ReferenceIdentity, run: Path, place: Path) -> None:
    """Raises UnreadableRun where the run at `place` is not the expected one."""
    if why := difference(identity, place):
        raise UnreadableRun(
            f"{place} is not run {identity.short}, which {run} is packed against: {why}"
        )


def _check_room(packing: Packing, source: Path, parent: Path) -> None:
    free = shutil.disk_usage(parent).free
    needed = sum(
        PackedShard(file, PackedReference(source).piece).whole_nbytes()
        for folder in process_folders(source)
        for file in folder.glob("shard-*.packed")
    )
    if needed > free:
        raise StoreFailed(
            f"unpacked, {source} has {needed} bytes (it says {packing.nbytes}), and {parent} has "
            f"{free} free; choose another output path"
        )


def _write_whole(shard: PackedShard, target: Path) -> None:
    try:
        disk.write_file(target, (part.data for part in shard.restore()))
    except ElementsMissing as error:
        raise UnreadableRun(f"cannot unpack: {error}") from error


def _check_free(out: Path) -> None:
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise OutputExists(f"{out} exists; choose another output path")


@contextlib.contextmanager
def _copy(run: Path, final: Path, doing: str, pattern: re.Pattern[str]) -> Iterator[Path]:
    """A copy of a run without the shards whose names match, in a folder that becomes `final` when
    the block has filled it. Raises OutputExists, StoreFailed.
    """
    _check_free(final)
    unfinished = final.with_name(f".{doing}ing-{os.getpid()}-{final.name}")

    def left_out(folder: str, names: list[str]) -> set[str]:
        if Path(folder) == run:
            return {PACKED} & set(names)
        return {name for name in names if Path(folder).parent == run and pattern.fullmatch(name)}

    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run, unfinished, symlinks=True, ignore=left_out)
        yield unfinished
        if final.exists():
            final.rmdir()  # an empty folder
        unfinished.rename(final)
    except OSError as error:
        raise StoreFailed(
            f"cannot {doing} to {final}: {error.strerror or error}; nothing was left there"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class _Bases:
    """The positions of each record's partner in the reference."""

    def __init__(self, reference: StoredRun | None, partners: Column | None) -> None:
        self._reference = reference if partners is not None else None
        self._partners = partners
        self._readers = list(self._reference.readers) if self._reference is not None else []
        self._firsts = [reader.record_base for reader in self._readers]

    def base(self, record: int, nbytes: int) -> Base | None:
        """Returns the position of the partner's bytes, where it has as many."""
        partner = int(self._partners[record]) if self._partners is not None else -1
        if partner < 0 or not self._readers:
            return None
        process = bisect_right(self._firsts, partner) - 1
        local = partner - self._firsts[process]
        columns = self._readers[process].index.columns
        is_stored = columns["elements"][local] in (KEPT, INCREMENT)
        if not is_stored or int(columns["nbytes"][local]) != nbytes:
            return None
        return process, int(columns["shard"][local]), int(columns["offset"][local])

    def piece(self, base: Base, nbytes: int) -> Bytes:
        """Returns those bytes. Raises ElementsMissing."""
        return self._readers[base[0]].shard(base[1]).data(base[2], nbytes)

    def identity(self, packed: Path) -> ReferenceIdentity | None:
        if self._reference is None:
            return None
        folders = [(r.folder.name, r.index.journal_bytes) for r in self._readers]
        return identify(Path(self._reference.path), folders, packed)


def _pack_process(reader: ProcessReader, folder: Path, bases: _Bases) -> tuple[int, int]:
    """Packs the shards of one process into its copied folder. Returns bytes before and after."""
    before = after = 0
    for file in sorted(reader.folder.glob("shard-*.safetensors")):
        before += file.stat().st_size
        match = _SHARD.fullmatch(file.name)
        if match is None:
            continue
        number = int(match[1])
        data = map_file(file)
        length = int.from_bytes(data[:8].tobytes(), "little") if data.size >= 8 else data.size
        if 8 + length > data.size:
            raise StoreFailed(f"{file} was cut off: `whence recover` the run, then pack it")
        head, data = data[: 8 + length], data[8 + length :]
        packed = folder / packed_name(number)
        try:
            write_packed(packed, head, data.size, _pieces(reader, bases, number, data), bases.piece)
        except ValueError as error:
            raise StoreFailed(f"cannot pack {reader.folder}: shard {number}: {error}") from error
        after += packed.stat().st_size
    return before, after


def _pieces(reader: ProcessReader, bases: _Bases, shard: int, data: Bytes) -> Iterator[Piece]:
    """Yields the pieces of a shard: the stored bytes of each record, and what lies between them,
    unless that is a few zeros. data: of its data area.
    """
    columns = reader.index.columns
    is_stored = np.isin(columns["elements"], (KEPT, INCREMENT)) & (columns["nbytes"] > 0)
    records = np.flatnonzero(is_stored & (columns["shard"] == shard))
    _, firsts = np.unique(columns["offset"][records], return_index=True)
    end = 0
    for record in records[firsts].tolist():
        offset, nbytes = int(columns["offset"][record]), int(columns["nbytes"][record])
        if offset + nbytes > data.size:
            break  # it was cut off, and stays so
        yield from _gap(data, end, offset)
        yield Piece(
            offset,
            nbytes,
            _width(reader.index, record, nbytes),
            bases.base(record + reader.record_base, nbytes),
            functools.partial(reader.bytes, record),
        )
        end = offset + nbytes
    yield from _gap(data, end, data.size)


def _width(index: Index, record: int, nbytes: int) -> int:
    """Returns the bytes of one real number of a record."""
    dtype = DTYPES.get(index.names[index.columns["dtype"][record]])
    if dtype is None:
        return 1
    width = dtype.itemsize // 2 if dtype.name.startswith("complex") else dtype.itemsize
    return width if width in (1, 2, 4, 8) and nbytes % width == 0 else 1


def _gap(data: Bytes, start: int, stop: int) -> list[Piece]:
    between = data[start:stop]
    if between.size < MOST_GAP_BYTES and not between.any():
        return []
    return [Piece(start, between.size, 1, None, lambda: between)]
