"""Where a difference comes from: back through the program to the first operator whose inputs agree.

\b
    whence trace cmp                                   from the first significant tensor
    whence trace                                       the same, of the last comparison made in this folder
    whence trace cmp softmax_1.tmp_0
    whence trace cmp inner_var.40@3 --format json      of step 3

CMP is a folder that `whence compare -o CMP` wrote; one word that is no path is a TENSOR of the last
comparison that was made in this folder. The runs must still lie where they were. TENSOR is
NAME[@STEP[.OCCURRENCE]] of a call of the reference. Every operator on the way is shown with what it
read; of the last one its attributes, weights, what its kernel logged, what it read and nobody
captured, and what replay says of it.

Exit code: 0 when it was traced, 3 for a tensor or a run that there is not.
"""  # noqa: E501

from __future__ import annotations

import sys
from pathlib import Path

import click

from whence.cli import _answers, _options


@click.command("trace", help=__doc__)
@click.argument("comparison", metavar="[CMP]", required=False, default="")
@click.argument("tensor", metavar="[TENSOR]", required=False, default="")
@_options.TEXT_OR_JSON
def command(comparison: str, tensor: str, form: str) -> int:
    """Words -> `api.trace` -> report -> exit code."""
    from whence import api
    from whence.report.origin import origin_json, origin_text

    if not tensor and comparison and not Path(comparison).exists():
        comparison, tensor = "", comparison
    origin = api.trace(comparison or _answers.latest(), tensor)
    sys.stdout.write(origin_json(origin) if form == "json" else origin_text(origin))
    return 0
