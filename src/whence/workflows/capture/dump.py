"""A capture that a program begins, pauses and ends at the calls of another tool's API;
`whence.compat` is built on it.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

import msgspec

from whence.instrument.arguments import ForceArgument
from whence.instrument.labels.labels import complain
from whence.instrument.options import CaptureOptions, make
from whence.readers.opening import _BESIDE
from whence.records import Call, Run
from whence.records.logits import LAST_LAYER
from whence.records.marks import Mark, has_mark
from whence.workflows.saved import AnyPath

_OFTEN_BYTES = 64 << 20
_open: dict[Path, Dump] = {}  # of this process, by where they lie


class Dump:
    """Captures `model`, or every model, into a run at `path` from now on; `pause` and `resume` stop
    and go on, `close` ends it.

    steps: those to capture, from 0; None for all. `mark` counts them, or the calls of the model
    where it is never called. layout: writer (docs/convert.md) of another tool's dump into `path`,
    at every pause and at the end; layout_options: its options; is_wanted: which calls it writes.
    options: those of `whence.capture`. A run at `path` is replaced; beside other files it lies
    below, in `whence-run`. Processes of one job (RANK, WORLD_SIZE) share a run, and a run that
    another process still writes is joined. Ends with the process. A layout that cannot be written,
    or a dump of nothing, is a line on stderr. first: number of the first step for the user. Raises
    UsageError, StoreFailed.
    """

    LAST_LAYER = LAST_LAYER
    """For `logits_module`: selects the last module that the model itself calls."""

    def __init__(
        self,
        path: AnyPath,
        model: Any = None,
        *,
        steps: Collection[int] | None = None,
        layout: str = "",
        layout_options: Mapping[str, Any] = {},
        is_wanted: Callable[[Call], bool] | None = None,
        first: int = 0,
        **options: Unpack[ForceArgument],
    ) -> None:
        from whence.errors import UsageError
        from whence.instrument.framework import set_determinism
        from whence.workflows.capture import labels
        from whence.workflows.capture.setup import listener_of, open_session

        chosen = make(**options)
        self.destination = Path(path).absolute()
        if opened_dump(self.destination) is not None:
            raise UsageError(
                f"this process already dumps into {self.destination}; choose another folder for "
                "another model"
            )
        self.model, self._first, self._took = model, first, False
        self.folder = created(self.destination, chosen)
        self._layout, self._layout_options, self._is_wanted = (
            layout,
            dict(layout_options),
            is_wanted or (lambda _: True),
        )
        self._marks: list[int] = []
        self._laid_out_bytes = self._waiting = self._laid_out = -1
        self._pid = os.getpid()
        self.session = open_session(str(self.folder), chosen, None)
        self._steps = steps
        if steps is not None:
            self.session.only_steps(steps)
            self.session.step_ended = self._step_ended
        set_determinism(chosen)
        self._listener: Any = listener_of("torch", self.session, model, str(self.folder))
        self._listener.install()
        self._labelled = labels.taking(self.session, str(self.folder))
        self._closed = False
        _open[self.destination] = self
        atexit.register(self.close)

    @property
    def is_open(self) -> bool:
        """Whether the dump still takes tensors."""
        return not self._closed and self.session.active

    def resume(self) -> None:
        """Record the calls that follow."""
        if self.is_open:
            self._listener.active = True

    def pause(self) -> None:
        """Record nothing until `resume`, and write the layout: at once while the run is small,
        otherwise when it has doubled and at the end.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._listener.active = False
        if self.session.active and self.session.calls:
            self._listener.drain()
            self._lay_out_if_small()

    def mark(self) -> None:
        """Begin a step, unless nothing was called since the last one began. Tensors of steps that
        are not wanted are not recorded.
        """
        self._listener.drain()
        if self.session.calls == self._waiting:
            return
        self._waiting = self.session.calls
        self._marks.append(self.session.next_order())
        if self._steps is not None:
            self.session.only_steps(None if len(self._marks) - 1 in self._steps else ())

    def close(self) -> None:
        """End the capture and write the layout. Idempotent."""
        if self._closed or os.getpid() != self._pid:  # a forked child has no right to these files
            return
        self._closed = True
        atexit.unregister(self.close)
        _open.pop(self.destination, None)
        refused = self.session.failed
        self._listener.remove()
        self.session.close()
        self._labelled()
        if self.session.calls:
            self._lay_out()
        with contextlib.suppress(OSError):
            # Later than what the tool's files hold: a file that is later still was changed.
            os.utime(self.folder / "run.json")
        if not self._took and (why := self._why_nothing(refused)):
            complain(f"nothing was dumped into {self.destination}: {why}")

    def _why_nothing(self, refused: str) -> str:
        """The reason why the dump is empty; "" when another process of the job writes the dump.

        refused: why the session ended early.
        """
        if refused:
            return "" if _job() else refused
        of = (
            f"the {type(self.model).__name__} that it was given"
            if self.model is not None
            else "a model"
        )
        if not self.session.calls:
            return f"{of} was never called while it listened"
        ran = len(self._marks) if self._marks else 0
        if self._steps is not None and ran and min(self._steps) >= ran:
            numbers = ", ".join(str(step + self._first) for step in sorted(self._steps)[:8])
            return f"step {numbers} was asked for, and {ran} ran (the first is step {self._first})"
        if self._steps is not None:
            numbers = ", ".join(str(step + self._first) for step in sorted(self._steps)[:8])
            return f"no call fell into step {numbers} (the first is step {self._first})"
        return f"{self.session.calls} calls were seen, and none was selected"

    def _step_ended(self, root: str, step: int) -> None:
        """Write the layout once the last wanted step is complete, without waiting for the end of
        the process.
        """
        if not self._steps:
            return
        if self._marks and len(self._marks) - 1 == max(self._steps):
            self._lay_out_if_small()
        elif not self._marks and step == max(self._steps):
            self._lay_out()

    def _lay_out_if_small(self) -> None:
        """Write the layout again while the run is small: each time it is written as a whole."""
        if self.session.sink().nbytes < max(_OFTEN_BYTES, 2 * self._laid_out_bytes):
            self._lay_out()

    def _lay_out(self) -> None:
        self._took = self._took or (not self._layout and self.session.records > 0)
        if not self._layout or self.session.records == self._laid_out:
            return
        self._laid_out = self.session.records
        from whence import store, writers

        sink: Any = self.session.sink()
        try:
            if not self._closed:
                sink.flush()
            run = store.open_run(self.folder, ranks={self.session.rank})
            self._laid_out_bytes = max(sink.nbytes, 1)
            selected = cut(run, self._is_shown, self._step if self._marks else None)
            if len(selected.calls):
                self._took = True
                self._make_room(selected)
                writers.named(self._layout).write(
                    selected, self.destination, **self._layout_options
                )
        except Exception as error:  # noqa: BLE001 - the program comes first, and the run is whole
            complain(f"{self.destination} has the run but not the tool's own files: {error}")

    def _is_shown(self, call: Call) -> bool:
        """Whether the tool's own files contain the call: a module or an operator of the tool, in a
        wanted step.
        """
        if call.kind not in ("module", "operator") or has_mark(call, Mark.NOT_SELECTED):
            return False
        return (
            not self._marks or self._steps is None or self._step(call) in self._steps
        ) and self._is_wanted(call)

    def _make_room(self, run: Run) -> None:
        """Delete the msprobe folders of steps that are written again: msprobe expects nothing else
        in them.
        """
        for rank, step in (
            {(call.rank, call.step) for call in run.calls} if self._layout == "msprobe" else ()
        ):
            shutil.rmtree(self.destination / f"step{step}" / f"rank{rank}", ignore_errors=True)

    def _step(self, call: Call) -> int:
        return max(bisect.bisect_right(self._marks, call.order) - 1, 0)


def opened_dump(path: AnyPath) -> Dump | None:
    """The dump of this process that still writes into `path`."""
    dump = _open.get(Path(path).absolute())
    return dump if dump is not None and dump.is_open and dump._pid == os.getpid() else None


def determine(seed: int, deterministic: bool) -> None:
    """Seed Python, numpy and torch in this process; deterministic: choose such kernels too. Raises
    UsageError.
    """
    from whence.instrument.framework import set_determinism

    set_determinism(make(seed=seed, deterministic=deterministic))


def cut(run: Run, is_wanted: Callable[[Call], bool], step: Callable[[Call], int] | None) -> Run:
    """The run reduced to the wanted calls; occurrences are counted anew.

    step: gives the new step of a call; None keeps the steps.
    """
    from whence.records import Over

    calls: list[Call] = []
    places: dict[int, int] = {-1: -1}
    occurrences: Counter[tuple[Any, ...]] = Counter()
    selected = [call for call in run.calls if is_wanted(call)]
    for place, call in enumerate(selected):
        places[call.id] = place
    for place, call in enumerate(selected):
        changed: dict[str, Any] = {"id": place, "parent": _above(run, call, places)}
        if step is not None:
            changed["step"] = counted = step(call)
            key = call.rank, call.root, counted, call.phase, call.scope, call.op
            changed |= {"occurrence": occurrences[key], "micro": 0}
            occurrences[key] += 1
        calls.append(msgspec.structs.replace(call, **changed))
    return Over(run, calls)


def _above(run: Run, call: Call, places: dict[int, int]) -> int:
    """New id of the nearest enclosing call that is kept."""
    parent = call.parent
    while parent not in places:
        parent = run.calls[parent].parent
    return places[parent]


def created(folder: Path, chosen: CaptureOptions) -> Path:
    """Create the run, or join the run of the same job. Returns its path."""
    from whence import store
    from whence.store.folder import load_info
    from whence.workflows.capture.setup import process_info

    if folder.is_dir() and any(folder.iterdir()) and not store.is_run(folder):
        folder = folder / _BESIDE
    job = _job()
    with _alone(folder.parent):
        if job and store.is_run(folder) and load_info(folder).settings.get("job") == job:
            return folder
        if store.is_run(folder) and store.is_written(folder):
            complain(
                f"{folder} is still being written by another process: what this one computes "
                "goes into the same run"
            )
            return folder
        info = process_info(chosen)
        store.create(
            folder,
            msgspec.structs.replace(
                info, settings={**info.settings, "job": job} if job else info.settings
            ),
            force=True,
        )
    return folder


def _job() -> str:
    """An identifier shared by the processes of one distributed job; "" for a single process."""
    if (
        not os.environ.get("WORLD_SIZE", "1").isdigit()
        or int(os.environ.get("WORLD_SIZE", "1")) < 2
    ):
        return ""
    names = (
        os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    )
    return " ".join((*names, str(os.getppid())))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes of this machine for the duration of the block."""
    from whence.errors import StoreFailed

    try:
        folder.mkdir(parents=True, exist_ok=True)
        import fcntl
    except ImportError:  # a system without it
        yield
        return
    except OSError as error:
        raise StoreFailed(f"cannot create a run in {folder}: {error.strerror or error}") from error
    place = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)
