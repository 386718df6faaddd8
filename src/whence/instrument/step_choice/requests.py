"""Requests to a captured process to record now, or to stop, through a small file that the process
checks between steps.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from pathlib import Path

import msgspec

from whence import disk

NAME = "trigger.json"
"""Name of the file in a run's folder through which `whence trigger` sends requests."""
_LOOK_S = 0.1


class Asked(enum.Enum):
    """What is requested: some steps, all steps from now on, or none."""

    STEPS = "steps"
    ON = "on"
    OFF = "off"


class Request(msgspec.Struct, frozen=True):
    """A request to every process of a run. steps: how many, None for the value of `for_steps`."""

    asked: Asked = Asked.STEPS
    steps: int | None = None


def ask(run: str | os.PathLike[str], request: Request) -> None:
    """Send a request to all processes that write the run. Raises OSError."""
    disk.write_file(Path(run) / NAME, msgspec.json.encode(request))


class RequestFile:
    """A file that is checked repeatedly. A new or changed file is a request."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._seen = 0
        self._looked = -_LOOK_S

    def take(self) -> bool:
        """Whether the file has appeared or changed since the last check. Checks at most every 0.1
        s.
        """
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
        """Delete the file, since nothing checks it any more."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def request(self) -> Request:
        """The request in the file; one that cannot be read requests steps."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._path.read_bytes(), type=Request)
        return Request()
