"""Asks a process that is captured to record now, or to stop: through a small file that it looks at
between steps, or a signal.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import msgspec

from whence import disk

NAME = "trigger.json"
"""The file in a run's folder through which `whence trigger` asks."""
_LOOK_S = 0.1


class Asked(enum.Enum):
    """What is asked for: some steps, all steps from now on, or none any more."""

    STEPS = "steps"
    ON = "on"
    OFF = "off"


class Request(msgspec.Struct, frozen=True):
    """What is asked of every process of a run. steps: how many, None for those of `for_steps`."""

    asked: Asked = Asked.STEPS
    steps: int | None = None


def ask(run: str | os.PathLike[str], request: Request) -> None:
    """Ask all processes that write the run. Raises OSError."""
    disk.write_file(Path(run) / NAME, msgspec.json.encode(request))


class RequestFile:
    """A file that is looked at again and again. A new or changed one is a request."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._seen = 0
        self._looked = -_LOOK_S

    def take(self) -> bool:
        """Has it appeared or changed since it was asked last? Looks at most every 0.1 s."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return False
        self._looked = now
        try:
            changed = self._path.stat().st_mtime_ns
        except OSError:
            self._seen = 0
            return False
        seen, self._seen = self._seen, changed
        return changed != seen

    def remove(self) -> None:
        """Delete it: nobody looks any more."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def request(self) -> Request:
        """What stands in it; a file of the user's asks for steps, whatever it holds."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._path.read_bytes(), type=Request)
        return Request()


class RequestSignal:
    """SIGUSR1, where the program leaves it to what the system does. Only the main thread can
    install it.
    """

    def __init__(self) -> None:
        self._came = False
        self._process = os.getpid()
        self._number = getattr(signal, "SIGUSR1", None)

    def install(self) -> bool:
        """Begin to listen. False where the program has a handler of its own, or cannot have one."""
        if (
            self._number is None
            or threading.current_thread() is not threading.main_thread()
            or signal.getsignal(self._number) is not signal.SIG_DFL
        ):
            return False
        signal.signal(self._number, self._handle)
        return True

    def remove(self) -> None:
        """Stop listening."""
        if (
            self._number is not None
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(self._number) == self._handle
        ):
            signal.signal(self._number, signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._came = True
        else:  # a forked child: as if there were no handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def take(self) -> bool:
        """Has it come since it was asked last?"""
        came, self._came = self._came, False
        return came
