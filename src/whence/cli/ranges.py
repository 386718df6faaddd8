"""Tell what of a run overflows or becomes zero in fp16 or fp8.

\b
    whence ranges runs/ref
    whence ranges runs/ref --dtype float16 --top 20

Every floating-point tensor of RUN is rounded to each format: forward, gradients, parameters,
optimiser state. Formats of 8 bits are tried as they are and scaled per tensor. With --keep stats
only what overflows is known. Tensors at the ends of the dtype that they have are listed too:
saturated, subnormal.

Exit code: 0, or 3 when the run cannot be read.
"""

from __future__ import annotations

import sys

import click

from whence.cli import _answers, _options


@click.command("ranges", help=__doc__)
@click.argument("run", metavar="RUN", type=click.Path())
@click.option("--dtype", "formats", multiple=True, help="A format to try; repeatable.")
@click.option(
    "--top",
    default=3,
    type=click.IntRange(min=1),
    show_default=True,
    help="Tensors named for each kind of loss.",
)
@_options.TEXT_OR_JSON
def command(run: str, formats: tuple[str, ...], top: int, form: str) -> int:
    """Words -> `api.ranges` -> report -> exit code."""
    from whence import api
    from whence.report.ranges import ranges_text

    result = api.ranges(run, formats) if formats else api.ranges(run)
    if form == "json":
        _answers.put_json(result)
    else:
        sys.stdout.write(ranges_text(result, top))
    return 0
