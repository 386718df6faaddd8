"""Remove tensor elements and private data from a run.

Removed: tensor elements, and the command, environment, user, hosts, commit, paths and source files,
from every text of the run and from the names of its folders. Kept: names of modules and tensors,
shapes, dtypes, statistics and hashes (a hash confirms a value that somebody guesses). The run still
compares as before, but cannot be run again. This cannot be undone.
"""

from __future__ import annotations

import click

from whence.cli._options import HERE, WHILE_WRITTEN, argument, option, verb


@verb(
    argument("run", "RUN", HERE),
    option(
        "--name PATTERN ...",
        "Only elements of this module, slot or module.slot (repeatable).",
        name="names",
    ),
    WHILE_WRITTEN,
)
def command(run: str, names: tuple[str, ...], force: bool) -> None:
    """Words -> `api.scrub`."""
    from whence import api
    from whence.report import tables

    records, nbytes = api.scrub(run, names, force=force)
    click.echo(
        f"whence: {run}: elements of {tables.count(records, 'tensor')} removed, "
        f"{tables.size(nbytes)} smaller",
        err=True,
    )
