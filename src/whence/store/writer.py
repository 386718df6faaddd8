"""Writes a run while the program that is captured runs: the `Sink` of the native format."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, NoReturn

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
from whence.store.folder import JOURNAL
from whence.store.journal import settled
from whence.store.process_files import FLUSH_S, ProcessFiles
from whence.store.shards import HEADER_BYTES, SHARD_BYTES, Bytes
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
from whence.store.stored_elements import StoredElements

# a tenth of it, what is left when a shard counts as full, holds one entry of any rank
MIN_HEADER_BYTES = 16 << 10


class _Placed(NamedTuple):
    """Where the elements of a record lie, the shape of what they add to the shard (None: nothing),
    and why there are none.
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
        self._stored = StoredElements()
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
        """Store elements, unless equal ones are stored already."""
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
    """A program that hangs adds nothing more, yet its last calls are the ones that matter: they go
    out within FLUSH_S.
    """
    while not stop.wait(FLUSH_S / 2):
        alive = writer()
        if alive is None:
            return
        alive._flush_if_old()
        del alive


def _disown(writer: weakref.ref[Writer]) -> None:
    """In a forked child: the lock may be held by a thread that the child lacks, and the files are
    the parent's.
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
