"""Writes a run in windows of steps: every window is a folder of its own that needs no other, so
that what was compared can be deleted while the program runs.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from whence import disk
from whence.errors import ElementsMissing, StoreFailed, UnreadableRun
from whence.records import (
    Call,
    Collective,
    External,
    Note,
    Program,
    Record,
    Ref,
    Sketch,
    Statistics,
    Step,
)
from whence.records.marks import STOPPED
from whence.records.slots import is_param, split_slot
from whence.records.training import GRADIENTS, OPTIMIZER, TAKEN_GRADIENT
from whence.store.folder import RUN, load_info, load_process
from whence.store.process_reader import ProcessReader
from whence.store.reader import StoredRun
from whence.store.shards import Bytes
from whence.store.status import CLEAN, read_status
from whence.store.writer import Writer

HELD = 2
"""So many windows before the current one stay open, for tensors that are referred to again.
Parameters and states of optimisers are carried on for ever.
"""
GONE = f"recorded more than {HELD} windows ago, and not used since"
_OF_ONE_WINDOW = frozenset(("budget", "trigger", "programs"))
"""Kinds of notes that say nothing of later windows."""
_NOTES = 1000
"""So many notes on the whole run are written into each window again."""


@dataclass(frozen=True)
class _Window:
    """A window that has ended. numbers: of records in it, by their numbers in the capture. run: it
    alone, mapped, so that it can be read after it was deleted.
    """

    numbers: dict[int, int]
    run: StoredRun


@dataclass
class _Constant:
    """A tensor that a program holds. number: of its record in the capture."""

    number: int
    record: Record | None = None
    data: Bytes | None = None


@dataclass
class _Known:
    """A program, with its constants once they are read."""

    program: Program
    constants: list[_Constant] = field(default_factory=list)


class WindowedWriter:
    """A `Sink` that begins a new folder with every `steps` steps; `count_step` counts them.

    Numbers of records are its own. What a window refers to is in it: a tensor of an earlier window
    is written again, notes on the whole run too, and a program with its constants where a call
    names it. finishing: as `Writer` takes it. Thread-safe.
    """

    def __init__(
        self,
        run_path: str | Path,
        rank: int = 0,
        *,
        steps: int,
        max_bytes: float = math.inf,
        finishing: Callable[[int, int], None] | None = None,
    ) -> None:
        self._run_path, self._rank, self._steps = Path(run_path), rank, steps
        self._max_bytes, self._finishing = max_bytes, finishing
        self._lock = threading.RLock()
        self._count = self._ended_steps = self._window = 0
        self._numbers: dict[int, int] = {}
        self._bare: dict[int, int] = {}  # of records whose elements lie in an earlier window
        self._held: deque[_Window] = deque()
        # parameters, and what optimisers keep, as they were seen last: (scope, op, slot) -> number
        self._lasting: dict[tuple[str, str, str], int] = {}
        self._programs: dict[str, _Known] = {}
        self._written_programs: set[str] = set()
        self._notes: dict[Note, None] = {}
        self._is_empty = True  # nothing is recorded in the window yet
        self._written: list[tuple[Path, int]] = []  # folders of windows, and bytes of elements
        self._writer = self._new_writer()

    @property
    def nbytes(self) -> int:
        """Bytes of elements in the windows that are still there."""
        return self._writer.nbytes + sum(nbytes for _, nbytes in self._written)

    # ---- a sink

    def record(
        self,
        dtype: str,
        shape: tuple[int, ...],
        data: Bytes | None,
        digest: bytes,
        statistics: Statistics | None,
        sketch: Sketch | None,
        *,
        base: tuple[int, int] | None = None,
        **named: Any,
    ) -> int:
        """See `Sink.record`."""
        with self._lock:
            number = self._count
            self._count += 1
            self._begin()
            if base is not None:
                base = self._here(base[0]), base[1]
            self._numbers[number] = self._writer.record(
                dtype, shape, data, digest, statistics, sketch, base=base, **named
            )
            return number

    def call(self, call: Call) -> None:
        """See `Sink.call`."""
        with self._lock:
            self._begin()
            if call.program:
                self._write_program(call.program)
            is_step = call.phase == OPTIMIZER and call.op != GRADIENTS
            for ref in call.refs:
                if is_step and ref.slot != TAKEN_GRADIENT:
                    self._lasting[call.scope, call.op, split_slot(ref.slot)[1]] = ref.record
                elif is_param(ref.slot):
                    self._lasting[call.scope, "", ref.slot] = ref.record
            refs = tuple(Ref(ref.slot, self._here(ref.record), ref.edge) for ref in call.refs)
            self._writer.call(msgspec.structs.replace(call, refs=refs))

    def program(self, program: Program) -> None:
        """Keep a program for good: calls of any later window may name it."""
        with self._lock:
            constants = [_Constant(number) for number in program.constants]
            self._programs[program.id] = _Known(program, constants)

    def note(self, note: Note) -> None:
        """Add a note; one on the whole run is in every window."""
        with self._lock:
            self._have_folder()
            lasts = note.step < 0 and note.kind not in _OF_ONE_WINDOW
            if lasts and len(self._notes) < _NOTES:
                self._notes[note] = None
            # a window that says why nothing came is not one in which nothing was to come
            self._is_empty = self._is_empty and note.kind != STOPPED
            self._writer.note(note)

    def step(self, step: Step) -> None:
        """Add the end of a step of a root."""
        with self._lock:
            self._begin()
            self._writer.step(step)

    def collective(self, collective: Collective) -> None:
        """Add a collective."""
        with self._lock:
            self._begin()
            self._writer.collective(collective)

    def flush(self) -> None:
        """Have everything added so far survive a kill."""
        with self._lock:
            self._writer.flush()

    def close(self) -> None:
        """End the last window, which goes where nothing was written into it. Idempotent."""
        with self._lock:
            self._writer.close()
            self._held.clear()
            if self._is_empty:
                _delete(self._writer)

    # ---- windows

    def count_step(self) -> bool:
        """A step of the program has ended, recorded or not: does the window end with it?"""
        with self._lock:
            self._ended_steps += 1
            return self._ended_steps % self._steps == 0

    def begin_window(self) -> None:
        """End the window: what comes now belongs to the next one. Raises StoreFailed."""
        with self._lock:
            self._window = self._ended_steps // self._steps
            ended, was_empty, numbers = self._writer, self._is_empty, self._numbers
            self._writer = self._new_writer()
            if was_empty and ended.folder is None:  # nothing was recorded so far
                return
            self._numbers, self._bare, self._written_programs = {}, {}, set()
            self._is_empty = True
            # Its folder is made before the other is closed: as long as the newest is being written,
            # more may come.
            self._have_folder()
            about = f"window {self._window}, from step {self._ended_steps} on"
            for note in (Note("window", about), *self._notes):
                self._writer.note(note)
            ended.close()
            if was_empty:
                _delete(ended)
            else:
                with _told_as_failure(ended.run_path):
                    self._hold(ended, numbers)
                self._written.append((ended.run_path, ended.nbytes))
            self._written = [(path, size) for path, size in self._written if path.exists()]
            for window in list(self._held)[:-HELD]:
                self._let_go(window)

    # ---- everything below runs under the lock

    def _new_writer(self) -> Writer:
        path = self._run_path / f"w{self._window:07d}"
        return Writer(path, self._rank, finishing=self._finishing)

    def _have_folder(self) -> None:
        """Make the folder of the window, a run like the one that it is a part of, unless it is
        there. Other processes may make it too.
        """
        path = self._writer.run_path
        if self._writer.folder is not None:
            return
        try:
            with contextlib.suppress(FileExistsError):
                disk.system.make_folder(path, 0o700)
            if not (path / RUN).exists():
                disk.write_file(path / RUN, (self._run_path / RUN).read_bytes())
        except OSError as error:
            raise StoreFailed(
                f"cannot begin the window {path}: {error.strerror or error}; free some space, or "
                "choose another output path"
            ) from error

    def _begin(self) -> None:
        """Something is recorded in the window."""
        self._is_empty = False
        self._have_folder()

    def _hold(self, writer: Writer, numbers: dict[int, int]) -> None:
        assert writer.folder is not None
        reader = ProcessReader(writer.folder, load_process(writer.folder))
        for shard in range(reader.shard_count):
            reader.shard(shard).require(0)
        window = _Window(numbers, StoredRun(writer.run_path, load_info(writer.run_path), [reader]))
        self._held.append(window)
        for known in self._programs.values():
            for constant in known.constants:
                if constant.record is None and constant.number in numbers:
                    constant.record, constant.data = _read(window, constant.number)

    def _let_go(self, window: _Window) -> None:
        """Close an old window. What lasts and lies there alone is written into the current one, for
        modules that rest and may be called again; as long as there is no room, the window is held.
        """
        later = [w.numbers for w in self._held if w is not window]
        lasting = [
            number
            for number in self._lasting.values()
            if number in window.numbers and not any(number in numbers for numbers in later)
        ]
        sizes = window.run.column("nbytes")
        needed = sum(int(sizes[window.numbers[number]]) for number in set(lasting))
        if self.nbytes + needed > self._max_bytes:
            return
        for number in lasting:
            self._begin()
            self._here(number)
        self._held.remove(window)

    def _here(self, number: int) -> int:
        """The number of a record in the current window, where it is written if it is not there."""
        local = self._numbers.get(number)
        if local is None:
            local = self._bare.get(number)
        if local is not None:
            return local
        window = next((w for w in reversed(self._held) if number in w.numbers), None)
        if window is None:
            local = self._bare[number] = self._writer.record(
                "unknown", (), None, b"", None, None, why=GONE
            )
            return local
        with _told_as_failure(window.run.path):
            record, data = _read(window, number)
        if data is not None and self.nbytes + data.nbytes > self._max_bytes:
            record = msgspec.structs.replace(record, why="over --max-bytes")
            local = self._bare[number] = self._written_again(record, None)
        else:
            local = self._numbers[number] = self._written_again(record, data)
        return local

    def _written_again(self, record: Record, data: Bytes | None) -> int:
        return self._writer.record(
            record.dtype,
            record.shape,
            data,
            bytes.fromhex(record.hash),
            record.statistics,
            record.sketch,
            why=record.why,
            stride=record.stride,
            storage_offset=record.storage_offset,
            device=record.device,
            columns=record.columns,
            subclass=record.subclass,
            external=record.elements if isinstance(record.elements, External) else None,
        )

    def _write_program(self, name: str) -> None:
        if name in self._written_programs or name not in self._programs:
            return
        self._written_programs.add(name)
        known = self._programs[name]
        numbers = tuple(self._of_constant(constant) for constant in known.constants)
        self._writer.program(msgspec.structs.replace(known.program, constants=numbers))

    def _of_constant(self, constant: _Constant) -> int:
        if constant.record is not None and constant.number not in self._numbers:
            self._numbers[constant.number] = self._written_again(constant.record, constant.data)
        return self._here(constant.number)


def _read(window: _Window, number: int) -> tuple[Record, Bytes | None]:
    """A record of a window that has ended, and a copy of its elements."""
    local = window.numbers[number]
    record = window.run.records[local]
    if record.elements is None or isinstance(record.elements, External):
        return record, None
    elements = np.ascontiguousarray(window.run.array(local))
    return record, elements.reshape(-1).view(np.uint8).copy()


@contextlib.contextmanager
def _told_as_failure(window: str | Path) -> Iterator[None]:
    """Raise StoreFailed where a window that was written cannot be read."""
    try:
        yield
    except (UnreadableRun, ElementsMissing, OSError) as error:
        raise StoreFailed(
            f"cannot read the window {window}, of which the next one needs tensors: {error}; what "
            "was written stays; check the disk, or choose another output path"
        ) from error


def _delete(writer: Writer) -> None:
    """Delete the folder of a process that recorded nothing in a window, unless it shows that the
    capture did not end cleanly. The window stays: another process may be about to write into it.
    """
    if writer.folder is not None and read_status(writer.folder).ended == CLEAN:
        shutil.rmtree(writer.folder, ignore_errors=True)
