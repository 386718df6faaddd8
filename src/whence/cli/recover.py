"""Finish a run whose capture was killed, so that every file in it is whole.

Reading a run needs no recovery; other tools that read its safetensors files do.
"""

from __future__ import annotations

import click


@click.command("recover", help=__doc__)
@click.argument("run", type=click.Path())
def command(run: str) -> int:
    """Words -> `api.recover`."""
    from whence import api

    told = api.recover(run)
    for line in told or (f"{run} is whole",):
        click.echo(f"whence: {line}", err=True)
    return 0
