"""Lines of the user's code around what a finding is about, read when the page is made.

A path comes from a run, which nobody vouches for: only a Python file of this machine is read, and
only a few lines of it.
"""

from __future__ import annotations

import re
import socket
from datetime import datetime
from pathlib import Path

from whence.records import Run
from whence.results.page import PageExcerpt

_AROUND = 3  # lines before and behind the one that is meant
_LARGEST = 4_000_000  # bytes of a file of code
_WIDEST = 200  # characters of a line
_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d{1,7})")


def excerpt(source: str, run: Run, side: str) -> PageExcerpt | None:
    """The lines around `source` ("file:line"); None where the file is not at hand."""
    match = _PLACE.fullmatch(source)
    if match is None or (run.info.host and run.info.host != socket.gethostname()):
        return None
    line = int(match["line"])
    try:
        path = Path(run.info.cwd) / match["file"]
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        lines = path.read_text(encoding="utf-8").splitlines()
        modified = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    if not 1 <= line <= len(lines):
        return None
    first = max(1, line - _AROUND)
    return PageExcerpt(
        side,
        _short(path, run),
        line,
        first,
        tuple(text[:_WIDEST] for text in lines[first - 1 : line + _AROUND]),
        _is_newer(modified, run.info.started),
    )


def _short(path: Path, run: Run) -> str:
    """The path as seen from the folder that the run was started in."""
    folder = Path(run.info.cwd) if run.info.cwd else Path.cwd()
    resolved = path.resolve()
    return resolved.relative_to(folder).as_posix() if resolved.is_relative_to(folder) else str(path)


def _is_newer(modified: float, started: str) -> bool:
    try:
        return modified > datetime.fromisoformat(started).timestamp() + 1
    except ValueError:
        return False
