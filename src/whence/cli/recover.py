"""Finish a run whose capture was killed.

whence itself reads such a run as it is; other tools need its safetensors files to be complete.
"""

from __future__ import annotations

import click

from whence.cli._options import HERE, WHILE_WRITTEN, argument, verb


@verb(
    argument("run", "RUN", HERE),
    WHILE_WRITTEN,
)
def command(run: str, force: bool) -> None:
    """Words -> `api.recover`."""
    from whence import api
    from whence.report import tables

    for line in api.recover(run, force=force) or (
        f"{run} holds no data of any process, so there is nothing to recover",
    ):
        click.echo(f"whence: {tables.clean(line)}", err=True)
