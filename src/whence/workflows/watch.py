"""Two runs compared while they are still being written: again with every step that both have ended,
until the answer stands.

The programs that write a run can be ended (`stop_writers`), so that each can still close it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from whence.errors import UnreadableRun, WhenceError
from whence.records import RunInfo
from whence.records.marks import WRITING
from whence.results import Confidence, Status

if TYPE_CHECKING:
    from whence.records import Run
    from whence.results import Comparison
    from whence.store import ProcessInfo
    from whence.workflows.watch_windows import Look


class _Side(NamedTuple):
    """A run as it is now. ended_steps: (rank, root, step) of the steps that have ended."""

    run: Run
    writing: bool
    ended_steps: frozenset[tuple[int, str, int]]

    @property
    def last(self) -> int:
        """The last step that has ended, -1 before the first."""
        return max((step for *_, step in self.ended_steps), default=-1)


def watch(
    reference: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    every: float = 1.0,
    tell: Callable[[str], None] | None = None,
    stop: bool | Callable[[str], None] = False,
    **how: Any,
) -> Iterator[Comparison]:
    """Compare two runs while one or both are still being written: yields comparisons, the last of
    which is the answer.

    Whenever a side has finished further steps, the steps that both have finished are compared; when
    nothing more is written, everything is. The last comparison is that one, or the first with a
    certain finding. A run that does not exist yet is waited for. Runs in windows of steps (`whence
    run --window`) are compared window by window, each once, and an answer is about all windows so
    far. every: seconds between two looks. output: a folder that holds the latest comparison. tell:
    called with what is waited for.
    stop: at the first certain finding, end the programs that still write the runs: those of this
    user on this host, by SIGINT, after which they can close their runs; by SIGTERM where they
    ignore it or go on for half a minute. A sentence for each says that it was ended, or why not and
    what to do: on stderr, or to the function that `stop` is. how: arguments of `compare`, and
    `discard=True`: delete a window of both runs once it is compared, but for the first two that are
    not the same. Raises what `compare` raises, and UsageError where only one run is in windows.
    """
    from whence.workflows.saved import check_output, write

    discard = bool(how.pop("discard", False))
    if output is not None:
        check_output(Path(output), force)
    if _are_windows(reference, target, discard=discard, every=every, tell=tell):
        from whence.workflows.watch_windows import watch_windows

        paths = Path(reference), Path(target)
        looks = watch_windows(*paths, every=every, discard=discard, tell=tell, **how)
    else:
        looks = _watch_growing(reference, target, every=every, tell=tell, **how)
    for look in looks:
        if output is not None:
            write(look.result, os.fspath(output))
        is_certain = look.result.status == Status.DIFFERENT and any(
            finding.confidence == Confidence.CERTAIN for finding in look.result.findings
        )
        if stop and look.writing and is_certain:
            stop_writers(look.writing, stop if callable(stop) else _to_stderr)
        yield look.result
        if is_certain:
            return


def _are_windows(
    reference: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    discard: bool,
    every: float,
    tell: Callable[[str], None] | None,
) -> bool:
    """Are both runs captured in windows of steps? Waits until that is known. Raises UsageError
    where it is so of one of them, or of none and `discard` asks for it.
    """
    from whence.store.folder import is_run, load_info
    from whence.workflows.watch_windows import check_windows, window_steps

    paths = Path(reference), Path(target)
    while not all(path.exists() for path in paths) and (
        discard or any(is_run(path) and window_steps(load_info(path)) for path in paths)
    ):
        if tell is not None:
            tell(f"waiting for {next(path for path in paths if not path.exists())}")
        time.sleep(every)
    infos = [load_info(path) if is_run(path) else RunInfo() for path in paths]
    if not discard and not any(map(window_steps, infos)):
        return False
    check_windows(paths, (infos[0], infos[1]))
    return True


def _watch_growing(
    reference: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    every: float,
    tell: Callable[[str], None] | None,
    **how: Any,
) -> Iterator[Look]:
    """The answers about all steps that both runs have ended, whenever there are more."""
    from whence.workflows.compare import compare
    from whence.workflows.watch_windows import Look

    state_before: tuple[Any, ...] = ()
    while True:
        sides = [_looked(path, tell) for path in (reference, target)]
        if None not in sides:
            reference_side, target_side = (side for side in sides if side is not None)
            writing = reference_side.writing or target_side.writing
            state = (
                writing,
                *(
                    (side.ended_steps, len(side.run.calls) if not side.writing else 0)
                    for side in (reference_side, target_side)
                ),
            )
            if state != state_before and (
                not writing or min(reference_side.last, target_side.last) >= 0
            ):
                state_before, began = state, time.monotonic()
                runs = (
                    _shared(reference_side, target_side)
                    if writing
                    else (reference_side.run, target_side.run)
                )
                # as far as both have come; the last look takes them as they ended
                so_far = {**how, "partial": True} if writing else how
                yield Look(compare(*runs, **so_far), (reference, target) if writing else ())
                if not writing:
                    return
                # A look costs more the longer the runs are; half of the time at most is spent on
                # looking.
                time.sleep(time.monotonic() - began)
            elif tell is not None:
                tell(f"{reference_side.last + 1} and {target_side.last + 1} steps have ended")
        time.sleep(every)


def _to_stderr(sentence: str) -> None:
    print(f"whence: {sentence}", file=sys.stderr, flush=True)


def _looked(path: str | os.PathLike[str], tell: Callable[[str], None] | None) -> _Side | None:
    from whence.readers import opening

    try:
        run = opening.open_run(os.fspath(path))
    except UnreadableRun as error:
        if Path(path).exists() and not _unborn(path):
            raise
        if tell is not None:
            tell(f"waiting for {os.fspath(path)}: {str(error).splitlines()[0]}")
        return None
    return _Side(run, WRITING in run.ended, frozenset((s.rank, s.root, s.step) for s in run.steps))


def _unborn(path: str | os.PathLike[str]) -> bool:
    """Is this a run that nobody has written anything into yet, and whose command has not ended?"""
    from whence.store.folder import load_info

    try:
        return "exit_code" not in load_info(Path(path)).settings
    except UnreadableRun:
        return False


def _shared(reference_side: _Side, target_side: _Side) -> tuple[Run, Run]:
    """Both runs up to the last step that each side which is being written has ended."""
    last = min(side.last for side in (reference_side, target_side) if side.writing)
    return _ended(reference_side, last), _ended(target_side, last)


def _ended(side: _Side, last: int) -> Run:
    import msgspec

    from whence.records import Over

    calls = [
        c
        for c in side.run.calls
        if c.step <= last and ((c.rank, c.root, c.step) in side.ended_steps or not side.writing)
    ]
    places = {call.id: place for place, call in enumerate(calls)}
    return Over(
        side.run,
        [
            msgspec.structs.replace(c, id=places[c.id], parent=places.get(c.parent, -1))
            for c in calls
        ],
    )


_GRACE_S = 30.0
"""So long a program that was interrupted has to close its run; then it is terminated."""
_LOOK_S = 0.05


class _Writer(NamedTuple):
    """A process that writes a run. folder: its folder in that run."""

    run: Path
    folder: Path
    info: ProcessInfo

    def __str__(self) -> str:
        return f"rank {self.info.rank} of {self.run} (pid {self.info.pid})"


class _Asked(NamedTuple):
    """A process that was sent a signal. process: a descriptor of it (pidfd)."""

    writer: _Writer
    process: int
    number: signal.Signals


def stop_writers(
    runs: Iterable[str | os.PathLike[str]],
    say: Callable[[str], None],
    grace_s: float = _GRACE_S,
) -> None:
    """End every process of this user and host that writes one of the runs, and wait until it has
    ended. say: called with a sentence for each process that wrote: ended, or why not.

    SIGINT, since Python then leaves its blocks and closes the run; SIGTERM where that is ignored or
    has not ended the process after `grace_s` seconds. A process is sent a signal only while it has
    the pid and the start that its folder states and holds that folder's journal open. This process
    is never ended.
    """
    asked: list[_Asked] = []
    reached: set[int] = set()
    try:
        for writer in _writers(runs):
            if why := _out_of_reach(writer):
                say(why)
            elif writer.info.pid not in reached:
                reached.add(writer.info.pid)
                answer = _ask(writer)
                if isinstance(answer, _Asked):
                    asked.append(answer)
                elif answer:
                    say(answer)
        _await(asked, say, grace_s)
    finally:
        for each in asked:
            os.close(each.process)


def _writers(runs: Iterable[str | os.PathLike[str]]) -> list[_Writer]:
    from whence.store.folder import load_process, process_folders
    from whence.store.status import RUNNING, read_status

    writers = []
    for run in map(Path, runs):
        with contextlib.suppress(OSError):  # a run that is not in a folder of this machine
            for folder in sorted(process_folders(run)):
                # a process that has only begun has no process.json yet, and no step either
                with contextlib.suppress(WhenceError):
                    writer = _Writer(run, folder, load_process(folder))
                    if read_status(folder).ended == RUNNING:
                        writers.append(writer)
    return [writer for writer in writers if _is_writing(writer)]


def _is_writing(writer: _Writer) -> bool:
    from whence.store.folder import is_writing

    return is_writing(writer.folder, writer.info)


def _out_of_reach(writer: _Writer) -> str:
    """Why this process cannot be ended from here, and what to do; "" where it can be tried."""
    info = writer.info
    if info.host != socket.gethostname():
        return f"not ended: {writer} runs on {info.host}; on that machine: kill -INT {info.pid}"
    if info.pid == os.getpid():
        return f"not ended: {writer} is the process that watches"
    if not hasattr(os, "pidfd_open") or not Path("/proc/self/fd").is_dir():
        return (
            f"not ended: this system does not say whether {writer} is still the program that "
            f"writes; if it is: kill -INT {info.pid}"
        )
    return ""


def _ask(writer: _Writer) -> _Asked | str:
    """Send the signal that lets the program close its run; why not where that failed, "" where it
    no longer writes.
    """
    pid = writer.info.pid
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return ""
    except OSError as error:
        return f"not ended: {writer}: {error.strerror}; end it: kill -INT {pid}"
    try:
        # From here on the pid may be reused, the descriptor is not.
        if not _is_writing(writer):
            reason = ""
        elif Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            reason = f"not ended: {writer} is another user's; ask them for: kill -INT {pid}"
        elif not _holds_journal(writer):
            reason = f"not ended: {writer} has closed the journal of its run"
        else:
            number = signal.SIGINT if _has_handler(pid, signal.SIGINT) else signal.SIGTERM
            signal.pidfd_send_signal(process, number)
            return _Asked(writer, process, number)
    except ProcessLookupError:
        reason = ""
    except OSError as error:
        reason = f"not ended: {writer}: {error.strerror}; end it: kill -INT {pid}"
    os.close(process)
    return reason


def _holds_journal(writer: _Writer) -> bool:
    """Whether the process has the journal of its folder open. Raises OSError."""
    from whence.store.folder import JOURNAL

    journal = (writer.folder / JOURNAL).stat()
    for entry in Path(f"/proc/{writer.info.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.path.samestat(entry.stat(), journal):
                return True
    return False


def _has_handler(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal itself, as Python does with SIGINT unless a shell started
    it in the background. Raises OSError.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def _await(asked: list[_Asked], say: Callable[[str], None], grace_s: float) -> None:
    """Wait for the processes; terminate those that have not ended in time."""
    terminated = [each._replace(number=signal.SIGTERM) for each in _after(asked, say, grace_s)]
    for each in terminated:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(each.process, each.number)
    for each in _after(terminated, say, grace_s):
        say(
            f"not ended: {each.writer} goes on after {each.number.name}; end it: kill -KILL "
            f"{each.writer.info.pid}"
        )


def _after(asked: list[_Asked], say: Callable[[str], None], grace_s: float) -> list[_Asked]:
    """Those that have not ended after so many seconds; the others are told as they end."""
    until = time.monotonic() + grace_s
    while True:
        running = []
        for each in asked:
            if _has_ended(each):
                say(f"ended: {each.writer}, by {each.number.name}")
            else:
                running.append(each)
        asked = running
        if not asked or time.monotonic() >= until:
            return asked
        time.sleep(_LOOK_S)


def _has_ended(asked: _Asked) -> bool:
    """Whether the process has ended: its descriptor becomes readable then, also where its parent
    has not waited for it.
    """
    import select

    poll = select.poll()
    poll.register(asked.process, select.POLLIN)
    return bool(poll.poll(0))
