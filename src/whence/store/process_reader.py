"""Reads one process folder of a run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from whence.dtypes import DTYPES, Array, DType
from whence.errors import ElementsMissing, UnreadableRun
from whence.records import Program
from whence.records.columns import Columns
from whence.records.marks import STOPPED, WRITING
from whence.store import index_builder, journal, line_digests
from whence.store.folder import INDEX, JOURNAL, ProcessInfo, is_writing, shard_name
from whence.store.index import (
    CALL_COLUMNS,
    INCREMENT,
    KEPT,
    LATER,
    NAME_COLUMNS,
    NONE,
    RECORD_COLUMNS,
    Column,
)
from whence.store.journal import NOTE, OTHER, PROGRAM
from whence.store.packed_reference import PackedReference
from whence.store.packed_shard import PackedShard, packed_name
from whence.store.remote_run import mirror_of
from whence.store.shards import Bytes, ReadShard, Shard, forget, map_file
from whence.store.status import CLEAN, FAILED, RECOVERED, RUNNING, read_status

T = TypeVar("T")
_LINES = 4096  # that are decoded at once
_MAPPED_BYTES = 128 << 20  # of shards that stay in memory for having been read
_GROWN_BYTES = 32 << 20  # of tensors put together from increments that are kept for the next ones
COLUMNS = (*RECORD_COLUMNS, "count", *CALL_COLUMNS, "ref_call", "ref_slot", "ref_record")


class ProcessReader:
    """One process folder: its journal as of now, its index, its shards. Numbers are local to the
    process.
    """

    def __init__(self, folder: Path, info: ProcessInfo) -> None:
        self.folder, self.info = folder, info
        # before the journal: a clean end read here means the journal is whole
        self.left = read_status(folder)
        try:
            self.journal: Bytes = map_file(folder / JOURNAL)
        except OSError as error:
            raise UnreadableRun(
                f"cannot read {folder / JOURNAL}: {error.strerror or error}"
            ) from error
        self.index = index_builder.load_or_build(folder, self.journal)
        self.records, self.calls = self.index.records_at.size, self.index.calls_at.size
        shards = self.index.columns["shard"]
        self.shard_count = int(shards.max()) + 1 if shards.size else 0
        self.record_base = self.call_base = self.shard_base = 0
        self.renamed: dict[str, str] = {}
        self._shards: dict[int, ReadShard] = {}
        self._remote = mirror_of(folder.parent)
        self._reference = PackedReference(folder.parent)
        self._grown: dict[int, Array] = {}
        self._grown_bytes = self._read_bytes = 0

    @functools.cached_property
    def said(self) -> Mapping[str, Column]:
        """The columns `line_digest`, `call_kind` and `call_says` (`store/line_digests.py`)."""
        columns = self.index.columns
        if all(name in columns for name in LATER):
            return columns
        return line_digests.of_journal(self.journal, columns["line_kind"].size)

    @functools.cached_property
    def is_running(self) -> bool:
        """Whether its process still writes."""
        return self.left.ended == RUNNING and is_writing(self.folder, self.info)

    def ended(self) -> str:
        """Returns how it ended unless that was a clean end of the whole journal, then ""."""
        process = f"rank {self.info.rank} ({self.info.host}, pid {self.info.pid})"
        damage = self.index.damage
        problems = []
        if self.is_running:
            problems.append(f"{WRITING}: {self._extent()} so far")
        elif self.left.ended in (RUNNING, RECOVERED):
            problems.append(
                "ended uncleanly (killed, crashed or cut off from its folder): "
                f"{self._extent()} were saved, what came after is missing"
            )
        elif self.left.ended == FAILED:
            problems.append(
                f"stopped: {self.left.error or 'no reason was left'} ({self._extent()} were saved)"
            )
        elif stopped := self._stopped():
            problems.append(f"stopped: {stopped} ({self._extent()} were saved)")
        if damage is not None and not (damage.torn and problems):
            problems.append(
                f"journal damaged at line {damage.line} (byte {damage.byte}): {damage.reason}; "
                "what follows was not read"
            )
        elif self.left.ended == CLEAN and 0 <= self.left.lines != self._lines():
            problems.append(
                f"its journal has {self._lines()} of the {self.left.lines} lines that were "
                f"written: {self._extent()} are there"
            )
        return f"{process} {'; '.join(problems)}" if problems else ""

    def _stopped(self) -> str:
        """Returns why its capture stopped before the program did, as noted; "" where it did not."""
        notes = self.decode(NOTE, journal.decode_note)
        return next((note.text for note in notes if note.kind == STOPPED), "")

    def _lines(self) -> int:
        """Returns the number of lines of its journal of the kinds that this version writes."""
        return int(np.count_nonzero(self.index.columns["line_kind"] != OTHER))

    def is_altered(self) -> bool:
        """Whether the journal has its original length and another content."""
        stated = self.left.journal if self.left.ended == CLEAN and not self.ended() else ""
        return bool(stated) and xxhash.xxh3_128_hexdigest(self.journal.data) != stated

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

    def shard(self, number: int) -> ReadShard:
        shard = self._shards.get(number)
        if shard is None:
            shard = self._shards[number] = self._new_shard(number)
        return shard

    def _new_shard(self, number: int) -> ReadShard:
        packed, remote = packed_name(number), self._remote
        if remote is not None:
            file = remote.packed(self.folder.name, packed)
            if file is None:
                return remote.shard(self.folder.name, shard_name(number))
            return PackedShard(file, self._reference.piece)
        if (self.folder / packed).exists():
            return PackedShard(self.folder / packed, self._reference.piece)
        return Shard(self.folder / shard_name(number))

    def mapped(self, record: int) -> Shard | None:
        """Returns the shard in which the elements are stored as they are, in one piece; None where
        they are not.
        """
        columns = self.index.columns
        if columns["elements"][record] != KEPT:
            return None
        shard = self.shard(int(columns["shard"][record]))
        return shard if isinstance(shard, Shard) else None

    def bytes(self, record: int) -> Bytes:
        columns = self.index.columns
        self._note_read(int(columns["nbytes"][record]))
        return self.shard(int(columns["shard"][record])).data(
            int(columns["offset"][record]), int(columns["nbytes"][record])
        )

    def _note_read(self, nbytes: int) -> None:
        """Frees the memory of shard bytes that were read, from time to time. Bytes still in use are
        reloaded from the file.
        """
        self._read_bytes += nbytes
        if self._read_bytes > _MAPPED_BYTES:
            self._read_bytes = nbytes
            for shard in self._shards.values():
                shard.forget()

    def rebuild(
        self,
        record: int,
        dtype: DType,
        shape: tuple[int, ...],
        number: int,
        external: Callable[[int], Bytes],
    ) -> Array:
        """Joins an increment and all it follows, without recursion: a cache may have grown ten
        thousand times. Starts from the last joined tensor that it grew from.
        """
        columns, index = self.index.columns, self.index
        if (known := self._grown.get(record)) is not None and known.shape == shape:
            return known
        current, links = self._growth(record, number)
        before = self._grown.get(current)
        increments = [link[0] for link in links]
        stored = int(columns["nbytes"][increments].sum()) + (
            before.nbytes if before is not None else int(columns["nbytes"][current])
        )
        if stored != math.prod(shape) * dtype.itemsize or any(
            self.dtype(c) is not dtype for c in (current, *increments)
        ):
            raise ElementsMissing(
                f"record {number}: {len(links)} increments of {stored} bytes in all do not make "
                f"{dtype.name} {shape}"
            )
        for _, axis, grown, base_shape in links:
            if not _continues(base_shape, grown, axis):
                raise ElementsMissing(
                    f"record {number}: an increment from shape {base_shape} to {grown} along axis "
                    f"{axis} is not one"
                )
        # All of them lie inside their files: what is allocated next is bounded by what is there.
        parts = [self.bytes(c) for c in increments]
        first = index.shape(current)
        if before is None:
            stored_bytes = (
                self.bytes(current)
                if columns["elements"][current] == KEPT
                else external(current + self.record_base)
            )
            before = view_elements(stored_bytes, dtype, first, number)
        try:
            whole = np.empty(shape, dtype.numpy)
        except (ValueError, MemoryError) as error:
            raise ElementsMissing(f"record {number}: {dtype.name} {shape}: {error}") from error
        whole[tuple(slice(extent) for extent in first)] = before
        for part, (_, axis, grown, base_shape) in zip(parts, links, strict=True):
            added = (*grown[:axis], grown[axis] - base_shape[axis], *grown[axis + 1 :])
            place = [slice(extent) for extent in grown]
            place[axis] = slice(base_shape[axis], grown[axis])
            whole[tuple(place)] = view_elements(part, dtype, added, number)
        whole.flags.writeable = False
        self._grown[record] = whole
        self._grown_bytes += whole.nbytes
        while self._grown_bytes > _GROWN_BYTES:
            self._grown_bytes -= self._grown.pop(next(iter(self._grown))).nbytes
        return whole

    def _growth(
        self, record: int, number: int
    ) -> tuple[int, list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]]:
        """The record that a tensor grew from, whole or known, and each increment on the way back to
        it, the last first: (record, axis, shape, shape before).
        """
        columns, index = self.index.columns, self.index
        links = []
        current = record
        while columns["elements"][current] == INCREMENT and current not in self._grown:
            base, axis = int(columns["base"][current]), int(columns["axis"][current])
            links.append((current, axis, index.shape(current), index.shape(base)))
            current = base
        if columns["elements"][current] == NONE:
            raise ElementsMissing(
                f"record {number} continues record {current + self.record_base}, whose elements "
                "were not kept"
            )
        return current, links

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

    def decode_many(self, lines: Column, form: type[T]) -> Iterator[T]:
        """Yields lines of one kind, many decoded at once."""
        decoder, starts = msgspec.json.Decoder(form), self.index.columns["line_start"]
        journal = self.journal.data
        for first in range(0, lines.size, _LINES):
            part = lines[first : first + _LINES]
            begin, end = starts[part].tolist(), starts[part + 1].tolist()
            joined = b"".join([journal[a:b] for a, b in zip(begin, end, strict=True)])
            try:
                decoded: list[T] = decoder.decode_lines(joined)
            except (msgspec.DecodeError, UnicodeDecodeError):
                decoded = [self.decode_line(line, decoder.decode) for line in part.tolist()]
            yield from decoded
            forget(self.journal, begin[0], end[-1])

    def columns(self, first_name: int) -> Columns:
        """Arrays over the calls and records of this process. first_name: where its names begin."""
        columns = self.index.columns
        scope, root, op, slot, dtype = (
            columns[name] + first_name for name in ("scope", "root", "op", "ref_slot", "dtype")
        )
        return Columns(
            self.index.names,
            *(scope, root, op, columns["rank"], columns["step"], columns["order"]),
            *(np.diff(columns["refs_at"]), slot, self.column("ref_record")),
            *(dtype, self._counts(), columns["elements"] != NONE),
        )

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
        starts, extents = self.index.columns["shape_at"], self.index.columns["shape"]
        if not self.records:
            return np.empty(0, np.int64)
        # reduceat needs a start inside the array and gives the element itself for an empty range,
        # so a 1 stands behind each shape
        ones = np.insert(extents, starts[1:], 1)
        counts: Column = np.multiply.reduceat(ones, starts[:-1] + np.arange(self.records))
        return counts


def _continues(base: tuple[int, ...], grown: tuple[int, ...], axis: int) -> bool:
    """Whether a shape is another one that grew along an axis."""
    if len(base) != len(grown) or not 0 <= axis < len(grown) or base[axis] > grown[axis]:
        return False
    return (*base[:axis], *base[axis + 1 :]) == (*grown[:axis], *grown[axis + 1 :])


def view_elements(data: Bytes, dtype: DType, shape: tuple[int, ...], record: int) -> Array:
    expected = math.prod(shape) * dtype.itemsize
    if data.size != expected:
        raise ElementsMissing(
            f"record {record}: {dtype.name} {shape} has {expected} bytes, {data.size} are stored; "
            "the run is damaged"
        )
    try:
        view: Array = data.view(dtype.numpy).reshape(shape)
    except ValueError as error:
        raise ElementsMissing(f"record {record}: {dtype.name} {shape}: {error}") from error
    return view
