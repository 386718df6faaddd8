"""Counts, sizes and exceptions as a person reads them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from whence.records import Statistics


def counted(number: int, noun: str, plural: str = "") -> str:
    """ "1 step", "1 204 calls"."""
    return f"{number:,}".replace(",", " ") + " " + (noun if number == 1 else plural or noun + "s")


def raised(error: BaseException) -> str:
    """ "ValueError: no such token", at most 300 characters; the type alone where there is no
    text.
    """
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception that cannot be printed is still only the program's
        text = ""
    return f"{name}: {text}"[:300] if text else name


def size(nbytes: float) -> str:
    """A size in decimal units with three digits: "412 MB", "1.25 GB", "0 B"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            return f"{nbytes:.3g} {unit}" if nbytes < 999.5 else f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def stderr_is_terminal() -> bool:
    """Whether stderr is a terminal rather than a pipe, file or notebook."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # no stderr, or one that was closed
        return False


def stderr_of_now() -> Callable[[str], None]:
    """Prints a line to what stderr is now. Where the program has put something else in its place
    since, such as a file of its own at number 2, it prints nothing.
    """
    stream = sys.stderr
    file = _file_of(stream)

    def say(text: str) -> None:
        if sys.stderr is stream and _file_of(stream) == file:
            print(text, file=stream, flush=True)

    return say


def _file_of(stream: Any) -> tuple[int, int] | None:
    """Device and inode of an open stream, None where it has no file."""
    try:
        status = os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def printed(name: str, dtype: str, shape: tuple[int, ...], statistics: Statistics | None) -> str:
    """The line that `--print` shows of a tensor."""
    figures = ""
    if statistics is not None and statistics.mean is not None:
        figures = (
            f"  min {statistics.min:.6g}  max {statistics.max:.6g}  mean "
            f"{statistics.mean:.6g}  std {statistics.std:.6g}"
        )
    if statistics is not None and (statistics.nan or statistics.inf):
        figures += f"  NaN {statistics.nan}  Inf {statistics.inf}"
    return f"{name}  {dtype} {list(shape)}{figures}"
