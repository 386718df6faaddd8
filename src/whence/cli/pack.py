"""Make a run small, as differences from a reference run.

\b
    whence pack runs/tgt --against runs/ref
    whence pack runs/tgt --against runs/ref --keep differing -o small
    whence pack small --against /elsewhere/ref

No bit is lost. Every command opens the packed run as it is while the reference can be found, and
`whence unpack` makes the run again, byte for byte. The run itself stays; delete it when you like.
Of a run that is packed already, --against says where the reference lies now.
"""

from __future__ import annotations

import click

from whence.cli import _options, _progress


@click.command("pack", help=__doc__)
@click.argument("run", metavar="RUN", type=click.Path())
@click.option(
    "--against",
    metavar="REF",
    type=click.Path(),
    help="The run whose tensors are nearest; without it, each tensor is compressed alone.",
)
@click.option(
    "-o", "--output", metavar="DIR", type=_options.HERE, help="New folder.  [default: RUN.packed]"
)
@click.option(
    "--keep",
    type=click.Choice(["all", "differing"]),
    default="all",
    show_default=True,
    help="differing: drop the elements of calls whose tensors all equal the reference's; hashes "
    "and statistics stay.",
)
@click.option(
    "--keep-every",
    metavar="N",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Keep the elements of every N-th step only; hashes and statistics stay.",
)
def command(run: str, against: str | None, output: str | None, keep: str, keep_every: int) -> int:
    """Words -> `api.pack`, or `api.relocate`."""
    from whence import api
    from whence.report.pack import packed, relocated

    if against is not None and output is None and api.is_packed(run):
        api.relocate(run, against)
        click.echo(relocated(run, against))
        return 0
    with _progress.shown() as count:
        result = api.pack(
            run, output, against=against, keep=keep, keep_every=keep_every, progress=count
        )
    for line in packed(result, against or ""):
        click.echo(line)
    return 0
