"""Name the first operator of a run that makes NaN or overflows.

\b
    whence nans runs/ref
    whence nans runs/ref --format json

RUN may be captured with --keep stats; its statistics are enough. The answer is the first call whose
output has NaN although its inputs had none, with the ranges of what it read, and what overflowed
before it. Infinities that are masks, made between modules, are not counted.

Exit code: 0 when every tensor is finite, 1 when one is not, 2 when some have no statistics and the
others are finite, 3 when the run cannot be read.
"""

from __future__ import annotations

import sys

import click

from whence.cli import _answers, _options


@click.command("nans", help=__doc__)
@click.argument("run", metavar="RUN", type=click.Path())
@_options.TEXT_OR_JSON
def command(run: str, form: str) -> int:
    """Words -> `api.nans` -> report -> exit code."""
    from whence import api
    from whence.report.nans import nans_text

    result = api.nans(run)
    if form == "json":
        _answers.put_json(result)
    else:
        sys.stdout.write(nans_text(result))
    if result.first is not None:
        return 1
    return 2 if result.unmeasured else 0
