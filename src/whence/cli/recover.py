"""Finish a run whose capture was killed.

whence itself reads such a run as it is; other tools need its safetensors files to be complete.
"""

from __future__ import annotations

import click

from whence.cli import _options


@click.command("recover", help=__doc__)
@click.argument("run", type=_options.HERE)
@_options.WHILE_WRITTEN
def command(run: str, force: bool) -> int:
    """Words -> `api.recover`."""
    from whence import api
    from whence.report import tables

    for line in api.recover(run, force=force) or (
        f"{run} holds no data of any process, so there is nothing to recover",
    ):
        click.echo(f"whence: {tables.clean(line)}", err=True)
    return 0
