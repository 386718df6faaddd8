"""Runs code when a captured process ends, in whatever way, and when it forks another process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def at_the_end(finish: Callable[[], object], renew: Callable[[], object]) -> None:
    """Call `finish` when this process ends, and `renew` in each forked child, which calls `finish`
    at its own end.
    """
    atexit.register(finish)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    # multiprocessing ends its children without atexit. Its own finalizers do run there, but only
    # those made after it cleared them in the child; that is the moment this hook is called. It
    # holds the first argument weakly, so a module it is.
    multiprocessing.util.register_after_fork(
        sys.modules[__name__],
        lambda _: multiprocessing.util.Finalize(None, finish, exitpriority=10),
    )
    before_leaving_at_once(finish)


def before_leaving_at_once(finish: Callable[[], object]) -> None:
    """Call `finish` before `os._exit` too, by which some programs end to skip their teardown.

    This applies when the main thread calls `os._exit` outside of captured code. Elsewhere, as in a
    watchdog or in the middle of a call, the process ends as if it crashed.
    """
    leave = os._exit

    @functools.wraps(leave)
    def _exit(status: Any) -> None:
        if isinstance(status, int) and _is_at_rest():
            with contextlib.suppress(BaseException):  # nothing keeps the program from ending
                finish()
        leave(status)

    os._exit = _exit  # type: ignore[assignment]


def _is_at_rest() -> bool:
    """Whether this is the main thread and no code of whence runs below the program's."""
    if threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("whence.") and name != __name__:
            return False
        frame = frame.f_back
    return True
