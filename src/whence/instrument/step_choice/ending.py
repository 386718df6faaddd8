"""Does something before a process ends by SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class BeforeTermination:
    """Runs `act` on SIGTERM, then lets the signal end the process as it would have.

    Does nothing where the program has its own handler. `act` runs on a separate thread, since the
    signal may arrive while the main thread holds a lock that `act` needs.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._process = os.getpid()

    def install(self) -> bool:
        """Start listening. Returns False where that is not possible."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return False
        signal.signal(signal.SIGTERM, self._handle)
        return True

    def remove(self) -> None:
        """Stop listening."""
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == self._handle
        ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
        if os.getpid() != self._process:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        threading.Thread(target=self._end, name="whence-termination").start()

    def _end(self) -> None:
        try:
            self._act()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
