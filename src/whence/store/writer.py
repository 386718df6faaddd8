"""Writes a run while the program that is captured runs: the `Sink` of the native format.

Order is everything: bytes of a tensor are handed to the kernel first, the journal line that speaks
of them afterwards. So a kill at any moment leaves a journal whose every line is true.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from whence.dtypes import DTYPES
from whence.errors import StoreFailed
from whence.records import (
    Call,
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
from whence.store import index
from whence.store.folder import JOURNAL, shard_name
from whence.store.journal import encoder, in_words
from whence.store.shards import (
    DIRECT_BYTES,
    HEADER_BYTES,
    SHARD_BYTES,
    STAGING_BYTES,
    Bytes,
    ShardWriter,
    map_file,
    write_all,
)
from whence.store.status import CLEAN, FAILED, RUNNING, leave_status, write_status

FLUSH_S = 0.5
JOURNAL_BYTES = 256 << 10
# a tenth of it, what is left when a shard counts as full, holds one entry of any rank
MIN_HEADER_BYTES = 16 << 10
REMEMBERED = 1 << 17
"""How many digests are remembered to store equal elements once; about 300 bytes each, so at most 40
MB. Older ones are forgotten.
"""


class Writer:
    """A `Sink` that writes the folder of one process in the run at `run_path` (made by `create`).

    Nothing is made on disk before the first record, call, program, note or step. Safe to use from
    several threads. Everything older than 0.5 s, everything before the last `step` or `flush`, and
    everything but the last ~1 MB survives kill -9. When the medium fails, the call raises
    StoreFailed, and every later call raises it again at once; what was journalled before stays
    readable and the reason is left in status.json. A forked child that inherits a Writer gets
    StoreFailed from it and cannot disturb the parent's files.
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
        self._running = False
        self._closed = False
        self._dead = ""
        self._told = False
        self._records = 0
        self._nbytes = 0
        self._has_elements = bytearray()
        self._known: dict[bytes, tuple[str, tuple[int, ...], Elements]] = {}
        self._known_before: dict[bytes, tuple[str, tuple[int, ...], Elements]] = {}
        self._shard: ShardWriter | None = None
        self._shards = 0
        self._staging = bytearray()
        self._journal = bytearray()
        self._journal_fd = -1
        self._journal_end = 0
        self._flushed_at = 0.0
        self._stop = threading.Event()

    @property
    def nbytes(self) -> int:
        """Bytes of elements written so far; equal elements count once."""
        return self._nbytes

    @property
    def count(self) -> int:
        """Records added so far."""
        return self._records

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
            if not self._running:
                self._start()
            number = self._records
            elements: Elements | None = external
            fresh: tuple[int, ...] | None = None
            if external is not None and not digest:
                raise ValueError("external elements need a digest: it is what guards them")
            if external is None and data is not None:
                elements, fresh, why = self._stored(dtype, shape, data, digest, base, why)
            self._append(
                Record(
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
            )
            self._records = number + 1
            self._has_elements.append(elements is not None)
            if elements is not None:
                if fresh is not None and self._shard is not None:
                    self._shard.name(
                        number,
                        dtype,
                        fresh,
                        elements.offset,
                        elements.nbytes,
                        increment=base is not None,
                    )
                    self._nbytes += elements.nbytes
                if digest:
                    self._remember(digest, dtype, shape, elements)
            return number

    def _stored(
        self,
        dtype: str,
        shape: tuple[int, ...],
        data: Bytes,
        digest: bytes,
        base: tuple[int, int] | None,
        why: str,
    ) -> tuple[Elements | None, tuple[int, ...] | None, str]:
        """(where these elements lie, shape of what they add to the shard, why there are none).
        Equal elements that were stored before are stored once.
        """
        itemsize = DTYPES[dtype].itemsize
        nbytes = math.prod(shape) * itemsize
        if base is None and data.nbytes != nbytes:
            raise ValueError(f"{dtype} {shape} has {nbytes} bytes, got {data.nbytes}")
        if digest and (known := self._find(digest, dtype, shape, nbytes)) is not None:
            return known, None, why
        part = shape if base is None else self._grown(shape, base, data.nbytes, itemsize)
        if isinstance(part, str):
            return None, None, part
        shard, offset = self._put(data)
        if base is None:
            return Kept(shard, offset, nbytes), part, why
        return Increment(*base, shard, offset, data.nbytes), part, why

    def call(self, call: Call) -> None:
        """See `Sink.call`. Arguments that are not JSON are written as their repr; inf and nan,
        which JSON lacks, as their names.
        """
        if call.arguments:
            try:
                if not _is_json(call.arguments):
                    call = msgspec.structs.replace(call, arguments=_as_json(call.arguments))
            except RecursionError:
                call = msgspec.structs.replace(call, arguments=_as_words(call.arguments))
        self._add(call)

    def program(self, program: Program) -> None:
        """Add a recorded program. Its constants were added as records before."""
        self._add(program)

    def note(self, note: Note) -> None:
        """Add a note."""
        self._add(note)

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
            if self._dead:
                self._raise()
            if self._running:
                self._flush()

    def sync(self) -> None:
        """`flush`, and wait until it is on the medium (fsync): it survives a loss of power from
        here on.
        """
        with self._lock:
            self.flush()
            if self._running:
                try:
                    if self._shard is not None:
                        os.fsync(self._shard.fd)
                    os.fsync(self._journal_fd)
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
            if self._closed:
                return
            self._closed = True
            self._stop.set()
            if self._dead:
                self._let_go()
                if not self._told:
                    self._raise()
                return
            if not self._running:
                return
            assert self.folder is not None
            try:
                self._flush()
                if self._shard is not None:
                    self._shard.finish()
                    self._shard = None
                write_status(self.folder, CLEAN)
            except OSError as error:
                self._fail(error)
            finally:
                self._let_go()
            with contextlib.suppress(OSError, MemoryError):
                index.build(map_file(self.folder / JOURNAL), self._finishing).save(self.folder)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- everything below runs under the lock

    def _add(self, line: Call | Program | Note | Step) -> None:
        with self._lock:
            if not self._running:
                self._start()
            try:
                self._append(line)
            except (TypeError, ValueError, OverflowError, RecursionError):
                if not isinstance(line, Call):
                    raise
                self._append(msgspec.structs.replace(line, arguments=_as_words(line.arguments)))

    def _append(self, line: Record | Call | Program | Note | Step) -> None:
        journal = self._journal
        mark = len(journal)
        try:
            encoder.encode_into(line, journal, mark)
            journal += b"\n"
        except BaseException:
            del journal[mark:]
            raise
        if mark > JOURNAL_BYTES or time.monotonic() - self._flushed_at > FLUSH_S:
            self._flush()

    def _put(self, data: Bytes) -> tuple[int, int]:
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
            shard = self._rotate()
        elif nbytes >= DIRECT_BYTES:
            self._flush()  # so that nothing else is pending if this one does not fit the medium
        try:
            offset = shard.put(data, nbytes)
        except OSError as error:
            self._fail(error)
        return self._shards - 1, offset

    def _rotate(self) -> ShardWriter:
        assert self.folder is not None
        if self._shard is not None:
            self._flush()
        try:
            if self._shard is not None:
                self._shard.finish()
            self._shard = None
            self._shard = ShardWriter(
                self.folder / shard_name(self._shards), self._header_bytes, self._staging
            )
        except OSError as error:
            self._fail(error)
        self._shards += 1
        return self._shard

    def _find(
        self, digest: bytes, dtype: str, shape: tuple[int, ...], nbytes: int
    ) -> Elements | None:
        """Where equal bytes already lie. Another shape or dtype over the same bytes may share them,
        but not an increment.
        """
        found = self._known.get(digest) or self._known_before.get(digest)
        if found is None:
            return None
        known_dtype, known_shape, elements = found
        if isinstance(elements, Increment):
            return elements if known_dtype == dtype and known_shape == shape else None
        return elements if elements.nbytes == nbytes else None

    def _remember(
        self, digest: bytes, dtype: str, shape: tuple[int, ...], elements: Elements
    ) -> None:
        # two generations: forgetting costs nothing per record
        if len(self._known) >= REMEMBERED // 2:
            self._known_before, self._known = self._known, {}
        self._known[digest] = (dtype, shape, elements)

    def _grown(
        self, shape: tuple[int, ...], base: tuple[int, int], nbytes: int, itemsize: int
    ) -> tuple[int, ...] | str:
        """Shape of the increment that `nbytes` are, or why they cannot be one."""
        record, axis = base
        if not 0 <= record < self._records:
            raise ValueError(f"base record {record} of {self._records}")
        if not 0 <= axis < len(shape):
            raise ValueError(f"increment along axis {axis} of shape {shape}")
        if not self._has_elements[record]:
            return f"only what follows record {record} was seen, and its elements were not kept"
        row = math.prod(shape[:axis] + shape[axis + 1 :]) * itemsize
        extent, rest = divmod(nbytes, row) if row else (0, nbytes)
        if rest or extent > shape[axis]:
            raise ValueError(f"{nbytes} bytes are no part of shape {shape} along axis {axis}")
        return (*shape[:axis], extent, *shape[axis + 1 :])

    def _start(self) -> None:
        if self._dead:
            self._raise()
        if self._closed:
            raise StoreFailed(
                f"cannot add to {self.folder or self.run_path}: the writer was closed"
            )
        try:
            process = folders.this_process(
                self.rank,
                datetime.now().astimezone().isoformat(timespec="seconds"),
                self._header_bytes,
            )
            self.folder = folders.make_process_folder(self.run_path, self.rank, process)
            write_status(self.folder, RUNNING)
            self._journal_fd = os.open(
                self.folder / JOURNAL, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            self._fail(error)
        self._staging = bytearray(STAGING_BYTES)
        self._flushed_at = time.monotonic()
        self._running = True
        me = weakref.ref(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _inherited(me))
        threading.Thread(
            target=_flush_regularly, args=(me, self._stop), name="whence-flush", daemon=True
        ).start()

    def _flush(self) -> None:
        try:
            shard = self._shard
            if shard is not None:
                shard.flush()
                _check_there(shard.fd)
            _check_there(self._journal_fd)
            write_all(self._journal_fd, self._journal, self._journal_end)
        except OSError as error:
            self._fail(error)
        self._journal_end += len(self._journal)
        self._journal.clear()
        self._flushed_at = time.monotonic()

    def _flush_if_old(self) -> None:
        with self._lock:
            if self._running and self._journal and time.monotonic() - self._flushed_at > FLUSH_S:
                try:
                    self._flush()
                except StoreFailed:
                    self._told = False  # nobody listens in this thread; the next call tells

    def _fail(self, error: OSError) -> NoReturn:
        where = self.folder or self.run_path
        self._dead = (
            f"cannot write the run {where}: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename and str(error.filename) != str(where) else ''} "  # noqa: E501
            f"after {self._records} records; "
            "what was written before stays readable; free space or choose another output path "
            "and capture again"
        )
        self._running = False
        self._stop.set()
        if self.folder is not None:
            leave_status(self.folder, FAILED, self._dead)
        self._told = True
        raise StoreFailed(self._dead) from error

    def _raise(self) -> NoReturn:
        self._told = True
        raise StoreFailed(self._dead)

    def _let_go(self) -> None:
        self._running = False
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None
        if self._journal_fd >= 0:
            os.close(self._journal_fd)
            self._journal_fd = -1
        self._staging, self._journal = bytearray(), bytearray()
        self._known, self._known_before = {}, {}


def _is_json(value: object) -> bool:
    """Whether a value holds no inf and no nan: msgspec would write them as null."""
    if type(value) is float:
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(type(v) in _SOUND or _is_json(v) for v in value.values())
    return not isinstance(value, _SEQUENCES) or all(type(v) in _SOUND or _is_json(v) for v in value)


_SOUND = frozenset((int, str, bool, type(None)))
_SEQUENCES = (list, tuple)


def _as_json(value: Any) -> Any:
    if type(value) is float and not math.isfinite(value):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_as_json(v) for v in value]
    if isinstance(value, dict):
        return {k: _as_json(v) for k, v in value.items()}
    return value


def _as_words(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        str(k): in_words(v).encode("ascii", "backslashreplace").decode()
        for k, v in arguments.items()
    }


def _check_there(fd: int) -> None:
    if os.fstat(fd).st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, "a file was deleted while it was written")


def _flush_regularly(writer: weakref.ref[Writer], stop: threading.Event) -> None:
    """A program that hangs adds nothing more, yet its last calls are the ones that matter: they go
    out within 0.5 s.
    """
    while not stop.wait(FLUSH_S):
        alive = writer()
        if alive is None:
            return
        alive._flush_if_old()
        del alive


def _inherited(writer: weakref.ref[Writer]) -> None:
    """In a forked child: the lock may be held by a thread that is not there, and the files are the
    parent's.
    """
    mine = writer()
    if mine is not None and mine._running:
        mine._lock = threading.RLock()
        mine._running = False
        mine._dead = (
            f"this writer belongs to process {os.getppid()}, which forked this one; a "
            "process that captures makes its own writer"
        )
        mine._told = True
