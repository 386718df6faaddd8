"""Ends the programs that write a run, so that each can still close it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from whence.errors import WhenceError

if TYPE_CHECKING:
    from whence.store import ProcessInfo

GRACE_S = 30.0
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
    grace_s: float = GRACE_S,
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
