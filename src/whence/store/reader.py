"""Reads a run: lazily, at any moment, also while it is written or after its writer was killed.
Never changes it, never executes it.

What the processes of a run noted, what is wrong with their files, and what the run lacks, is
told with it.

Some calls or records of a run are decoded many at once: what repeats from one to the next
(names, slots, shapes) is one object in all of them.

What is looked at next is announced: an object store is asked for it ahead.
"""

from __future__ import annotations

import contextlib
import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.records import (
    Call,
    Collective,
    External,
    Increment,
    Kept,
    Lack,
    Looked,
    Missing,
    Note,
    Program,
    Record,
    Ref,
    RunInfo,
    Step,
)
from whence.records.columns import Columns
from whence.records.lookup import Named
from whence.records.marks import STOPPED
from whence.records.missing import watched
from whence.records.places import WRITTEN, is_url
from whence.store import journal
from whence.store.folder import (
    JOURNAL,
    ProcessInfo,
    load_info,
    load_process,
    process_folders,
    shard_name,
)
from whence.store.index import INCREMENT, KEPT, NONE, Column
from whence.store.journal import COLLECTIVE, NOTE, STEP
from whence.store.process_reader import ProcessReader, view_elements
from whence.store.remote_run import Mirror, Mirrored, mirror, mirror_of
from whence.store.remote_shard import FileRange, RemoteShard
from whence.store.shards import Bytes, ReadShard, Shard, holds, map_file
from whence.store.status import CLEAN, FAILED

T = TypeVar("T")
_force = msgspec.structs.force_setattr


def open_run(path: str | Path, *, ranks: Collection[int] | None = None) -> StoredRun:
    """Open the run at `path`, a folder or a URL, or only the processes of some ranks.

    Raises UnreadableRun (nothing there, not a run, nothing captured) and UnknownVersion.
    """
    held = mirror(str(path)) if is_url(path) else None  # until the readers hold it
    run = held.path if held is not None else Path(path)
    info = load_info(run)
    skipped: set[int] = set()
    processes, unborn = read_processes([run], ranks, skipped)
    processes.sort(key=lambda p: (p.info.rank, p.info.pid, p.folder.parent.name, p.folder.name))
    if not processes and skipped:
        raise UnreadableRun(
            f"{run} has no process of rank {sorted(set(ranks or ()))}; it has ranks "
            f"{sorted(skipped)}"
        )
    opened = StoredRun(run, info, processes, unborn, ranks=ranks)
    if not (len(opened.records) or len(opened.calls) or opened.collectives):
        raise UnreadableRun(_emptiness(run, len(processes), opened.notes, opened.ended))
    return opened


def read_processes(
    parts: Sequence[Path], ranks: Collection[int] | None = None, skipped: set[int] | None = None
) -> tuple[list[ProcessReader], list[str]]:
    """The processes of some ranks, None for all, in folders of a run; and in words, of which folder
    there is nothing to read. skipped: gets the other ranks.
    """
    processes, unborn = [], []
    for folder in (folder for part in parts for folder in process_folders(part)):
        if not (folder / JOURNAL).exists():
            unborn.append(f"{folder.name} has no journal: its process ended as it started")
            continue
        process = load_process(folder)
        if ranks is None or process.rank in ranks:
            processes.append(ProcessReader(folder, process))
        elif skipped is not None:
            skipped.add(process.rank)
    return processes, unborn


class _Foreign(ElementsMissing):
    """The elements are not those that the journal names."""


class StoredRun(Named):
    """A `Run` read from disk. Calls and records are made when asked for; elements are
    memory-mapped. chosen_ranks: those whose processes alone were opened, None for all.
    """

    def __init__(
        self,
        path: Path,
        info: RunInfo,
        processes: list[ProcessReader],
        unborn: Sequence[str] = (),
        *,
        ranks: Collection[int] | None = None,
    ) -> None:
        self._path, self._info, self._processes, self.chosen_ranks = path, info, processes, ranks
        self._mirror = mirror_of(path)
        records = calls = shards = 0
        for process in processes:
            process.record_base, process.call_base, process.shard_base = records, calls, shards
            records += process.records
            calls += process.calls
            shards += process.shard_count
        self._record_bases = [p.record_base for p in processes]
        self._call_bases = [p.call_base for p in processes]
        self._names_at = [0, *accumulate(len(p.index.names) for p in processes[:-1])]
        self._records = Looked(records, self._record, self._every_record)
        self._calls = Looked(calls, self._call, self._every_call)
        self._programs: dict[str, Program] | None = None
        self._notes: tuple[Note, ...] | None = None
        self._verified: set[int] = set()
        self._unborn = tuple(unborn)
        self._lost: dict[str, Missing] = {}  # by file, as elements are asked for
        self._ended = "; ".join([*(problem for p in processes if (problem := p.ended())), *unborn])

    def __reduce__(self) -> tuple[Callable[..., StoredRun], tuple[Any, ...]]:
        """Pickles a run as its path; the other process maps the files again."""
        about = self._mirror.described if self._mirror is not None else None
        return _reopen, (self._path.absolute(), self.chosen_ranks, about)

    @property
    def path(self) -> str:
        """The path or URL of the run."""
        return str(self._path) if self._mirror is None else self._mirror.url

    @property
    def info(self) -> RunInfo:
        """run.json."""
        return self._info

    @property
    def ended(self) -> str:
        """ "" after a clean end, else which process ended otherwise, how far it came and why."""
        return self._ended

    @functools.cached_property
    def _lacks(self) -> tuple[Missing, ...]:
        shown = _lacks(self._processes, self._unborn, self._info, self.chosen_ranks)
        return (*shown, *watched(self))

    @property
    def missing(self) -> Sequence[Missing]:
        """What the run lacks according to its files, and what was requested so far and could not be
        read.
        """
        known = {missing.where for missing in self._lacks}
        return (*self._lacks, *(m for where, m in self._lost.items() if where not in known))

    @property
    def processes(self) -> Sequence[ProcessInfo]:
        """The processes that wrote this run, in the order of their calls and records."""
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
                    existing = self._programs.get(program.id)
                    if existing is not None and existing != program:
                        fresh = f"{program.id}@{place}"
                        process.renamed[program.id] = fresh
                        program = msgspec.structs.replace(program, id=fresh)
                    self._programs[program.id] = program
        return self._programs

    @property
    def notes(self) -> Sequence[Note]:
        """All notes, and those about shards that were damaged when they were first asked for."""
        if self._notes is None:
            self._notes = tuple(
                note for p in self._processes for note in notes_of(p)
            ) + _absent_ranks(self._processes, self._info, self.chosen_ranks)
        return self._notes

    @property
    def steps(self) -> Sequence[Step]:
        """All ends of steps."""
        return tuple(step for p in self._processes for step in p.decode(STEP, journal.decode_step))

    @functools.cached_property
    def collectives(self) -> Sequence[Collective]:
        """All collectives, process by process, in the order in which each issued them."""
        decode = journal.decode_collective
        return tuple(c for p in self._processes for c in p.decode(COLLECTIVE, decode))

    @property
    def readers(self) -> Sequence[ProcessReader]:
        """The folders of the processes, as they are read."""
        return tuple(self._processes)

    def calls_as(self, form: type[T]) -> Iterator[T]:
        """Every call in turn as a Struct of some of its fields, which all have defaults; many are
        decoded at once.
        """
        for process in self._processes:
            yield from process.decode_many(process.index.calls_at, form)

    def records_as(self, form: type[T]) -> Iterator[T]:
        """Every record in turn as a Struct of some of its fields, like `calls_as`."""
        for process in self._processes:
            yield from process.decode_many(process.index.records_at, form)

    def parents(self) -> Column:
        """Of every call the position of the one that holds it, -1 for none."""
        return np.concatenate([process.column("parent") for process in self._processes])

    def columns(self) -> Columns:
        """Arrays over all calls and records, from the indexes."""
        parts = [p.columns(first) for p, first in zip(self._processes, self._names_at, strict=True)]
        names = [name for p in self._processes for name in p.index.names]
        arrays = (
            np.concatenate([getattr(part, f.name) for part in parts])
            if len(parts) > 1
            else getattr(parts[0], f.name)
            for f in fields(Columns)[1:]
        )
        return Columns(names, *arrays)

    def array(self, record: int) -> Array:
        """Elements of a record: read-only, dtype kept, a view of the mapped file (increments are
        put together in memory).

        Raises ElementsMissing with the reason; IndexError when there is no such record.
        """
        process, local = self._at(record)
        if process.index.columns["elements"][local] == NONE:
            raise ElementsMissing(
                self._record(record).why or f"record {record}: elements were not kept"
            )
        try:
            return self._elements(process, local, record)
        except ElementsMissing as error:
            self._note_loss(process, local, error)
            raise

    def _elements(self, process: ProcessReader, local: int, record: int) -> Array:
        kind = int(process.index.columns["elements"][local])
        dtype, shape = process.dtype(local), process.index.shape(local)
        if kind == KEPT:
            data = process.bytes(local)
            self._verify(process, local, record, data)
            return view_elements(data, dtype, shape, record)
        if kind == INCREMENT:
            whole = process.rebuild(local, dtype, shape, record, self._external)
            self._verify(process, local, record, whole.reshape(-1).view(np.uint8))
            return whole
        return view_elements(self._external(record), dtype, shape, record)

    def _note_loss(self, process: ProcessReader, local: int, error: ElementsMissing) -> None:
        """Adds a shard of which something could not be read to what the run lacks."""
        shard = int(process.index.columns["shard"][local])
        if shard >= 0:  # else in a file of the user's
            where = f"{process.folder.name}/{shard_name(shard)}"
            kind = Lack.FOREIGN if isinstance(error, _Foreign) else Lack.DAMAGED
            self._lost.setdefault(where, Missing(kind, where, str(error)))

    def _verify(self, process: ProcessReader, local: int, record: int, data: Bytes) -> None:
        """Compares elements with their hash, where one was taken, once."""
        if record in self._verified:
            return
        digest = process.index.columns["hash"][local].tobytes()
        if any(digest) and xxhash.xxh3_128_digest(data.data) != digest:
            file = shard_name(int(process.index.columns["shard"][local]))
            raise _Foreign(
                f"the elements of record {record} in {process.folder / file} are not those that "
                "the journal names (the hash differs): the run was damaged, or put together from "
                "two; copy it again"
            )
        self._verified.add(record)

    def raw(self, record: int) -> tuple[int, int] | None:
        """(address, nbytes) of the elements where they lie contiguously in a mapped shard, for
        kernels; None where they do not.

        The address is good while this run is alive. Raises ElementsMissing when the shard is cut
        off.
        """
        process, local = self._at(record)
        columns, shard = process.index.columns, process.mapped(local)
        if shard is None:
            return None
        nbytes = int(columns["nbytes"][local])
        if nbytes != math.prod(process.index.shape(local)) * process.dtype(local).itemsize:
            return None
        if record not in self._verified:
            self.array(record)
        return shard.address(int(columns["offset"][local]), nbytes), nbytes

    def location(self, record: int) -> tuple[str, int, int] | None:
        """(file, offset from its start, nbytes) where the elements lie as one piece of a shard;
        None where they do not.
        """
        process, local = self._at(record)
        columns, shard = process.index.columns, process.mapped(local)
        if shard is None:
            return None
        start = shard.offset() + int(columns["offset"][local])
        return str(shard.path), start, int(columns["nbytes"][local])

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

    def _at(self, record: int) -> tuple[ProcessReader, int]:
        if not 0 <= record < len(self._records):
            raise IndexError(f"record {record} of {len(self._records)}")
        process = self._processes[bisect_right(self._record_bases, record) - 1]
        return process, record - process.record_base

    def _record(self, number: int) -> Record:
        process, local = self._at(number)
        line = int(process.index.records_at[local])
        return _placed(process, number, process.decode_line(line, journal.decode_record))

    def _every_record(self) -> Iterator[Record]:
        for process in self._processes:
            records = process.decode_many(process.index.records_at, Record)
            for number, record in enumerate(records, process.record_base):
                yield _placed(process, number, record)

    def _call(self, number: int) -> Call:
        process = self._processes[bisect_right(self._call_bases, number) - 1]
        local = number - process.call_base
        call = process.decode_line(int(process.index.calls_at[local]), journal.decode_call)
        return self._linked(process, number, call, int(process.index.columns["parent"][local]))

    def _every_call(self) -> Iterator[Call]:
        for process in self._processes:
            calls = process.decode_many(process.index.calls_at, Call)
            parents = process.index.columns["parent"].tolist()
            for number, (call, parent) in enumerate(
                zip(calls, parents, strict=True), process.call_base
            ):
                yield self._linked(process, number, call, parent)

    def _linked(self, process: ProcessReader, number: int, call: Call, parent: int) -> Call:
        """Returns a call with the numbers of this run. parent: its position in its process."""
        _force(call, "id", number)
        _force(call, "parent", parent + process.call_base if parent >= 0 else -1)
        for ref in call.refs:
            if not 0 <= ref.record < process.records:
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
        if not isinstance(place, External):
            raise UnreadableRun(f"record {number} has another place in the index than in {JOURNAL}")
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
                f"{place.offset + place.nbytes}, the file has {data.size}; it is not the file of "
                "the capture"
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


def _placed(process: ProcessReader, number: int, record: Record) -> Record:
    """Returns a record with the numbers of its run."""
    _force(record, "id", number)
    place = record.elements
    if isinstance(place, Kept) and process.shard_base:
        place = Kept(place.shard + process.shard_base, place.offset, place.nbytes)
        _force(record, "elements", place)
    elif isinstance(place, Increment):
        base, shard = place.base + process.record_base, place.shard + process.shard_base
        place = Increment(base, place.axis, shard, place.offset, place.nbytes)
        _force(record, "elements", place)
    return record


def _reopen(path: Path, ranks: Collection[int] | None, about: Mirrored | None) -> StoredRun:
    held = Mirror(path, about) if about is not None else None  # until the readers hold it
    return open_run(path if held is None else held.path, ranks=ranks)


_RANKS = 1 << 17  # more are named by no launcher


def notes_of(process: ProcessReader) -> list[Note]:
    """Returns the notes of a process, why it stopped where its medium failed, and
    damaged shards.
    """
    noted = process.decode(NOTE, journal.decode_note)
    damaged = [Note("error", missing.text) for missing in _damaged_shards(process)]
    return [*noted, *_stopped(process), *damaged]


def _stopped(process: ProcessReader) -> list[Note]:
    if process.left.ended != FAILED:
        return []
    return [Note(STOPPED, process.left.error or "no reason was left")]


def _damaged_shards(process: ProcessReader) -> list[Missing]:
    """Yields each shard that is missing or truncated, with the number of tensors in the missing
    part, and each that is not the one the journal refers to.
    """
    columns = process.index.columns
    is_stored = (columns["elements"] == KEPT) | (columns["elements"] == INCREMENT)
    shards = np.where(is_stored, columns["shard"], process.shard_count)
    ends = columns["offset"] + columns["nbytes"]
    # np.unique of an array alone would load numpy.ma
    begin = shards[np.flatnonzero(np.diff(shards, prepend=-1))]
    numbers = np.array(sorted(set(begin.tolist())), np.int64)
    last = np.zeros(numbers.size, np.int64)  # a number may be any, where an index is damaged
    np.maximum.at(last, np.searchsorted(numbers, shards), ends)
    damaged = []
    for number, end in zip(numbers.tolist(), last.tolist(), strict=True):
        if number == process.shard_count:  # of those that are stored elsewhere
            continue
        shard = process.shard(number)
        try:
            shard.require(end)
        except ElementsMissing as error:
            lost = shard.lost(columns["offset"][shards == number], ends[shards == number])
            text = f"elements of {lost} of {process.records} tensors cannot be read: {error}"
            damaged.append(Missing(Lack.DAMAGED, _where(process, shard), text))
        else:
            if isinstance(shard, Shard) and _is_foreign(process, shard, shards == number):
                text = (
                    f"{shard.path} holds the elements of another journal than the one beside it: "
                    "copy the run again, all of it"
                )
                damaged.append(Missing(Lack.FOREIGN, _where(process, shard), text))
    return damaged


def _where(process: ProcessReader, shard: ReadShard) -> str:
    name = shard.path.name if not isinstance(shard, RemoteShard) else ""
    return f"{process.folder.name}/{name}".rstrip("/")


def _is_foreign(process: ProcessReader, shard: Shard, in_shard: Column) -> bool:
    """Whether a complete shard states that it holds other tensors than the journal names."""
    stated = shard.said_to_hold() if process.left.ended == CLEAN else ""
    if not stated:
        return False
    columns = process.index.columns
    records = np.flatnonzero(in_shard & (columns["nbytes"] > 0))
    _, firsts = np.unique(columns["offset"][records], return_index=True)
    digests = columns["hash"][records[firsts]]
    return stated != holds([digests.tobytes()])


def _lacks(
    processes: Sequence[ProcessReader],
    unborn: Sequence[str],
    info: RunInfo,
    chosen: Collection[int] | None,
) -> tuple[Missing, ...]:
    """Returns what a run lacks according to its files. unborn: process folders without a journal,
    in sentences.
    """
    out = []
    for process in processes:
        name = process.folder.name
        if process.is_running:
            text = f"{process.ended()}; wait for its end, or follow it with --watch"
            out.append(Missing(Lack.RUNNING, name, text))
        elif ended := process.ended():
            out.append(Missing(Lack.CUT, name, f"{ended}; capture it again, or copy it again"))
        if process.is_altered():
            text = (
                f"{process.folder / JOURNAL} is not as it was written (its hash differs): copy the "
                "run again"
            )
            out.append(Missing(Lack.FOREIGN, f"{name}/{JOURNAL}", text))
        out += _damaged_shards(process)
    out += [Missing(Lack.CUT, text.partition(" ")[0], text) for text in unborn]
    absent = _absent_ranks(processes, info, chosen)
    out += [Missing(Lack.RANK, "", note.text) for note in absent]
    return (*out, *_absent_processes(processes, len(unborn), info, chosen))


def _absent_processes(
    processes: Sequence[ProcessReader], unborn: int, info: RunInfo, chosen: Collection[int] | None
) -> tuple[Missing, ...]:
    """Returns the statement that process folders are missing which existed when the
    command ended.
    """
    written = info.settings.get(WRITTEN)
    there = len(processes) + unborn
    if chosen is not None or not isinstance(written, int) or written <= there:
        return ()
    text = f"{there} of the {written} processes that wrote this run are in it: copy it again"
    return (Missing(Lack.RANK, "", text),)


def _absent_ranks(
    processes: Sequence[ProcessReader], info: RunInfo, chosen: Collection[int] | None
) -> tuple[Note, ...]:
    """Returns a note of the ranks that their launcher started and that wrote nothing to the run.
    chosen: the ranks that are read, None for all.
    """
    there = {process.info.rank for process in processes}
    size = min(max((p.info.world_size for p in processes), default=0), _RANKS)
    absent = sorted(set(range(size)) - there)
    if not absent or chosen is not None or info.options.get("ranks") is not None:
        return ()
    some = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    return (
        Note(
            "ranks",
            f"rank {some} of {size} left nothing in this run: it called no model, could not write, "
            "or ended before",
        ),
    )


def _emptiness(path: Path, processes: int, notes: Sequence[Note], ended: str) -> str:
    """Returns the message for a run with no call and no record."""
    note_lines = "".join(f"\n  it says: {note.kind}: {note.text}" for note in notes[:10])
    return (
        f"{path} is an empty run: {processes} process folder(s), no call and no record"
        f"{f'; {ended}' if ended else ''}{note_lines}\n  "
        + (
            "it ended before anything was captured: remove the cause and capture again"
            if ended
            else "nothing was captured: check that the command runs a model in a process "
            "that whence can see, and what was selected"
        )
    )


_OF_CALLS = ("scope", "root", "op_type", "source", "number", "program", "no_program")
_OF_RECORDS = ("dtype", "shape")


def some_calls(run: StoredRun, numbers: Column) -> Iterator[Call]:
    """Calls of a run of one process, by their numbers in ascending order."""
    (process,) = run.readers
    calls = process.decode_many(process.index.calls_at[numbers], Call)
    parents = process.index.columns["parent"][numbers].tolist()
    known: dict[Any, Any] = {}
    for number, parent, call in zip(numbers.tolist(), parents, calls, strict=True):
        _share(call, _OF_CALLS, known)
        for ref in call.refs:
            _share(ref, ("slot",), known)
        _force(call, "id", number)
        _force(call, "parent", parent)
        yield call


def some_records(run: StoredRun, numbers: Column) -> Iterator[Record]:
    """Records of a run of one process, by their numbers in ascending order."""
    (process,) = run.readers
    records = process.decode_many(process.index.records_at[numbers], Record)
    known: dict[Any, Any] = {}
    for number, record in zip(numbers.tolist(), records, strict=True):
        _share(record, _OF_RECORDS, known)
        _force(record, "id", number)
        yield record


def _share(item: msgspec.Struct, fields: Sequence[str], known: dict[Any, Any]) -> None:
    """Makes fields refer to one object for equal values."""
    for name in fields:
        value = getattr(item, name)
        _force(item, name, known.setdefault(value, value))


def announce(run: StoredRun, records: Iterable[int]) -> None:
    """Announces whose elements are read next, in this order: those in an object store are then
    fetched in advance, as far as memory allows. Does nothing for a run of this machine.
    """
    readers = run.readers
    mirror = mirror_of(readers[0].folder.parent) if readers else None
    if mirror is None:
        return
    first_records = [reader.record_base for reader in readers]
    ranges: list[FileRange] = []
    for record in records:
        reader = readers[bisect_right(first_records, record) - 1]
        columns, local = reader.index.columns, record - reader.record_base
        if columns["elements"][local] not in (KEPT, INCREMENT):
            continue
        shard = reader.shard(int(columns["shard"][local]))
        if isinstance(shard, RemoteShard):
            with contextlib.suppress(ElementsMissing):  # told where it is looked at
                ranges.append(
                    shard.range(int(columns["offset"][local]), int(columns["nbytes"][local]))
                )
    mirror.announce(ranges)
