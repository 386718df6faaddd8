"""Make a packed run again as it was, byte for byte.

\b
    whence unpack runs/tgt.packed -o runs/tgt
    whence unpack small --against /elsewhere/ref -o runs/tgt

The reference is looked for where it was when the run was packed, and where it lies as seen from the
packed run; it is recognised by the hashes of its journals.
"""

from __future__ import annotations

import click

from whence.cli import _options


@click.command("unpack", help=__doc__)
@click.argument("packed", metavar="PACKED", type=_options.HERE)
@click.option(
    "--against",
    metavar="REF",
    type=click.Path(),
    help="Where the run lies that it is packed against, if it was moved.",
)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=_options.HERE,
    help="New folder.  [default: PACKED without .packed]",
)
def command(packed: str, against: str | None, output: str | None) -> int:
    """Words -> `api.unpack`."""
    from whence import api
    from whence.report.pack import unpacked

    for line in unpacked(api.unpack(packed, output, against=against)):
        click.echo(line)
    return 0
