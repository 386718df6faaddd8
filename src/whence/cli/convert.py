"""Write a run, or the dump of a tool, as the files of another tool.

\b
    whence convert runs/ref ref_h5 --to torch_xray
    whence convert dump_of_another_tool as_npy --to npy

Every tensor keeps its dtype, bit by bit; what the format does not hold is counted and said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import click


@click.command("convert", help=__doc__)
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("destination", metavar="DST", type=click.Path())
@click.option("--to", required=True, metavar="FORMAT", help="npy, safetensors, torch_xray, msprobe or polygraphy.")
@click.option("--force", is_flag=True, help="Replace DST when it holds nothing but files of a dump.")
def command(source: str, destination: str, to: str, force: bool) -> int:
    """Words -> `api.convert`."""
    from whence import api, report
    from whence.cli._progress import teller

    say, wipe = teller()
    try:
        written = api.convert(source, destination, to=to, force=force, progress=_progress(say))
    finally:
        wipe()
    for line in report.converted(written, destination, to):
        click.echo(line)
    return 0


def _progress(say: Callable[[str], None]) -> Callable[[int, int, str], None] | None:
    """Ten lines a second at most, for a terminal only."""
    if not sys.stderr.isatty():
        return None
    import time

    last = [0.0]

    def tell(done: int, of: int, what: str) -> None:
        if (now := time.monotonic()) - last[0] >= 0.1:
            last[0] = now
            say(f"{done}/{of} {what}")

    return tell
