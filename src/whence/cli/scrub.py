"""Remove elements and commands from a run, so that it can be shared.

What stays: names, shapes, dtypes, statistics and hashes (a value that can be guessed can be confirmed by its hash). The command,
the environment, the user and the working directory go too. This cannot be undone.
"""

from __future__ import annotations

import click


@click.command("scrub", help=__doc__)
@click.argument("run", type=click.Path())
@click.option(
    "--name", "names", multiple=True, metavar="PATTERN", help="Only elements under this module, slot or module.slot (repeatable)."
)
@click.option("--force", is_flag=True, help="Also while a process still writes to the run.")
def command(run: str, names: tuple[str, ...], force: bool) -> int:
    """Words -> `api.scrub`."""
    from whence import api
    from whence.report import plain

    records, nbytes = api.scrub(run, names, force=force)
    click.echo(f"whence: {run}: elements of {plain.count(records, 'tensor')} removed, {plain.size(nbytes)} smaller", err=True)
    return 0
