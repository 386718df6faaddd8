"""Wraps methods of an engine's classes while a listener is installed, and marks whence's own code,
in which no model is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from whence.instrument.guard import Guard, Replacements, end_capture
from whence.instrument.session import Session


class Wrappers:
    """The wrappers of one listener. An exception in them never reaches the program."""

    def __init__(self, session: Session) -> None:
        self.session, self.active = session, False
        self._lock = threading.RLock()
        self._busy = threading.local()
        self._replaced = Replacements()

    def wrap(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Replace a method by `method(previous, *args, **kwargs)`."""
        previous = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.active or getattr(self._busy, "on", False):
                return previous(*args, **kwargs)
            return method(previous, *args, **kwargs)

        wrapper.__name__, wrapper.__doc__ = name, previous.__doc__
        wrapper.__wrapped__ = previous  # type: ignore[attr-defined]
        self._replaced.put(owner, name, wrapper)

    def put_back(self) -> None:
        """Remove all wrappers. Idempotent."""
        self.active = False
        self._replaced.remove()

    def forked(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it."""
        self.session.failed = "forked"
        self._lock = threading.RLock()

    def own(self) -> OwnCode:
        """A block of the listener's own code."""
        return OwnCode(Guard(self._lock, self.give_up), self._busy)

    def give_up(self, error: BaseException) -> None:
        """End the capture after an error in whence's own code; the program goes on."""
        self.active = False
        end_capture(self.session, error)


class OwnCode:
    """Context of whence's own code on this thread: models that run in it are not recorded."""

    def __init__(self, guard: Guard, busy: threading.local) -> None:
        self._guard, self._busy = guard, busy
        self._before = False

    def __enter__(self) -> None:
        self._guard.__enter__()
        self._before, self._busy.on = getattr(self._busy, "on", False), True

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._busy.on = self._before
        return self._guard.__exit__(kind, error, trace)
