"""Writes a run while the program that is captured runs: the `Sink` of the native format.

What it knows of the elements stored so far (`_StoredElements`) lets it store equal ones once.

`ProcessFiles` are what one process writes: its journal, and one shard after the other. Order is
everything there: bytes of a tensor are handed to the kernel first, the journal line that speaks
of them afterwards. So a kill at any moment leaves a journal whose every line is true.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np
import xxhash

from whence import disk
from whence.disk import OwnFile, write_all
from whence.dtypes import DTYPES
from whence.errors import StoreFailed
from whence.records import (
    Call,
    Collective,
    Elements,
    External,
    Increment,
    Kept,
    Note,
    Program,
    Record,
    Sketch,
    Statistics,
    Step,
)
from whence.store import folder as folders
from whence.store import index_builder
from whence.store.columns import FileBlocks
from whence.store.folder import JOURNAL, shard_name
from whence.store.journal import Line, encoded, settled
from whence.store.shards import HEADER_BYTES, SHARD_BYTES, STAGING_BYTES, Bytes, Room, ShardWriter
from whence.store.status import (
    CLEAN,
    FAILED,
    NO_DESCRIPTOR,
    RUNNING,
    Ended,
    failure_text,
    leave_status,
    write_status,
)

# a tenth of it, what is left when a shard counts as full, holds one entry of any rank
MIN_HEADER_BYTES = 16 << 10


class _Placed(NamedTuple):
    """Where the elements of a record are stored, the shape of their addition to the shard (None:
    nothing), and why there are none.
    """

    elements: Elements | None
    added_shape: tuple[int, ...] | None
    why: str


class Writer:
    """A `Sink` that writes the folder of one process in the run at `run_path` (made by `create`).

    Nothing is made on disk before the first record, call, program, note or step. Thread-safe. What
    is older than 0.5 s, before the last `step` or `flush`, or not of the last ~1 MB survives
    kill -9; what a call returned from survives a full disk. When the medium fails, the call raises
    StoreFailed, as does every later one, and status.json keeps the reason. A forked child gets
    StoreFailed from a Writer that it inherits and cannot disturb the parent's files.
    """

    def __init__(
        self,
        run_path: str | Path,
        rank: int = 0,
        *,
        max_shard_bytes: int = SHARD_BYTES,
        header_bytes: int = HEADER_BYTES,
        finishing: Callable[[int, int], None] | None = None,
    ) -> None:
        if header_bytes < MIN_HEADER_BYTES or header_bytes % 64:
            raise ValueError(
                f"header_bytes={header_bytes}: need a multiple of 64, at least {MIN_HEADER_BYTES}"
            )
        self._finishing = finishing
        self.run_path = Path(run_path)
        self.rank = rank
        self.folder: Path | None = None
        self._max_shard_bytes = max_shard_bytes
        self._header_bytes = header_bytes
        self._lock = threading.RLock()
        self._files: ProcessFiles | None = None  # while it can be written to
        self._closed = False
        self._failure = ""
        self._failure_raised = False
        self._stored = _StoredElements()
        self._nbytes = 0
        self._stop = threading.Event()

    @property
    def nbytes(self) -> int:
        """Bytes of elements written so far; equal elements count once."""
        return self._nbytes

    @property
    def count(self) -> int:
        """Records added so far."""
        return self._stored.records

    def record(
        self,
        dtype: str,
        shape: tuple[int, ...],
        data: Bytes | None,
        digest: bytes,
        statistics: Statistics | None,
        sketch: Sketch | None,
        *,
        why: str = "",
        stride: tuple[int, ...] = (),
        storage_offset: int = 0,
        device: str = "cpu",
        columns: dict[str, float | None] | None = None,
        subclass: str = "",
        base: tuple[int, int] | None = None,
        external: External | None = None,
    ) -> int:
        """See `Sink.record`. data: contiguous uint8. Raises ValueError when data, dtype and shape
        contradict each other.
        """
        with self._lock:
            files = self._files or self._start()
            stored = self._stored
            number = stored.records
            elements: Elements | None = external
            added_shape = None
            if external is not None:
                if not digest:
                    raise ValueError("external elements need a digest: it is what guards them")
            elif data is not None:
                elements, added_shape, why = self._place(
                    files, dtype, shape, data, digest, base, why
                )
            record = Record(
                number,
                dtype,
                shape,
                stride,
                storage_offset,
                device,
                digest.hex(),
                statistics,
                sketch,
                elements,
                why,
                columns or {},
                subclass,
            )
            try:
                files.append(record)
            except OSError as error:
                self._fail(error)
            if added_shape is not None and isinstance(elements, Kept | Increment):
                files.name(number, dtype, added_shape, elements, digest)
                self._nbytes += elements.nbytes
            stored.add(digest, dtype, shape, elements)
            return number

    def _place(
        self,
        files: ProcessFiles,
        dtype: str,
        shape: tuple[int, ...],
        data: Bytes,
        digest: bytes,
        base: tuple[int, int] | None,
        why: str,
    ) -> _Placed:
        """Stores elements, unless equal ones are stored already."""
        itemsize = DTYPES[dtype].itemsize
        nbytes = math.prod(shape) * itemsize
        if base is None and data.nbytes != nbytes:
            raise ValueError(f"{dtype} {shape} has {nbytes} bytes, got {data.nbytes}")
        if digest and (equal := self._stored.find(digest, dtype, shape, nbytes)) is not None:
            return _Placed(equal, None, why)
        added = shape
        if base is not None:
            grown = self._stored.increment_shape(shape, base, data.nbytes, itemsize)
            if isinstance(grown, str):
                return _Placed(None, None, grown)
            added = grown
        try:
            shard, offset = files.put(data)
        except OSError as error:
            self._fail(error)
        if base is None:
            return _Placed(Kept(shard, offset, nbytes), added, why)
        return _Placed(Increment(*base, shard, offset, data.nbytes), added, why)

    def call(self, call: Call) -> None:
        """See `Sink.call`. Arguments that are not JSON are written as their repr; inf and nan,
        which JSON lacks, as their names.
        """
        self._add(call)

    def program(self, program: Program) -> None:
        """Add a recorded program. Its constants were added as records before."""
        self._add(program)

    def note(self, line: Note | Collective) -> None:
        """Add a note, or a collective."""
        self._add(line)

    collective = note

    def step(self, step: Step) -> None:
        """Add the end of a step and flush."""
        with self._lock:
            self._add(step)
            self._flush()

    def flush(self) -> None:
        """Hand everything added so far to the kernel: it survives a kill of this process from here
        on.
        """
        with self._lock:
            if self._failure:
                self._raise()
            self._flush()

    def sync(self) -> None:
        """`flush`, and wait until it is on the medium (fsync): it survives a loss of power from
        here on.
        """
        with self._lock:
            self.flush()
            try:
                if self._files is not None:
                    self._files.sync()
            except OSError as error:
                self._fail(error)

    def close(self) -> None:
        """Write what is pending, the header of the last shard, the index and the clean end.
        Idempotent.

        On a writer that failed it lets go of the files, and raises only if no call has told of the
        failure yet. The index is an extra: when there is no room for it the run is complete
        without.
        """
        with self._lock:
            self._leave_failure()  # again: there may have been no descriptor for it
            if self._closed:
                return
            self._closed = True
            files = self._files
            if self._failure:
                self._let_go()
                if not self._failure_raised:
                    self._raise()
                return
            if files is None:
                return
            try:
                files.finish()
                write_status(files.folder, Ended(CLEAN, "", files.lines, files.digest))
            except OSError as error:
                self._fail(error)
            finally:
                self._let_go()
            with (
                contextlib.suppress(OSError, MemoryError),
                FileBlocks(files.folder / JOURNAL) as journal,
            ):
                index_builder.write(journal, files.folder, self._finishing)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, line: Call | Program | Note | Step | Collective) -> None:
        with self._lock:
            files = self._files or self._start()
            try:
                files.append(settled(line))
            except OSError as error:
                self._fail(error)

    # -- everything below runs under the lock

    def _flush(self) -> None:
        if self._files is not None:
            try:
                self._files.flush()
            except OSError as error:
                if error.errno in NO_DESCRIPTOR:  # the program has them all: it waits in memory
                    return
                self._fail(error)

    def _flush_if_old(self) -> None:
        with self._lock:
            if self._files is not None and self._files.is_old:
                try:
                    self._flush()
                except StoreFailed:
                    # nobody listens in this thread; the next call raises it
                    self._failure_raised = False

    def _start(self) -> ProcessFiles:
        if self._failure:
            self._raise()
        if self._closed:
            raise StoreFailed(
                f"cannot add to {self.folder or self.run_path}: the writer was closed"
            )
        self._process = os.getpid()
        try:
            process = folders.this_process(
                self.rank,
                datetime.now().astimezone().isoformat(timespec="seconds"),
                self._header_bytes,
            )
            self.folder = folders.make_process_folder(self.run_path, self.rank, process)
            write_status(self.folder, Ended(RUNNING))
            files = ProcessFiles(self.folder, self._header_bytes, self._max_shard_bytes)
        except OSError as error:
            self._fail(error)
        self._files = files
        me = weakref.ref(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _disown(me))
        threading.Thread(
            target=_flush_regularly, args=(me, self._stop), name="whence-flush", daemon=True
        ).start()
        return files

    def _fail(self, error: OSError) -> NoReturn:
        self._failure = failure_text(self.folder or self.run_path, self.count, error)
        if self._files is not None:
            self._files.give_up()
        self._let_go()
        self._leave_failure()
        self._failure_raised = True
        raise StoreFailed(self._failure) from error

    def _leave_failure(self) -> None:
        if self._failure and self.folder is not None and self._process == os.getpid():
            leave_status(self.folder, Ended(FAILED, self._failure))

    def _raise(self) -> NoReturn:
        self._failure_raised = True
        raise StoreFailed(self._failure)

    def _let_go(self) -> None:
        self._stop.set()
        if self._files is not None:
            self._files.close()
            self._files = None
        self._stored.forget()


def _flush_regularly(writer: weakref.ref[Writer], stop: threading.Event) -> None:
    """Flushes within _FLUSH_S: a program that hangs adds nothing more, and its last calls matter
    most.
    """
    while not stop.wait(_FLUSH_S / 2):
        alive = writer()
        if alive is None:
            return
        alive._flush_if_old()
        del alive


def _disown(writer: weakref.ref[Writer]) -> None:
    """Resets the writer in a forked child: the lock may be held by a thread that the child lacks,
    and the files belong to the parent.
    """
    inherited = writer()
    if inherited is not None and inherited._files is not None:
        inherited._lock = threading.RLock()
        inherited._failure = (
            f"this writer belongs to process {os.getppid()}, which forked this one; a "
            "process that captures makes its own writer"
        )
        inherited._failure_raised = True
        inherited._let_go()


REMEMBERED = 1 << 17
"""How many digests are remembered; about 300 bytes each, so at most 40 MB. Older ones are
forgotten.
"""

_Stored = tuple[str, tuple[int, ...], Elements]


class _StoredElements:
    """Which records have elements, and where the elements of recent digests lie."""

    def __init__(self) -> None:
        self.records = 0  # added so far
        self._has_elements = bytearray()
        # two generations: forgetting costs nothing per record
        self._recent: dict[bytes, _Stored] = {}
        self._older: dict[bytes, _Stored] = {}

    def add(
        self, digest: bytes, dtype: str, shape: tuple[int, ...], elements: Elements | None
    ) -> None:
        """Add the next record."""
        self.records += 1
        self._has_elements.append(elements is not None)
        if elements is None or not digest:
            return
        if len(self._recent) >= REMEMBERED // 2:
            self._older, self._recent = self._recent, {}
        self._recent[digest] = (dtype, shape, elements)

    def find(
        self, digest: bytes, dtype: str, shape: tuple[int, ...], nbytes: int
    ) -> Elements | None:
        """Returns where equal bytes are stored already. Another shape or dtype over the same bytes
        may share them, but not an increment.
        """
        stored = self._recent.get(digest) or self._older.get(digest)
        if stored is None:
            return None
        stored_dtype, stored_shape, elements = stored
        if isinstance(elements, Increment):
            return elements if stored_dtype == dtype and stored_shape == shape else None
        return elements if elements.nbytes == nbytes else None

    def increment_shape(
        self, shape: tuple[int, ...], base: tuple[int, int], nbytes: int, itemsize: int
    ) -> tuple[int, ...] | str:
        """Returns the shape of an increment of `nbytes`, or why they cannot be one."""
        record, axis = base
        if not 0 <= record < self.records:
            raise ValueError(f"base record {record} of {self.records}")
        if not 0 <= axis < len(shape):
            raise ValueError(f"increment along axis {axis} of shape {shape}")
        if not self._has_elements[record]:
            return f"only what follows record {record} was seen, and its elements were not kept"
        row = math.prod(shape[:axis] + shape[axis + 1 :]) * itemsize
        extent, remainder = divmod(nbytes, row) if row else (0, nbytes)
        if remainder or extent > shape[axis]:
            raise ValueError(f"{nbytes} bytes are no part of shape {shape} along axis {axis}")
        return (*shape[:axis], extent, *shape[axis + 1 :])

    def forget(self) -> None:
        """Forget the digests."""
        self._recent, self._older = {}, {}


_FLUSH_S = 0.5
_JOURNAL_BYTES = 256 << 10
_LINE_BYTES = 4 << 10
"""Bytes reserved for a line that waits to be encoded; longer lines do not wait."""
_MANY = 24  # references of a call, each 150 bytes at most with names of the usual length
TOGETHER = 64
"""Lines that are encoded at once. More live objects would trigger the garbage collector."""


class ProcessFiles:
    """Appends lines to the journal and tensors to the shards of a process folder. Not safe to use
    from several threads; every method may raise OSError.
    """

    def __init__(self, folder: Path, header_bytes: int, max_shard_bytes: int) -> None:
        self.folder = folder
        self._shard: ShardWriter | None = None
        self._shards = 0
        self._header_bytes = header_bytes
        self._max_shard_bytes = max_shard_bytes
        self._staging = bytearray(STAGING_BYTES)
        self._lines: list[Line | msgspec.Raw] = []  # not encoded yet
        self.lines = 0
        """Lines of the journal that are encoded."""
        self._hash = xxhash.xxh3_128()  # of the journal as far as it is written
        self._journal = bytearray()
        self._journal_end = 0
        self._journal_file = OwnFile(folder / JOURNAL)
        self._has_room = False
        self._journal_room = Room(self._journal_file)
        self._flushed_at = time.monotonic()

    @property
    def digest(self) -> str:
        """Hash of the journal as far as it is written."""
        return self._hash.hexdigest()

    @property
    def is_old(self) -> bool:
        """Whether lines have waited for more than half of _FLUSH_S since the last flush."""
        waiting = self._lines or self._journal
        return bool(waiting) and time.monotonic() - self._flushed_at > _FLUSH_S / 2

    def append(self, line: Line | msgspec.Raw) -> None:
        """Adds a line that nothing changes any more (`journal.settled`) to the journal, and passes
        the lines to the kernel when they are many or old. Room for the line is allocated when this
        returns.
        """
        lines = self._lines
        lines.append(line)
        kind = line.__class__  # no call: this is done for every record and call of a program
        if kind is Record:
            long: object = line.columns  # type: ignore[union-attr]
        elif kind is Call:
            long = (
                line.notes or line.placements or line.aliases or line.refs[_MANY:]  # type: ignore[union-attr]
            )
        else:
            long = kind is msgspec.Raw and len(memoryview(line)) > _LINE_BYTES  # type: ignore[arg-type]
        if long or len(lines) >= TOGETHER:
            self._encode()
            if (
                len(self._journal) > _JOURNAL_BYTES
                or time.monotonic() - self._flushed_at > _FLUSH_S
            ):
                self.flush()
            self._have_room()
        elif not self._has_room:
            self._have_room()

    def _have_room(self) -> None:
        """Allocates blocks for the waiting data, and for as many lines as are encoded together."""
        end = self._journal_end + len(self._journal) + (len(self._lines) + TOGETHER) * _LINE_BYTES
        self._journal_room.have(end, _JOURNAL_BYTES)
        self._has_room = True

    def _encode(self) -> None:
        text = encoded(self._lines)
        self.lines += len(self._lines)
        self._lines = []
        self._journal += text

    def put(self, data: Bytes) -> tuple[int, int]:
        """Append bytes to the current shard, or to a new one when it is full. Returns (shard,
        offset).
        """
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise ValueError(
                f"data must be contiguous uint8, got {data.dtype} with strides {data.strides}"
            )
        nbytes = data.nbytes
        if data.ndim != 1:
            data = data.reshape(-1)
        shard = self._shard
        if (
            shard is None
            or shard.crowded
            or (shard.end > 0 and shard.end + nbytes > self._max_shard_bytes)
        ):
            shard = self._next_shard()
        try:
            return self._shards - 1, shard.put(data, nbytes)
        except OSError:
            # what the failed write took is given back, so that there is room for what waits
            with contextlib.suppress(OSError):
                shard.cut()
                self.flush()
            raise

    def name(
        self,
        record: int,
        dtype: str,
        shape: tuple[int, ...],
        elements: Kept | Increment,
        digest: bytes,
    ) -> None:
        """Names the bytes that were `put` last in the header of their shard: the elements of a
        record of this digest.
        """
        assert self._shard is not None
        self._shard.name(
            record,
            dtype,
            shape,
            elements.offset,
            elements.nbytes,
            digest,
            increment=isinstance(elements, Increment),
        )

    def _next_shard(self) -> ShardWriter:
        if self._shard is not None:
            self.flush()
            self._shard.finish()
            self._shard = None
        self._shard = ShardWriter(
            self.folder / shard_name(self._shards), self._header_bytes, self._staging
        )
        self._shards += 1
        return self._shard

    def flush(self) -> None:
        """Hand everything added so far to the kernel."""
        if self._shard is not None:
            self._shard.flush()
        if self._lines:
            self._encode()
        if self._journal:
            write_all(self._journal_file, self._journal, self._journal_end)
            self._hash.update(self._journal)
            self._journal_end += len(self._journal)
            self._journal = bytearray()
        self._flushed_at = time.monotonic()

    def sync(self) -> None:
        """Wait until what was flushed is on the medium."""
        for file in (self._shard.file if self._shard is not None else None, self._journal_file):
            if file is not None:
                with file as fd:
                    disk.system.sync(fd)

    def finish(self) -> None:
        """Flush, and make the last shard a valid safetensors file."""
        self.flush()
        with self._journal_file as fd:
            disk.system.cut(fd, self._journal_end)
        if self._shard is not None:
            self._shard.finish()
            self._shard = None

    def give_up(self) -> None:
        """Writes what is still possible after a call failed: all acknowledged lines have room."""
        with contextlib.suppress(OSError):
            self.flush()

    def close(self) -> None:
        """Close the files as they are, and drop what is pending. Idempotent."""
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None
        self._journal_file.close()
        self._staging, self._journal, self._lines = bytearray(), bytearray(), []
