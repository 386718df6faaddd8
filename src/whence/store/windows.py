"""Windows of steps of a run: which were deleted once they were compared, and what takes them one by
one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson

from whence import disk
from whence.errors import StoreFailed, UsageError
from whence.records.places import DELETED_WINDOWS
from whence.store.folder import load_json, windows_of


def deleted_windows(run: Path) -> int:
    """How many windows of a run were deleted."""
    try:
        number = load_json(run / DELETED_WINDOWS).get("windows", 0)
    except (OSError, ValueError):
        return 0
    return number if isinstance(number, int) else 0


def delete_window(window: Path) -> None:
    """Delete a window, a folder of a run. Raises StoreFailed."""
    run = window.parent
    text = orjson.dumps({"windows": deleted_windows(run) + 1})
    try:
        # first: a run without windows is not one in which nothing was captured
        disk.write_file(run / DELETED_WINDOWS, text + b"\n")
        shutil.rmtree(window)
    except OSError as error:
        raise StoreFailed(
            f"cannot delete the window {window}: {error.strerror or error}; delete it yourself, or "
            "leave --discard out"
        ) from error


def refuse_windows(run: Path, does: str) -> None:
    """Raise UsageError for a run in windows of steps, each of which is a run of its own. does: what
    a command does with one run ("packs").
    """
    windows = windows_of(run) if run.is_dir() else []
    if windows:
        raise UsageError(
            f"{run} is captured in windows of steps, and this command {does} one run: give it each "
            f"window ({windows[0]}, ...)"
        )
