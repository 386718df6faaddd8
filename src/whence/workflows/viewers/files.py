"""What the writers for viewers share."""

from __future__ import annotations

import os
from pathlib import Path

from whence import disk
from whence.errors import StoreFailed
from whence.results import Comparison


def opened(comparison: str | os.PathLike[str] | Comparison) -> Comparison:
    """The comparison, read where a folder was given. Raises UnreadableRun."""
    from whence.workflows.saved import load_comparison

    if isinstance(comparison, Comparison):
        return comparison
    return load_comparison(os.fspath(comparison))


def write(path: str | os.PathLike[str], parts: disk.Parts) -> None:
    """Write a file, and the folders that lead to it. Raises StoreFailed."""
    file = Path(path)
    try:
        disk.make_folders(file.parent)
        disk.write_file(file, parts, through_link=True)
    except OSError as error:
        raise StoreFailed(f"cannot write {file}: {error.strerror or error}") from error
