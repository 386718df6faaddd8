"""Labels in any code: they go to the capture that is active in this process, to the run that
`whence run` opened, or nowhere.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from whence.instrument.labels.labels import (
    FOLDER,
    LABELS,
    TASK,
    Ids,
    Labels,
    Tasks,
    left_over,
    source_of,
)
from whence.instrument.options import CaptureOptions
from whence.instrument.session import Session
from whence.workflows.capture.process_end import before_leaving_at_once

_tasks, _ids = Tasks(), Ids()
_in_graph: list[Callable[..., bool]] = []  # of torch, when it is imported
_takers: list[Callable[..., None]] = []  # the last one takes; empty: no run


def label(
    name: str,
    tensor: Any = None,
    *,
    side: str | None = None,
    file: str | os.PathLike[str] | None = None,
    id: str | None = None,  # noqa: A002
) -> None:
    """Show a tensor to the active run under a name; `whence.label`. Without a run it does nothing;
    it never raises or changes anything.

        whence.label("attention out", h, side="reference")
        whence.label("attention out", file="0_Attention/outTensor0.bin", side="target")

    tensor: torch, numpy, JAX or anything numpy can read, of any shape; what cannot be read is
    recorded with the reason. side: which of the two programs it belongs to, "reference" or
    "target"; None where a whole run is one side. file: instead of a tensor, the file that a library
    will have written when the program ends: a path below its dump folder. The n-th label of a name,
    side and task is name#n, from 0, and is paired with name#n of the other side. id: pairs it with
    the label of the other side with this id instead, whatever its name (`new_id`).
    """
    if _takers:
        take_label(name, tensor, side, file, id)


def labels_are_taken() -> bool:
    """Does a run take the labels of this process?"""
    return bool(_takers)


def take_label(name: str, tensor: Any, side: str | None, file: Any, id: str | None) -> None:  # noqa: A002
    """`label`, for functions that stand in the place of it: the source of the label is where their
    caller calls them.
    """
    if _in_graph and _in_graph[0](name, tensor, side, file, id):
        return
    frame = sys._getframe(2)
    _takers[-1](name, tensor, side, file, id, _tasks.now, source_of(frame))


def _compile() -> None:
    """Make labels work in compiled code from now on. When torch lacks custom operators, a label
    breaks the graph.
    """
    if not _in_graph:
        from whence.instrument.labels.torch_labels import operator

        def take(name: str, tensor: Any, side: str | None, file: Any, id: str | None) -> None:  # noqa: A002
            if _takers:
                _takers[-1](name, tensor, side, file, id, _tasks.now, "compiled code")

        with contextlib.suppress(ImportError, AttributeError, RuntimeError):
            _in_graph.append(operator(take))


def new_id() -> str:
    """An id for the two labels of one thing, the same in every run of the same code and different
    at every call; `whence.new_id`.

    `[task/]file:line#n`: the task, where it was called, and how often that place was reached in
    this task before. For threads that reach one place at the same time the order
    may vary between runs: give them tasks.
    """
    # without a run no request is remembered
    return _ids.new(sys._getframe(1), _tasks.now if _takers else "")


def include() -> str:
    """The folder of `whence_label.h`, for a compiler's -I."""
    from whence.instrument.labels import labels

    return str(Path(labels.__file__).parent / "include")


class task:  # noqa: N801 - called like a function
    """Begin a task (a dialogue turn, a request): labels of different tasks are never paired;
    `whence.task`.

        with whence.task("turn 1"):          # for this thread or coroutine, and threads without a task of their own
            generate(...)
        whence.task("turn 2")                # from here on, until the next

    id: equal on both sides; None for "task0", "task1" ... in the order in which they begin. `.id`
    holds it.
    """  # noqa: E501

    def __init__(self, id: str | None = None) -> None:  # noqa: A002
        self._begun = _tasks.begin(id)
        self.id = self._begun.id

    def __enter__(self) -> task:
        self._begun.is_block = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _tasks.end(self._begun)


def taking(session: Session, folder: str) -> Callable[[], None]:
    """Send labels to this session.

    Returns a function that stops this and, once the session is closed, reads the files that were
    labelled.
    """
    left_over(Path(folder))
    close = _open(session, folder, library=None)

    def end() -> None:
        close()
        try:
            (Path(folder) / FOLDER).rmdir()
        except FileNotFoundError:  # another rank may remove it
            return
        except OSError:  # there are labels in it
            pass
        else:
            return
        from whence.workflows.capture.collect_labels import gather

        gather(folder, keep=session.options.keep)

    return end


def _variables(library: dict[str, Any] | None) -> dict[str, str]:
    """Environment variables that must follow the current task."""
    return {TASK: "{task}", **(library["profile"].get("task", {}) if library else {})}


def _open(session: Session, folder: str, library: dict[str, Any] | None) -> Callable[[], None]:
    """Send labels to a session. Returns the function that stops this."""
    variables = _variables(library)
    previous = {name: os.environ.get(name) for name in (LABELS, *variables)}
    place = Path(folder).absolute() / FOLDER
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, exist_ok=True)
    os.environ[LABELS] = str(place)
    _tasks.variables = variables
    if _tasks.now:
        _tasks.announce(_tasks.now)
    labels = Labels(session, str(Path(folder).absolute()), _tasks, _read)
    _takers.append(labels.take)
    if "torch" in sys.modules:
        _compile()

    def close() -> None:
        if labels.take in _takers:
            _takers.remove(labels.take)
        if not _takers:
            _tasks.forget()
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return close


def _read(value: Any) -> Any:
    """A torch tensor as a host array; None for any other value."""
    if "torch" not in sys.modules:
        return None
    from whence.instrument.labels.torch_labels import read

    return read(value)


class _Inherited:
    """The run of `whence run` around this process: opened with the first label, closed when the
    process ends.
    """

    def __init__(self, text: str) -> None:
        config = json.loads(text)
        self._folder, self._options, self._library = (
            config["run"],
            json.dumps(config["options"]),
            config.get("library"),
        )
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._shared = False
        self._close: Callable[[], None] | None = None
        # a library must know the tasks before the first label
        _tasks.variables = _variables(self._library)

    def __call__(self, *label: Any) -> None:
        """Take a label."""
        with self._lock:
            if self._close is None:
                try:
                    self._start()
                except Exception as error:  # noqa: BLE001 - the program comes first
                    from whence.instrument.labels.labels import complain

                    _takers.remove(self)
                    complain(
                        f"labels are not recorded in process {os.getpid()}: "
                        f"{type(error).__name__}: {error}"
                    )
                    return
        _takers[-1](*label)

    def use(self, session: Session) -> None:
        """Send labels to the session that listens to this process, unless another session has them
        already.
        """
        with self._lock:
            if self._close is None:
                self._session, self._shared = session, True
                self._close = _open(session, self._folder, self._library)

    def _start(self) -> None:
        from whence.instrument.options import decode
        from whence.workflows.capture.setup import open_session

        self._session = open_session(self._folder, decode(self._options), None)
        self._close = _open(self._session, self._folder, self._library)
        atexit.register(self.finish)
        # its child processes end without running atexit
        multiprocessing.util.Finalize(None, self.finish, exitpriority=9)
        before_leaving_at_once(self.finish)

    def finish(self) -> None:
        """Stop taking labels, and close the session when nobody else uses it."""
        with self._lock:
            close, self._close = self._close, None
            if close is not None:
                close()
            if self._session is not None and not self._shared:
                self._session.close()
            self._session = None

    def renew(self) -> None:
        """In a forked child: forget the parent's session; the first label opens a new one."""
        self._lock = threading.RLock()
        close, self._close, self._session, self._shared = self._close, None, None, False
        if close is not None:
            close()
        _tasks.variables = _variables(self._library)


def inherited(session: Session | None) -> None:
    """Announce that a listener of this process begins (also again, in a forked child) or, with
    None, ends: labels go into its session.
    """
    if _inherited is not None:
        if session is None:
            _inherited.finish()
        else:
            _inherited.use(session)


def attach_labels(options: CaptureOptions, run_path: str, framework: str) -> None:
    """Called in the child of `whence run --compare` after a framework was imported: only labels are
    taken, nothing is listened to.
    """
    _compile()


def _around() -> _Inherited | None:
    """The run of `whence run`, when this process is part of one."""
    text = os.environ.get("WHENCE_CAPTURE", "")
    if not text:
        return None
    try:
        inherited = _Inherited(text)
    except (ValueError, KeyError, TypeError):
        return None
    _takers.append(inherited)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=inherited.renew)
    return inherited


_inherited = _around()
