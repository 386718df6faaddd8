"""Files that a command writes besides the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def check(path: Path, force: bool) -> None:
    """Raises OutputExists when there is one already."""
    from whence.errors import OutputExists

    if path.exists() and path.is_file() and not force:
        raise OutputExists(f"{path} exists; --force replaces it")


def write(path: Path, text: Iterable[str], force: bool) -> None:
    """Write pieces of text as they are made. Raises OutputExists, StoreFailed."""
    from whence.errors import StoreFailed

    check(path, force)
    try:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(text)
    except OSError as err:
        raise StoreFailed(f"cannot write {path}: {err.strerror or err}") from err
