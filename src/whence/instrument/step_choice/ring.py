"""The last steps of a program, kept in memory and written to the run when something happens.

A `Sink` in front of another: what it gets is passed on, or waits here step by step until it is
forgotten. It numbers records itself. A record lives as long as the last step that refers to it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import msgspec
import numpy as np

from whence.instrument.wording import counted, size
from whence.records import Call, Collective, Note, Program, Ref, Sink, Sketch, Statistics, Step

DEFAULT_BYTES = 10**9
_LINE_BYTES = 1 << 10
"""Approximate bytes of a record or call without elements."""
_Data = np.ndarray[Any, np.dtype[np.uint8]]


class _Held(msgspec.Struct, eq=False):
    """A record. plain, named: arguments of `Sink.record`. step: the last one that refers to it.
    written: its number in the run, -1 while it is only here.
    """

    plain: tuple[Any, ...]
    named: dict[str, Any]
    data: _Data | None
    nbytes: int
    step: int
    written: int = -1


class _Step(msgspec.Struct, eq=False):
    """One step: its lines, and the records that it was the last to refer to (a later step may have
    referred to some since).
    """

    number: int
    records: list[int] = []
    lines: list[Call | Step | Collective] = []


class StepRing:
    """Keeps the last `steps` finished steps, and the one in progress.

    sink: where they are written. max_bytes: limit on memory; when it is exceeded, older steps are
    forgotten early, and a larger step keeps only statistics. budget: for elements in the run.
    through: pass everything on to the sink at once. Thread-safe.
    """

    def __init__(
        self, sink: Sink, steps: int, *, max_bytes: int = DEFAULT_BYTES, budget: int | None = None
    ) -> None:
        self._sink, self._most, self._max_bytes, self._budget = sink, steps, max_bytes, budget
        self._lock = threading.RLock()
        self._count = self._held_bytes = self._numbers = 0
        self._held: dict[int, _Held] = {}
        self._programs: dict[str, tuple[Program, tuple[_Held, ...]]] = {}
        self._written_programs: set[str] = set()
        self._now = _Step(0)
        self._ended: deque[_Step] = deque()
        self._cut = 0
        self.through = False

    @property
    def nbytes(self) -> int:
        """Bytes of elements in the run so far."""
        return self._sink.nbytes

    @property
    def held_bytes(self) -> int:
        """Approximate bytes kept in memory."""
        return self._held_bytes

    # ---- a sink

    def record(
        self,
        dtype: str,
        shape: tuple[int, ...],
        data: _Data | None,
        digest: bytes,
        statistics: Statistics | None,
        sketch: Sketch | None,
        **named: Any,
    ) -> int:
        """See `Sink.record`. data: copied where it has to wait."""
        with self._lock:
            number = self._count
            self._count += 1
            held = _Held(
                (dtype, shape, digest, statistics, sketch), named, data, 0, self._now.number
            )
            self._held[number] = held
            self._now.records.append(number)
            if self.through:
                self._write_record(held)
                return number
            held.data, held.nbytes = None, _LINE_BYTES
            if data is not None and named.get("external") is None:
                if self._has_room(_LINE_BYTES + data.nbytes):
                    held.data, held.nbytes = data.copy(), _LINE_BYTES + data.nbytes
                else:
                    named |= {"why": f"over --ring-size {size(self._max_bytes)}", "base": None}
            self._held_bytes += held.nbytes
            return number

    def call(self, call: Call) -> None:
        """See `Sink.call`. Arguments are copied in their present state."""
        with self._lock:
            for ref in call.refs:
                self._touch(ref.record)
            if self.through:
                self._write_call(call)
                return
            if call.arguments:
                settled = msgspec.to_builtins(call.arguments, str_keys=True, enc_hook=repr)
                call = msgspec.structs.replace(call, arguments=settled)
            self._keep(call)

    def program(self, program: Program) -> None:
        """Keep a program for good: calls of any later step may name it."""
        with self._lock:
            constants = tuple(self._held[k] for k in program.constants if k in self._held)
            self._programs[program.id] = program, constants

    def note(self, note: Note) -> None:
        """Pass on a note."""
        self._sink.note(note)

    def step(self, step: Step) -> None:
        """Add the end of a step of a root."""
        with self._lock:
            if self.through:
                self._sink.step(step)
            else:
                self._keep(step)

    def collective(self, collective: Collective) -> None:
        """Add a collective."""
        with self._lock:
            if self.through:
                self._sink.collective(collective)
            else:
                self._keep(collective)

    def flush(self) -> None:
        """Make what was passed on survive a kill."""
        self._sink.flush()

    def close(self) -> None:
        """Close the sink. What was not written is dropped."""
        with self._lock:
            self._held.clear()
            self._ended.clear()
            self._now = _Step(0)
            if self._cut:
                self._sink.note(
                    Note(
                        "ring",
                        f"{counted(self._cut, 'step')} left the ring early: --ring-size "
                        f"{size(self._max_bytes)}",
                    )
                )
            self._sink.close()

    # ---- steps

    def end_step(self) -> None:
        """End the step in progress, begin the next one, and forget the oldest if there are too
        many.
        """
        with self._lock:
            self._ended.append(self._now)
            self._numbers += 1
            self._now = _Step(self._numbers)
            while len(self._ended) > self._most:
                self._forget(self._ended.popleft())

    def write(self) -> int:
        """Write everything kept, in order of arrival, and flush it. Returns the number of steps
        that had something to write.
        """
        with self._lock:
            steps = 0
            for step in (*self._ended, self._now):
                steps += bool(step.lines)
                for line in step.lines:
                    self._held_bytes -= _LINE_BYTES
                    if isinstance(line, Call):
                        self._write_call(line)
                    elif isinstance(line, Step):
                        self._sink.step(line)
                    else:
                        self._sink.collective(line)
                step.lines = []
            self._sink.flush()
            return steps

    def clear(self) -> None:
        """Forget the finished steps."""
        with self._lock:
            while self._ended:
                self._forget(self._ended.popleft())

    # ---- everything below runs under the lock

    def _keep(self, line: Call | Step | Collective) -> None:
        self._now.lines.append(line)
        self._held_bytes += _LINE_BYTES

    def _touch(self, number: int) -> None:
        """Note that the step in progress refers to a record."""
        held = self._held.get(number)
        if held is not None and held.step != self._now.number:
            held.step = self._now.number
            self._now.records.append(number)

    def _forget(self, step: _Step) -> None:
        self._held_bytes -= _LINE_BYTES * len(step.lines)
        for number in step.records:
            held = self._held.get(number)
            if held is not None and held.step == step.number:
                self._held_bytes -= held.nbytes
                del self._held[number]

    def _has_room(self, nbytes: int) -> bool:
        """Make room for a record by forgetting steps early."""
        while self._held_bytes + nbytes > self._max_bytes and self._ended:
            self._cut += bool(self._ended[0].lines)
            self._forget(self._ended.popleft())
        return self._held_bytes + nbytes <= self._max_bytes

    def _write_record(self, held: _Held) -> int:
        if held.written >= 0:
            return held.written
        dtype, shape, digest, statistics, sketch = held.plain
        data, named = held.data, dict(held.named)
        left = None if self._budget is None else self._budget - self._sink.nbytes
        if data is not None and left is not None and data.nbytes > left:
            data, named["why"] = None, "over --max-bytes"
        if named.get("base") is not None and (data is None or named["base"][0] not in self._held):
            data, named["base"] = None, None
            named["why"] = named.get("why") or "what came before it is no longer in the ring"
        elif named.get("base") is not None:
            base, axis = named["base"]
            named["base"] = self._write_record(self._held[base]), axis
        held.written = self._sink.record(dtype, shape, data, digest, statistics, sketch, **named)
        self._held_bytes -= held.nbytes
        held.data, held.nbytes = None, 0
        return held.written

    def _write_call(self, call: Call) -> None:
        refs = []
        for ref in call.refs:
            held = self._held.get(ref.record)
            if held is not None:
                refs.append(Ref(ref.slot, self._write_record(held), ref.edge))
            else:
                gone = self._sink.record("unknown", (), None, b"", None, None, why=_GONE)
                refs.append(Ref(ref.slot, gone, ref.edge))
        if call.program and call.program not in self._written_programs:
            self._write_program(call.program)
        self._sink.call(msgspec.structs.replace(call, refs=tuple(refs)))

    def _write_program(self, name: str) -> None:
        self._written_programs.add(name)
        if name in self._programs:
            program, constants = self._programs[name]
            numbers = tuple(self._write_record(held) for held in constants)
            self._sink.program(msgspec.structs.replace(program, constants=numbers))


_GONE = "recorded in a step that the ring no longer holds"
