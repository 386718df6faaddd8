"""Remove elements and commands from a run, so that it can be shared.

What stays: names, shapes, dtypes, statistics and hashes. This cannot be undone.
"""

from __future__ import annotations

import click


@click.command("scrub", help=__doc__)
@click.argument("run", type=click.Path())
def command(run: str) -> int:
    """Words -> `api.scrub`."""
    from whence import api

    api.scrub(run)
    click.echo(f"whence: {run} holds no elements and no command any more", err=True)
    return 0
