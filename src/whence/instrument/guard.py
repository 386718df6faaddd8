"""Keeps what fails in a listener from the program it listens to: the capture ends and says why, the
program goes on.
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
    """A block of a listener's own code: holds its lock, and hands an exception that leaves the
    block to `give_up`, which ends it there.

    A Ctrl-C is not held back.
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


def put_back(undo: list[tuple[Any, str, Any, Any]]) -> None:
    """Take off wrappers, the last first. undo: (owner, name, wrapper, what was there); a wrapper
    that somebody wrapped in turn stays.
    """
    while undo:
        owner, name, wrapper, previous = undo.pop()
        if getattr(owner, name) is wrapper:
            setattr(owner, name, previous)


def end_capture(session: Session, error: BaseException) -> None:
    """End a capture in which this error was raised by our own code, with the line it comes from."""
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
    """The program fails: write the steps before that, where they were kept in memory."""
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
