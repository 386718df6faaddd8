"""Keeps errors of a listener away from the program: the capture ends with a reason, the program
goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from whence.errors import StoreFailed
from whence.instrument.session import Session
from whence.instrument.step_choice.ring import StepRing
from whence.instrument.wording import counted, raised


class Guard:
    """Context of a listener's own code: holds its lock, and passes an exception to `give_up`
    instead of raising it.

    A Ctrl-C is raised.
    """

    def __init__(self, lock: threading.RLock, give_up: Callable[[Exception], None]) -> None:
        self._lock: Any = lock
        self._give_up = give_up

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._lock.release()
        if not isinstance(error, Exception):
            return False
        self._give_up(error)
        return True


class Replacements:
    """Attributes of a framework that have wrappers in their place."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, wrapper: Any) -> None:
        """Put a wrapper in the place of an attribute."""
        self._undo.append((owner, name, wrapper, getattr(owner, name)))
        setattr(owner, name, wrapper)

    def remove(self) -> None:
        """Take the wrappers away in reverse order; one that another tool has wrapped stays.
        Idempotent.
        """
        while self._undo:
            owner, name, wrapper, previous = self._undo.pop()
            if getattr(owner, name) is wrapper:
                setattr(owner, name, previous)


def end_capture(session: Session, error: BaseException) -> None:
    """End a capture after this error in whence's own code; the reason names the line of the
    error.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = (
        f" ({os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno})"  # noqa: PTH119
        if place is not None
        else ""
    )
    session.fail(f"whence failed: {raised(error)}{where}")


def keep_ring(session: Session, why: str) -> None:
    """Write the steps kept in memory, if there are any, because the program fails. why: the event,
    for the note.
    """
    if session.options.ring is None or session.failed:
        return
    try:
        sink = session.sink()
        assert isinstance(sink, StepRing)
        steps = sink.write()
        session.note("trigger", f"{why}; written: {counted(steps, 'step')} before", aloud=True)
        sink.flush()
    except StoreFailed as error:
        session.fail(str(error))
