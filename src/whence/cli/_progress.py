"""What long commands say while they work."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import click

_SILENT_S = 1.0  # work that takes less says nothing
_REDRAW_S = 0.1


class Progress:
    """A line on stderr while long work goes on: a bar where its length is known. It comes after a
    second and goes with the work.
    """

    def __init__(self) -> None:
        from whence.report.tables import clean  # before the second begins: importing takes a while

        self._clean = clean
        self._lock = threading.Lock()
        self._bar: Any = None
        self._is_visible = False
        self._drawn_s = 0.0
        self._state: tuple[str, int, int | None] = ("", 0, None)
        self._timer = threading.Timer(_SILENT_S, self._show)
        self._timer.daemon = True
        self._timer.start()

    def say(self, text: str) -> None:
        """What is being done now; nobody knows for how long."""
        self._set(text, 0, None)

    def count(self, number: int, of: int, text: str) -> None:
        """How far `what` is."""
        self._set(text, number, of)

    def close(self) -> None:
        """Take the line away. Idempotent."""
        with self._lock:
            self._timer.cancel()
            if self._is_visible:
                _write("")
            self._is_visible = False

    def _set(self, text: str, number: int, of: int | None) -> None:
        with self._lock:
            self._state = self._clean(text), number, of
            if self._is_visible and time.monotonic() >= self._drawn_s + _REDRAW_S:
                self._draw()

    def _show(self) -> None:
        with self._lock:
            if not self._timer.finished.is_set():  # else closed while this waited
                self._is_visible = True
                self._draw()

    def _draw(self) -> None:
        text, number, of = self._state
        line = text
        if of is not None:
            if self._bar is None or self._bar.length != of or self._bar.pos > number:
                self._bar = click.progressbar(length=of, width=32, show_pos=True, show_eta=True)
            self._bar.label = text
            self._bar.make_step(number - self._bar.pos)
            line = self._bar.format_progress_line()
        _write(line[: shutil.get_terminal_size().columns - 1])
        self._drawn_s = time.monotonic()


def _write(line: str) -> None:
    """Put this in the place of what the line of the terminal says."""
    sys.stderr.write(f"\r\x1b[2K{line}")
    sys.stderr.flush()


class _Silent:
    """The same where no terminal is looked at."""

    count = None

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


@contextlib.contextmanager
def shown() -> Iterator[Progress | _Silent]:
    """A line for as long as a block works, on a terminal only: verbs take its `count` as progress,
    or its `say` as tell.
    """
    line = Progress() if sys.stderr.isatty() else _Silent()
    try:
        yield line
    finally:
        line.close()
