"""Labels: tensors that a program names itself, as calls of kind "label" of a run; and those that
only a file will hold. No framework.

A label never raises into the program. What cannot be read is a record with the reason; a label of a
file is a line beside the run until the file is there (`api.gathering`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from whence import disk
from whence.errors import UsageError
from whence.frameworks import host
from whence.frameworks.array_protocols import to_host
from whence.instrument.session import Content, Form, Origin, Session
from whence.instrument.wording import raised
from whence.records import Call, Ref

SIDES = ("reference", "target")
FOLDER = "labels"
"""Beside the processes of a run: labels that wait for a file, and those that programs without
Python wrote.
"""
LABELS = "WHENCE_LABELS"
"""The variable that tells a program of another language that folder (`whence_label.h`)."""
TASK = "WHENCE_TASK"
"""The variable that tells it the current task."""
NO_PROGRAM = "a label has no program"


class OpenTask:
    """A task in progress. is_block: it was begun by a `with` block and ends with it."""

    __slots__ = ("id", "is_block", "token")

    def __init__(self, name: str) -> None:
        self.id, self.is_block = name, False
        self.token: Any = None


class Tasks:
    """Keeps the current task (a dialogue turn, a request). A task begun by a block is current in
    its thread or coroutine, and in threads without a task of their own. Tasks are numbered from 0
    in order of first use, while a run is active.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._nameless = itertools.count()
        self._current: ContextVar[OpenTask | None] = ContextVar("whence_task", default=None)
        self._open: list[OpenTask] = []
        self.variables: Mapping[str, str] = {}

    @property
    def now(self) -> str:
        """The id of the current task, "" for none."""
        task = self._current.get() or (self._open[-1] if self._open else None)
        return task.id if task is not None else ""

    def number(self, task: str) -> int:
        """Number of a task, counted from 0; 0 for no task."""
        with self._lock:
            return self._numbers.setdefault(task, len(self._numbers)) if task else 0

    def begin(self, name: str | None) -> OpenTask:
        """Begin or continue a task, until `end`, or until the next task outside a block. name: None
        for "task0", "task1" ...
        """
        begun = OpenTask(f"task{next(self._nameless)}" if name is None else str(name))
        outer = self._current.get()
        with self._lock:
            if outer is not None and not outer.is_block and outer in self._open:
                self._open.remove(outer)
            self._open.append(begun)
        begun.token = self._current.set(begun)
        self.announce(begun.id)
        return begun

    def end(self, begun: OpenTask) -> None:
        """End the block of a task; the previous task becomes current again."""
        with self._lock:
            if begun in self._open:
                self._open.remove(begun)
        with contextlib.suppress(ValueError):  # ended in another context than it was begun in
            self._current.reset(begun.token)
        self.announce(self.now)

    def announce(self, task: str) -> None:
        """Set the variables that a library or `whence_label.h` reads; none without a run."""
        if self.variables:
            number = self.number(task)
            for name, pattern in self.variables.items():
                os.environ[name] = filled(pattern, task=task, number=number, pid=os.getpid())

    def forget(self) -> None:
        """Forget numbers and variables after a run."""
        self.variables, self._numbers = {}, {}


def filled(pattern: str, **values: Any) -> str:
    """A pattern with {name} replaced; other braces stay as they are."""
    for name, value in values.items():
        pattern = pattern.replace("{" + name + "}", str(value))
    return pattern


class Waiting(NamedTuple):
    """A label whose tensor is in a file, to be read after the program has ended. at: nanoseconds
    since 1970.
    """

    name: str
    side: str
    id: str
    task: str
    number: int
    file: str
    at: int
    pid: int
    tid: int
    rank: int
    cwd: str
    source: str


class Labels:
    """Takes the labels of one process into a session.

    folder: of the run. tasks: of this process. read: a framework's tensor -> (host array, stride,
    device, class), None for what it does not know; raises UsageError for what has no elements.
    """

    def __init__(
        self,
        session: Session,
        folder: str,
        tasks: Tasks,
        read: Callable[[Any], tuple[Any, tuple[int, ...], str, str] | None],
    ) -> None:
        self.session, self.folder, self._tasks, self._read = session, Path(folder), tasks, read
        self._lock = threading.Lock()
        self._occurrences: Counter[tuple[str, str, str]] = Counter()
        self._pid = os.getpid()

    def take(
        self,
        name: str,
        value: Any,
        side: str | None,
        file: Any,
        id: str | None,  # noqa: A002
        task: str,
        source: str,
    ) -> None:
        """Record one label. Failures are noted in the run, never raised."""
        session = self.session
        # a forked child has no right to these files
        if not session.active or os.getpid() != self._pid or not session.begin():
            return
        try:
            name, side, item = self._words(name, side), side or "", "" if id is None else str(id)
            number = self._tasks.number(task)
            if file is not None and value is not None:
                raise UsageError("give a tensor or a file, not both")
            if file is not None:
                self._wait(
                    Waiting(
                        name,
                        side,
                        item,
                        task,
                        number,
                        os.fspath(file),
                        time.time_ns(),
                        os.getpid(),
                        threading.get_native_id(),
                        session.rank,
                        str(Path.cwd()),
                        source,
                    )
                )
                return
            session.over_budget(name, number)
            record = self._record(name, value)
            if record >= 0:
                self._call(record, name, side, number, (task, item), source)
        except Exception as error:  # noqa: BLE001 - a label never fails the program
            session.note("label-error", f"{name!r}: {raised(error)}", str(name))

    def _call(
        self,
        record: int,
        name: str,
        side: str,
        number: int,
        task_and_item: tuple[str, str],
        source: str,
    ) -> None:
        session, (task, item) = self.session, task_and_item
        with self._lock:
            occurrence = self._occurrences[task, side, name]
            self._occurrences[task, side, name] += 1
        order = session.next_order()
        call = Call(
            order,
            name,
            side,
            number,
            order,
            rank=session.rank,
            occurrence=occurrence,
            kind="label",
            source=source,
            number=str(order),
            leaf=True,
            no_program=NO_PROGRAM,
            refs=(Ref("output.0", record),),
            arguments=described(task, item, time.time_ns()),
        )
        session.call(call)

    def _words(self, name: object, side: object) -> str:
        if side is not None and side not in SIDES:
            raise UsageError(f"side {side!r}: {' or '.join(SIDES)}")
        if not isinstance(name, str) or not name:
            raise UsageError("names of labels are texts that are not empty")
        return name

    def _record(self, name: str, value: Any) -> int:
        """A tensor's record; one without elements and with the reason for what is none."""
        session, device, subclass = self.session, "cpu", ""
        stride: tuple[int, ...] = ()
        try:
            elements = self._read(value)
            if elements is not None:
                array, stride, device, subclass = elements
            else:
                array = to_host("nothing" if value is None else value, name)
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        except Exception as error:  # noqa: BLE001 - what the program hands over may raise anything when it is read
            why = (
                "is None: there is no tensor"
                if value is None
                else str(error) or type(error).__name__
            )
            # not of proxies, which answer to any name
            has_form = hasattr(type(value), "dtype") and hasattr(type(value), "shape")
            shape = tuple(int(n) for n in value.shape) if has_form else ()
            dtype = str(value.dtype).removeprefix("torch.") if has_form else ""
            return session.unreadable(Form(dtype, shape, device=""), why)
        from whence import dtypes

        return session.record(
            Form(dtypes.of(array).name, tuple(array.shape), stride, 0, device, subclass),
            Content(host.digest(data), nbytes=data.size, data=data),
            Origin(name, "output.0", "label"),
            value,
        )

    def _wait(self, label: Waiting) -> None:
        folder = self.folder / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        append(
            folder / f"{socket.gethostname()}-{label.pid}.jsonl", json.dumps(label._asdict()) + "\n"
        )


def described(task: str, item: str, nanoseconds: int, file: str = "") -> dict[str, Any]:
    """What a call says of its label beside name, side and occurrence: `Call.arguments`."""
    return {"at": nanoseconds} | {
        k: v for k, v in (("task", task), ("id", item), ("file", file)) if v
    }


def append(path: Path, text: str) -> None:
    """Add a line in one write, so that lines of several threads do not mix. Raises OSError."""
    disk.append_line(path, text.encode("utf-8", "surrogateescape"))


class Ids:
    """Label ids that are the same in every run of the same code: task, place of the call, and count
    of calls there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, dict[str, int]] = {}
        self._count: dict[tuple[str, str], itertools.count[int]] = {}

    def new(self, frame: FrameType, task: str) -> str:
        """`[task/]file:line#n`, n from 0. Files of one name in different folders are told apart in
        the order in which they came.
        """
        code, line = frame.f_code, frame.f_lineno
        short = f"{Path(code.co_filename).name}:{line}"
        with self._lock:
            alike = self._places.setdefault(short, {})
            twin = alike.setdefault(code.co_filename, len(alike))
            place = f"{short}~{twin}" if twin else short
            count = self._count.setdefault((task, place), itertools.count())
            number = next(count)
        return f"{task}/{place}#{number}" if task else f"{place}#{number}"


def source_of(frame: FrameType) -> str:
    """file:line of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def complain(text: str) -> None:
    """One line on stderr; a medium that fails is not worth failing for."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"whence: {text}\n")


def left_over(run: Path) -> Path:
    """The folder of labels of a run that begins, without those of the run that it replaces."""
    place = run / FOLDER
    for old in (*place.glob("*.jsonl"), *place.glob("*.bin")):
        old.unlink(missing_ok=True)
    return place
