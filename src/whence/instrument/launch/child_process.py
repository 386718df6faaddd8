"""Runs a command to its end: signals are passed on, each once, and its exit code is that of the
shell.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import IO, Any, NamedTuple

from whence.errors import CaptureError

_RELAYED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class EndedProcess(NamedTuple):
    """How a command ended: its exit code (128 + n when signal n killed it) and how long it took, in
    seconds.
    """

    exit_code: int
    duration_s: float


def execute(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None = None
) -> EndedProcess:
    """Run a command to its end with our stdin, stdout, stderr, terminal and process group; pass
    signals on, each once.

    A Ctrl-C at the terminal reaches the child by itself (same process group) and is not sent again;
    a signal sent to this process alone is. log: a file that takes stdout and stderr instead; stdin
    is empty then, and the command is a step of ours: Ctrl-C ends this process too, whatever exit
    code a command that handles it (pytest) has. Raises CaptureError when the command cannot be
    started, KeyboardInterrupt.
    """
    began = time.monotonic()
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []
    received: set[int] = set()

    def relay(signum: int, _frame: FrameType | None) -> None:
        received.add(signum)
        if child is None:
            early.append(signum)
        elif not sentinel.saw(signum):
            child.send_signal(signum)

    with _Sentinel() as sentinel, _handlers(relay):
        try:
            child = _start(command, environment, log)
        except OSError as err:
            raise CaptureError(f"cannot run {command[0]}: {err.strerror or err}") from err
        for signum in early:
            relay(signum, None)
        status = child.wait()
    if log is not None and signal.SIGINT in received:
        raise KeyboardInterrupt
    return EndedProcess(status if status >= 0 else 128 - status, time.monotonic() - began)


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    streams: dict[str, Any] = (
        {} if log is None else {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    )
    # close_fds=False: descriptors the user opened for the command (make's job server, 3<file) stay
    # open in it; ours never are.
    try:
        return subprocess.Popen(list(command), env=dict(environment), close_fds=False, **streams)
    except OSError as err:
        if err.errno != errno.ENOEXEC:
            raise
        # A script without a first line: every shell runs it with sh.
        return subprocess.Popen(
            ["/bin/sh", *command], env=dict(environment), close_fds=False, **streams
        )


@contextlib.contextmanager
def _handlers(relay: Callable[[int, FrameType | None], None]) -> Any:
    """Relay signals while the command runs. One that was ignored before (nohup) stays ignored, in
    the child too.
    """
    previous: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread: signals are somebody else's
        for name in _RELAYED:
            signum = getattr(signal, name, None)
            if signum is not None and signal.getsignal(signum) is not signal.SIG_IGN:
                previous[signum] = signal.signal(signum, relay)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


_SENTINEL = """
import os, signal
for name in %r:
    if hasattr(signal, name):
        signal.signal(getattr(signal, name), lambda n, frame: os.write(1, bytes([n])))
while os.read(0, 1):
    pass
"""


class _Sentinel:
    """A small process beside the child that tells a signal to the whole process group (Ctrl-C, kill
    -INT -PGID) from one to us alone.

    Without it a signal sent to the group would reach the child twice, or one sent to us never.
    """

    WAIT_S = 0.5

    def __enter__(self) -> _Sentinel:
        self._pids: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SENTINEL % (_RELAYED,)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()

    def saw(self, signum: int) -> bool:
        """Whether the sentinel received this signal too, now or within a moment. Without a
        sentinel, a Ctrl-C at a terminal counts as received.
        """
        process = self._process
        if process is None or process.stdout is None:
            return signum == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty()
        until = time.monotonic() + self.WAIT_S
        while signum not in self._pids:
            seconds = until - time.monotonic()
            ready = seconds > 0 and select.select([process.stdout], [], [], seconds)[0]
            if not ready:
                return False
            data = os.read(process.stdout.fileno(), 64)
            if not data:
                # It died: of this very signal when that came before its handlers were set.
                return process.wait() == -signum
            self._pids.update(data)
        self._pids.discard(signum)
        return True
