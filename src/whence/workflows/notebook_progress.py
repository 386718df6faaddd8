"""A line of progress for long work in a notebook.

It appears below the running cell after a second and disappears with the work. Elsewhere there is
none; the command line has its own.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SILENT_S = 1.0  # work that takes less says nothing
_REDRAW_S = 0.25
_WIDTH = 32

Count = Callable[[int, int, str], None]
Tell = Callable[[str], None]


@contextmanager
def counting(progress: Count | None) -> Iterator[Count | None]:
    """The callback (number done, number in total, what) for a verb: the caller's own, else a line
    of this notebook, else None.
    """
    if progress is not None or not in_notebook():
        yield progress
        return
    with _line() as line:
        yield line.count


@contextmanager
def telling(tell: Tell | None) -> Iterator[Tell]:
    """The callback (text) for work of unknown length: the caller's own, else a line of this
    notebook, else one without effect.
    """
    if tell is not None or not in_notebook():
        yield tell or (lambda _: None)
        return
    with _line() as line:
        yield line.say


def in_notebook() -> bool:
    """Whether this code runs in the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class _Line:
    """One display that is redrawn in place. A verb that is called inside another one uses the line
    of the outer verb.
    """

    def __init__(self) -> None:
        self._began = self._drawn = time.monotonic()
        self._handle: Any = None

    def say(self, text: str) -> None:
        """Show what is being done."""
        self._draw(text, "")

    def count(self, number: int, of: int, text: str) -> None:
        """Show the progress."""
        filled = round(_WIDTH * number / of) if of else 0
        self._draw(text, f"[{'#' * filled}{'-' * (_WIDTH - filled)}]  {number}/{of}")

    def close(self) -> None:
        """Remove the line."""
        if self._handle is not None:
            self._handle.update(_shown(""), raw=True)

    def _draw(self, text: str, bar: str) -> None:
        now = time.monotonic()
        if now < self._began + _SILENT_S or (self._handle and now < self._drawn + _REDRAW_S):
            return
        self._drawn = now
        words = _shown("  ".join(part for part in (text, bar) if part))
        if self._handle is None:
            display = importlib.import_module("IPython.display").display
            self._handle = display(words, raw=True, display_id=True)
        else:
            self._handle.update(words, raw=True)


_open: list[_Line] = []


@contextmanager
def _line() -> Iterator[_Line]:
    if _open:
        yield _open[0]
        return
    line = _Line()
    _open.append(line)
    try:
        yield line
    finally:
        _open.clear()
        line.close()


def _shown(line: str) -> dict[str, str]:
    from html import escape

    from whence.report.tables import clean

    plain = clean(line)
    rich = f'<pre style="font-family:monospace">{escape(plain)}</pre>' if plain else ""
    return {"text/plain": plain, "text/html": rich}
