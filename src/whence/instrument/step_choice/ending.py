"""Does something before a process ends by SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class BeforeTermination:
    """Runs `act` when SIGTERM comes, then lets it end the process as if nobody had listened.

    Where the program has a handler of its own nothing is changed. `act` runs on a thread of its
    own: the signal may come while the main thread holds a lock that `act` needs.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._process = os.getpid()

    def install(self) -> bool:
        """Begin to listen. False where that is not possible."""
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
