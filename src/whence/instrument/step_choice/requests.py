"""Asks a process that is captured to record now, or to stop: through a small file that it looks at
between steps.
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
        """What stands in it; one that cannot be read asks for steps."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._path.read_bytes(), type=Request)
        return Request()
