"""Deletes windows of steps that were compared, and leaves a word of it in the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson

from whence import disk
from whence.errors import StoreFailed
from whence.records.places import DELETED_WINDOWS
from whence.store.folder import load_json


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
