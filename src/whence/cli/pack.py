"""Make a run small, as differences from a reference run.

\b
    whence pack runs/tgt --against runs/ref
    whence pack runs/tgt.packed --against /elsewhere/ref

No bit is lost. Every command opens the packed run as it is while the reference can be found, and
`whence unpack` makes the run again, byte for byte. The run itself stays; delete it when you like.
Of a run that is packed already, --against says where the reference lies now.
"""

from __future__ import annotations

import click

from whence.cli import _answers, _progress
from whence.cli._options import HERE, PATH, argument, option, verb


@verb(
    argument("run", "RUN"),
    option(
        "--against REF",
        "The run whose tensors are nearest; without it, each tensor is compressed alone.",
        PATH,
    ),
    option("-o, --output DIR", "New folder.  [default: RUN.packed]", HERE),
)
def command(run: str, output: str | None, against: str | None) -> None:
    """Words -> `api.pack`, or `api.relocate`."""
    from whence import api
    from whence.report.pack import packed, relocated

    if against is not None and output is None and api.is_packed(run):
        api.relocate(run, against)
        click.echo(relocated(run, against))
        return
    with _progress.shown() as line:
        result = api.pack(run, output, against=against, progress=line.count)
    _answers.say(packed(result, against or ""))
