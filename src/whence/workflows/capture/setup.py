"""What a capture that ends says on a terminal while it makes the index of a large run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

_SILENT_S = 1.0


def finishing(folder: str) -> Callable[[int, int], None] | None:
    """Called with (done, of): a line on stderr after a second, gone when all is done. None where stderr is no terminal.

    It starts no thread and loads no package: this is the captured program, which is ending.
    """
    try:
        if not sys.stderr.isatty():
            return None
    except (AttributeError, ValueError):  # no stderr, or one that was closed
        return None
    return _Line(f"whence: finishing {ascii(folder)[1:-1]}").tell


class _Line:
    def __init__(self, text: str) -> None:
        self._text = text
        self._began = 0.0
        self._shown = ""

    def tell(self, done: int, of: int) -> None:
        now = time.monotonic()
        self._began = self._began or now
        text = f"{self._text}: {100 * done // of} %" if done < of and now - self._began > _SILENT_S else ""
        if text != self._shown:
            self._shown = text
            with contextlib.suppress(OSError, ValueError):  # the index matters, the terminal does not
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()
