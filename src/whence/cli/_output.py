"""The text that a command leaves: on the terminal, or in the file that -o names."""

from __future__ import annotations

from pathlib import Path

import click

from whence.errors import OutputExists, StoreFailed


def check_output(output: str | None, *, force: bool) -> None:
    """Raise OutputExists for a file that is there and may not be replaced; called before anything is computed."""
    if output is not None and Path(output).exists() and not force:
        raise OutputExists(f"{output} exists; --force replaces it, or choose another -o")


def leave(text: str, output: str | None) -> None:
    """Write the text. Raises StoreFailed."""
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreFailed(f"cannot write {output}: {error.strerror or error}") from error
