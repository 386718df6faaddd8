"""Remove elements, and what tells who made a run and where, so that it can be shared.

What stays: names of modules and tensors, shapes, dtypes, statistics and hashes (a value that can be
guessed can be confirmed by its hash). Command, environment, user, hosts, commit, paths and source
files go from every text of the run and from the names of its folders; so it compares as before, and
cannot be run again. This cannot be undone.
"""

from __future__ import annotations

import click

from whence.cli import _options


@click.command("scrub", help=__doc__)
@click.argument("run", type=click.Path())
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="PATTERN",
    help="Only elements under this module, slot or module.slot (repeatable).",
)
@_options.WHILE_WRITTEN
def command(run: str, names: tuple[str, ...], force: bool) -> int:
    """Words -> `api.scrub`."""
    from whence import api
    from whence.report import tables

    records, nbytes = api.scrub(run, names, force=force)
    click.echo(
        f"whence: {run}: elements of {tables.count(records, 'tensor')} removed, "
        f"{tables.size(nbytes)} smaller",
        err=True,
    )
    return 0
