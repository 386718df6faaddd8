"""Write a run or a dump in the format of another tool.

\b
    whence convert runs/ref ref_h5 --to torch_xray
    whence convert dump_of_another_tool as_npy --to npy

Every tensor keeps its dtype and its bits. What the format cannot hold is counted and reported.
"""

from __future__ import annotations

import click

from whence.cli import _options, _progress


@click.command("convert", help=__doc__)
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("destination", metavar="DST", type=_options.HERE)
@click.option(
    "--to",
    required=True,
    metavar="FORMAT",
    help="npy, safetensors, torch_xray, msprobe or polygraphy.",
)
@click.option(
    "--force", is_flag=True, help="Replace DST if it holds nothing but the files of a dump."
)
def command(source: str, destination: str, to: str, force: bool) -> int:
    """Words -> `api.convert`."""
    from whence import api
    from whence.report.convert import converted

    with _progress.shown() as count:
        result = api.convert(source, destination, to=to, force=force, progress=count)
    for line in converted(result, destination, to):
        click.echo(line)
    return 0
