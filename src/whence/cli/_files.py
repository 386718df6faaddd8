"""Files that a command writes besides the terminal, or instead of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click


def check(path: str | Path | None, force: bool) -> None:
    """Raise OutputExists when there is one already, or with `force` one of somebody else; called
    before anything is computed.
    """
    from whence.report.own_files import check_replaceable

    if path is not None:
        check_replaceable(path, force)


def write(path: str | Path, text: str | Iterable[str], force: bool) -> None:
    """Write a text, or pieces of it as they are made. Raises OutputExists, StoreFailed."""
    from whence import disk
    from whence.errors import StoreFailed

    check(path, force)
    try:
        disk.make_folders(Path(path).parent)
        disk.write_file(path, text, through_link=True)
    except OSError as err:
        raise StoreFailed(f"cannot write {path}: {err.strerror or err}") from err


def leave(text: str, path: str | None, force: bool) -> None:
    """Write the text into the file, or to the terminal where none is named. Raises OutputExists,
    StoreFailed.
    """
    if path is None:
        click.echo(text, nl=False)
    else:
        write(path, text, force)
