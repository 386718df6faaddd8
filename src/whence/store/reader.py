"""Reads a run: lazily, at any moment, also while it is written or after its writer was killed.
Never changes it, never executes it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, overload

import msgspec
import numpy as np
import xxhash

from whence.dtypes import DTYPES, Array, DType
from whence.errors import ElementsMissing, UnreadableRun
from whence.records import (
    Call,
    External,
    Increment,
    Kept,
    Note,
    Program,
    Record,
    Ref,
    RunInfo,
    Step,
)
from whence.records.lookup import Named
from whence.records.marks import WRITING
from whence.store import index as indexes
from whence.store import journal
from whence.store.folder import (
    INDEX,
    JOURNAL,
    ProcessInfo,
    is_writing,
    load_info,
    load_process,
    process_folders,
    shard_name,
)
from whence.store.index import (
    CALL_COLUMNS,
    INCREMENT,
    KEPT,
    NAME_COLUMNS,
    NONE,
    RECORD_COLUMNS,
    Column,
    Index,
)
from whence.store.journal import NOTE, PROGRAM, STEP
from whence.store.shards import Bytes, Shard, map_file
from whence.store.status import FAILED, RECOVERED, RUNNING, read_status

T = TypeVar("T")
COLUMNS = (*RECORD_COLUMNS, "count", *CALL_COLUMNS, "ref_call", "ref_slot", "ref_record")
_force = msgspec.structs.force_setattr


def open_run(path: str | Path, *, ranks: Collection[int] | None = None) -> StoredRun:
    """Open the run at `path`, or only the processes of some ranks.

    Raises UnreadableRun (nothing there, not a run, nothing captured) and UnknownVersion, with what
    was tried, found, and what to do.
    """
    run = Path(path)
    info = load_info(run)
    processes: list[_Process] = []
    unborn: list[str] = []
    skipped: set[int] = set()
    for folder in process_folders(run):
        if not (folder / JOURNAL).exists():
            unborn.append(f"{folder.name} has no journal: its process ended as it started")
            continue
        process = load_process(folder)
        if ranks is not None and process.rank not in ranks:
            skipped.add(process.rank)
            continue
        processes.append(_Process(folder, process))
    processes.sort(key=lambda p: (p.info.rank, p.info.pid, p.folder.name))
    if not processes and skipped:
        raise UnreadableRun(
            f"{run} has no process of rank {sorted(set(ranks or ()))}; it has ranks "
            f"{sorted(skipped)}"
        )
    opened = StoredRun(run, info, processes, unborn, ranks=ranks)
    if not len(opened.records) and not len(opened.calls):
        told = "".join(f"\n  it says: {note.kind}: {note.text}" for note in opened.notes[:10])
        raise UnreadableRun(
            f"{run} is an empty run: {len(processes)} process folder(s), no call and no record"
            f"{f'; {opened.ended}' if opened.ended else ''}{told}\n  "
            + (
                "it ended before anything was captured: remove the cause and capture again"
                if opened.ended
                else "nothing was captured: check that the command runs a model in a process "
                "that whence can see, and what was selected"
            )
        )
    return opened


class StoredRun(Named):
    """A `Run` read from disk. Calls and records are made when asked for; elements are
    memory-mapped.
    """

    def __init__(
        self,
        path: Path,
        info: RunInfo,
        processes: list[_Process],
        unborn: Sequence[str] = (),
        *,
        ranks: Collection[int] | None = None,
    ) -> None:
        self._path, self._info, self._processes, self._ranks = path, info, processes, ranks
        records = calls = shards = 0
        for process in processes:
            process.record_base, process.call_base, process.shard_base = records, calls, shards
            records += process.records
            calls += process.calls
            shards += process.shard_count
        self._record_bases = [p.record_base for p in processes]
        self._call_bases = [p.call_base for p in processes]
        self._records = _Lazy(records, self._record)
        self._calls = _Lazy(calls, self._call)
        self._programs: dict[str, Program] | None = None
        self._verified: set[int] = set()
        self._ended = "; ".join([*(said for p in processes if (said := p.ended())), *unborn])

    def __reduce__(self) -> tuple[Callable[..., StoredRun], tuple[Path, Collection[int] | None]]:
        """To another process a run travels as its path; it is mapped again there."""
        return _reopen, (self._path.absolute(), self._ranks)

    @property
    def path(self) -> str:
        """Where the run lies."""
        return str(self._path)

    @property
    def info(self) -> RunInfo:
        """run.json."""
        return self._info

    @property
    def ended(self) -> str:
        """Empty when every process ended cleanly, else which did not, how far it came and why."""
        return self._ended

    @property
    def processes(self) -> Sequence[ProcessInfo]:
        """Who wrote this run, in the order in which their calls and records follow each other."""
        return tuple(p.info for p in self._processes)

    @property
    def calls(self) -> Sequence[Call]:
        """All calls; `calls[i].id == i`. A call whose parent never ended (a crash) has parent
        -1.
        """
        return self._calls

    @property
    def records(self) -> Sequence[Record]:
        """All records; `records[i].id == i`. Shards are numbered through all processes, see
        `location`.
        """
        return self._records

    @property
    def programs(self) -> Mapping[str, Program]:
        """Programs by id. An id that two processes use for different programs gets "@<position of
        the process>" behind it.
        """
        if self._programs is None:
            self._programs = {}
            for place, process in enumerate(self._processes):
                for program in process.load_programs():
                    known = self._programs.get(program.id)
                    if known is not None and known != program:
                        fresh = f"{program.id}@{place}"
                        process.renamed[program.id] = fresh
                        program = msgspec.structs.replace(program, id=fresh)
                    self._programs[program.id] = program
        return self._programs

    @property
    def notes(self) -> Sequence[Note]:
        """All notes."""
        return tuple(note for p in self._processes for note in p.decode(NOTE, journal.decode_note))

    @property
    def steps(self) -> Sequence[Step]:
        """All ends of steps."""
        return tuple(step for p in self._processes for step in p.decode(STEP, journal.decode_step))

    def array(self, record: int) -> Array:
        """Elements of a record: read-only, dtype kept, a view of the mapped file (increments are
        put together in memory).

        Raises ElementsMissing with the reason; IndexError when there is no such record.
        """
        process, local = self._at(record)
        columns = process.index.columns
        kind = int(columns["elements"][local])
        dtype = process.dtype(local)
        shape = process.index.shape(local)
        if kind == KEPT:
            return _view(process.bytes(local), dtype, shape, record)
        if kind == INCREMENT:
            return process.rebuild(local, dtype, shape, record, self._external)
        if kind == NONE:
            raise ElementsMissing(
                self._record(record).why or f"record {record}: elements were not kept"
            )
        return _view(self._external(record), dtype, shape, record)

    def raw(self, record: int) -> tuple[int, int] | None:
        """(address, nbytes) of the elements where they lie contiguously in a mapped shard, for
        kernels; None where they do not.

        The address is good while this run is alive. Raises ElementsMissing when the shard is cut
        off.
        """
        process, local = self._at(record)
        columns = process.index.columns
        if columns["elements"][local] != KEPT:
            return None
        nbytes = int(columns["nbytes"][local])
        if nbytes != math.prod(process.index.shape(local)) * process.dtype(local).itemsize:
            return None
        return process.shard(int(columns["shard"][local])).address(
            int(columns["offset"][local]), nbytes
        ), nbytes

    def location(self, record: int) -> tuple[str, int, int] | None:
        """(file, offset from its start, nbytes) where the elements lie as one piece of a shard;
        None where they do not.
        """
        process, local = self._at(record)
        columns = process.index.columns
        if columns["elements"][local] != KEPT:
            return None
        shard = process.shard(int(columns["shard"][local]))
        return (
            str(shard.path),
            shard.offset() + int(columns["offset"][local]),
            int(columns["nbytes"][local]),
        )

    def column(self, name: str) -> Column:
        """One field of all records or all calls as an array, for planning over 10^6 of them without
        making a Struct of each.

        Records: dtype (str), hash (n, 2) uint64 (zeros: not taken), elements (0 none, 1 kept, 2
        increment, 3 external), nbytes, shard, offset, base, axis, count, statistics (n, 9) float64
        in the order of `Statistics`, NaN for none. Calls: root, phase, scope, op, op_type (str),
        parent, order, rank, step, micro, occurrence. References of calls: ref_call, ref_slot (str),
        ref_record. Raises KeyError for another name.
        """
        parts = [p.column(name) for p in self._processes]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0)

    def _at(self, record: int) -> tuple[_Process, int]:
        if not 0 <= record < len(self._records):
            raise IndexError(f"record {record} of {len(self._records)}")
        process = self._processes[bisect_right(self._record_bases, record) - 1]
        return process, record - process.record_base

    def _record(self, number: int) -> Record:
        process, local = self._at(number)
        record = process.decode_line(int(process.index.records_at[local]), journal.decode_record)
        _force(record, "id", number)
        place = record.elements
        if isinstance(place, Kept) and process.shard_base:
            _force(
                record,
                "elements",
                Kept(place.shard + process.shard_base, place.offset, place.nbytes),
            )
        elif isinstance(place, Increment):
            base = place.base + process.record_base
            _force(
                record,
                "elements",
                Increment(
                    base, place.axis, place.shard + process.shard_base, place.offset, place.nbytes
                ),
            )
        return record

    def _call(self, number: int) -> Call:
        process = self._processes[bisect_right(self._call_bases, number) - 1]
        local = number - process.call_base
        call = process.decode_line(int(process.index.calls_at[local]), journal.decode_call)
        parent = int(process.index.columns["parent"][local])
        _force(call, "id", number)
        _force(call, "parent", parent + process.call_base if parent >= 0 else -1)
        if any(not 0 <= ref.record < process.records for ref in call.refs):
            raise UnreadableRun(
                f"{process.folder / JOURNAL}: call {number} refers to a record that is not "
                "there; the index is damaged"
            )
        if process.record_base:
            _force(
                call,
                "refs",
                tuple(Ref(r.slot, r.record + process.record_base, r.edge) for r in call.refs),
            )
        if call.program and len(self._processes) > 1 and self.programs:
            _force(call, "program", process.renamed.get(call.program, call.program))
        return call

    def _external(self, number: int) -> Bytes:
        record = self._record(number)
        place = record.elements
        assert isinstance(place, External)
        try:
            data = map_file(self._path / place.file)
        except (OSError, ValueError) as error:
            raise ElementsMissing(
                f"record {number} lies in {place.file}, which cannot be read: {error}; put the "
                "file back"
            ) from error
        if not 0 <= place.offset <= place.offset + place.nbytes <= data.size:
            raise ElementsMissing(
                f"record {number} lies in {place.file}: wanted bytes {place.offset} to "
                f"{place.offset + place.nbytes}, "
                f"the file has {data.size}; it is not the file of the capture"
            )
        data = data[place.offset : place.offset + place.nbytes]
        if number not in self._verified:
            if not record.hash:
                raise ElementsMissing(
                    f"record {number} lies in {place.file}, but no hash was taken that could "
                    "tell whether it still does"
                )
            if xxhash.xxh3_128_hexdigest(data.data) != record.hash:
                raise ElementsMissing(
                    f"record {number} lies in {place.file}, which changed since the capture (the "
                    "hash differs); put the file back"
                )
            self._verified.add(number)
        return data


def _reopen(path: Path, ranks: Collection[int] | None) -> StoredRun:
    return open_run(path, ranks=ranks)


class _Process:
    """One process folder: its journal as of now, its index, its shards. Numbers are local to it."""

    def __init__(self, folder: Path, info: ProcessInfo) -> None:
        self.folder, self.info = folder, info
        # before the journal: a clean end read here means the journal is whole
        self.status, self.error = read_status(folder)
        try:
            self.journal: Bytes = map_file(folder / JOURNAL)
        except OSError as error:
            raise UnreadableRun(
                f"cannot read {folder / JOURNAL}: {error.strerror or error}"
            ) from error
        self.index: Index = indexes.load(folder, self.journal.size) or indexes.build(self.journal)
        self.records, self.calls = self.index.records_at.size, self.index.calls_at.size
        shards = self.index.columns["shard"]
        self.shard_count = int(shards.max()) + 1 if shards.size else 0
        self.record_base = self.call_base = self.shard_base = 0
        self.renamed: dict[str, str] = {}
        self._shards: dict[int, Shard] = {}

    def ended(self) -> str:
        who = f"rank {self.info.rank} ({self.info.host}, pid {self.info.pid})"
        damage = self.index.damage
        said = []
        if self.status == RUNNING and is_writing(self.folder, self.info):
            said.append(f"{WRITING}: {self._extent()} so far")
        elif self.status in (RUNNING, RECOVERED):
            said.append(
                f"ended uncleanly (killed or crashed): {self._extent()} were saved, what came "
                "after is missing"
            )
        elif self.status == FAILED:
            said.append(
                f"stopped: {self.error or 'no reason was left'} ({self._extent()} were saved)"
            )
        if damage is not None and not (damage.torn and said):
            said.append(
                f"journal damaged at line {damage.line} (byte {damage.at}): {damage.reason}; "
                "what follows was not read"
            )
        return f"{who} {'; '.join(said)}" if said else ""

    def _extent(self) -> str:
        text = f"{self.calls} calls and {self.records} records"
        if self.calls:
            columns, names = self.index.columns, self.index.names
            scope, root = names[columns["scope"][-1]], names[columns["root"][-1]]
            text += f", the last call {scope or root!r} in step {int(columns['step'][-1])},"
        return text

    def dtype(self, record: int) -> DType:
        name = self.index.names[self.index.columns["dtype"][record]]
        try:
            return DTYPES[name]
        except KeyError:
            raise ElementsMissing(
                f"record {record + self.record_base}: its dtype {name!r} is not known to this "
                "whence"
            ) from None

    def shard(self, number: int) -> Shard:
        shard = self._shards.get(number)
        if shard is None:
            shard = self._shards[number] = Shard(self.folder / shard_name(number))
        return shard

    def bytes(self, record: int) -> Bytes:
        columns = self.index.columns
        return self.shard(int(columns["shard"][record])).data(
            int(columns["offset"][record]), int(columns["nbytes"][record])
        )

    def rebuild(
        self,
        record: int,
        dtype: DType,
        shape: tuple[int, ...],
        number: int,
        external: Callable[[int], Bytes],
    ) -> Array:
        """Put an increment and all it follows together, without recursion: a cache may have grown
        ten thousand times.
        """
        columns, index = self.index.columns, self.index
        links = []
        at = record
        while columns["elements"][at] == INCREMENT:
            base, axis = int(columns["base"][at]), int(columns["axis"][at])
            links.append((at, axis, index.shape(at), index.shape(base)))
            at = base
        if columns["elements"][at] == NONE:
            raise ElementsMissing(
                f"record {number} continues record {at + self.record_base}, whose elements were "
                "not kept"
            )
        chain = [at, *(link[0] for link in links)]
        stored = int(columns["nbytes"][chain].sum())
        if stored != math.prod(shape) * dtype.itemsize or any(
            self.dtype(c) is not dtype for c in chain
        ):
            raise ElementsMissing(
                f"record {number}: {len(links)} increments of {stored} bytes in all do not make "
                f"{dtype.name} {shape}"
            )
        for _, axis, grown, before in links:
            if not _continues(before, grown, axis):
                raise ElementsMissing(
                    f"record {number}: an increment from shape {before} to {grown} along axis "
                    f"{axis} is not one"
                )
        # All of them lie inside their files: what is allocated next is bounded by what is there.
        parts = [
            self.bytes(at) if columns["elements"][at] == KEPT else external(at + self.record_base),
            *(self.bytes(c) for c in chain[1:]),
        ]
        try:
            whole = np.empty(shape, dtype.numpy)
        except (ValueError, MemoryError) as error:
            raise ElementsMissing(f"record {number}: {dtype.name} {shape}: {error}") from error
        first = index.shape(at)
        whole[tuple(slice(extent) for extent in first)] = _view(parts[0], dtype, first, number)
        for part, (_, axis, grown, before) in zip(parts[1:], links, strict=True):
            added = (*grown[:axis], grown[axis] - before[axis], *grown[axis + 1 :])
            place = [slice(extent) for extent in grown]
            place[axis] = slice(before[axis], grown[axis])
            whole[tuple(place)] = _view(part, dtype, added, number)
        whole.flags.writeable = False
        return whole

    def decode_line(self, line: int, decode: Callable[[memoryview], T]) -> T:
        start, end = self.index.span(line)
        try:
            return decode(self.journal[start:end].data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableRun(
                f"{self.folder / JOURNAL}: cannot understand byte {start} to {end}: {error}; the "
                "journal changed since its index was made: "
                f"delete {INDEX} beside it and open the run again"
            ) from error

    def decode(self, kind: int, decode: Callable[[memoryview], T]) -> list[T]:
        return [self.decode_line(line, decode) for line in self.index.lines(kind)]

    def load_programs(self) -> list[Program]:
        programs = self.decode(PROGRAM, journal.decode_program)
        if not self.record_base:
            return programs
        return [
            msgspec.structs.replace(p, constants=tuple(c + self.record_base for c in p.constants))
            for p in programs
        ]

    def column(self, name: str) -> Column:
        columns = self.index.columns
        if name == "ref_call":
            return np.repeat(np.arange(self.calls) + self.call_base, np.diff(columns["refs_at"]))
        if name == "count":
            return self._counts()
        if name not in COLUMNS:
            raise KeyError(f"no column {name!r}; there are: {', '.join(COLUMNS)}")
        column = columns[name]
        if name in NAME_COLUMNS:
            return np.array([*self.index.names, ""], object)[column]
        moved = {
            "base": self.record_base,
            "ref_record": self.record_base,
            "shard": self.shard_base,
            "parent": self.call_base,
        }.get(name, 0)
        return np.where(column >= 0, column + moved, -1) if moved else column

    def _counts(self) -> Column:
        at, extents = self.index.columns["shape_at"], self.index.columns["shape"]
        if not self.records:
            return np.empty(0, np.int64)
        # reduceat needs a start inside the array and gives the element itself for an empty range,
        # so a 1 stands behind each shape
        ones = np.insert(extents, at[1:], 1)
        counts: Column = np.multiply.reduceat(ones, at[:-1] + np.arange(self.records))
        return counts


class _Lazy(Sequence[T]):
    """A sequence whose items are made when asked for and not kept."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...
    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        if isinstance(at, slice):
            return [self._make(i) for i in range(*at.indices(self._length))]
        place = at + self._length if at < 0 else at
        if not 0 <= place < self._length:
            raise IndexError(f"{at} of {self._length}")
        return self._make(place)

    def __iter__(self) -> Iterator[T]:
        return map(self._make, range(self._length))


def _continues(before: tuple[int, ...], grown: tuple[int, ...], axis: int) -> bool:
    """Whether a shape is another one that grew along an axis."""
    if len(before) != len(grown) or not 0 <= axis < len(grown) or before[axis] > grown[axis]:
        return False
    return (*before[:axis], *before[axis + 1 :]) == (*grown[:axis], *grown[axis + 1 :])


def _view(data: Bytes, dtype: DType, shape: tuple[int, ...], record: int) -> Array:
    wanted = math.prod(shape) * dtype.itemsize
    if data.size != wanted:
        raise ElementsMissing(
            f"record {record}: {dtype.name} {shape} has {wanted} bytes, {data.size} are stored; "
            "the run is damaged"
        )
    try:
        view: Array = data.view(dtype.numpy).reshape(shape)
    except ValueError as error:
        raise ElementsMissing(f"record {record}: {dtype.name} {shape}: {error}") from error
    return view
