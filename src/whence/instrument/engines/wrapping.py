"""Wraps methods of an engine's classes while a listener is installed, and marks whence's own code,
in which no model is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from whence.instrument.guard import Guard, Replacements, end_capture
from whence.instrument.session import Session
from whence.instrument.wording import raised


class Wrappers:
    """The wrappers of one listener. An exception in them never reaches the program."""

    def __init__(self, session: Session) -> None:
        self.session, self.active = session, False
        self._lock = threading.RLock()
        self._busy = threading.local()
        self._replaced = Replacements()

    def wrap(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of a class, or a function of a module, by `method(previous, *args,
        **kwargs)`. Nothing happens where there is none of this name.
        """
        kinds = getattr(owner, "__mro__", (owner,))
        holder = next((kind for kind in kinds if name in vars(kind)), None)
        if holder is None:
            return
        previous = getattr(holder, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.active or self.session.failed or getattr(self._busy, "on", False):
                return previous(*args, **kwargs)
            return method(previous, *args, **kwargs)

        wrapper.__name__, wrapper.__doc__ = name, previous.__doc__
        wrapper.__wrapped__ = previous  # type: ignore[attr-defined]
        self._replaced.put(holder, name, wrapper)

    def note(self, owner: Any, name: str, noting: Callable[..., None]) -> None:
        """Have `noting(out, *args, **kwargs)` called after every call of a method."""

        def method(previous: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            out = previous(*args, **kwargs)
            with self.own():
                noting(out, *args, **kwargs)
            return out

        self.wrap(owner, name, method)

    def call(
        self,
        previous: Callable[..., Any],
        args: Iterable[Any],
        kwargs: Mapping[str, Any],
        ended: Callable[[Any, str], None],
    ) -> Any:
        """Call a method for the program, and after it `ended(out, error)`: what it raised, "" for
        nothing.
        """
        try:
            out = previous(*args, **kwargs)
        except BaseException as error:  # of the program: recorded, and raised again
            with self.own():
                ended(None, raised(error))
            raise
        with self.own():
            ended(out, "")
        return out

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
