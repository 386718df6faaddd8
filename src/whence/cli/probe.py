"""Ask one model, without a second run, what must hold.

\b
    whence probe -- python infer.py
    whence probe --only batch --only causality -- python serve.py

CMD runs as it is. The first call of its largest torch model is kept, and when CMD ends, the model
is called again in variants: the end of the sequence changed, padding added, other rows beside a
row, in pieces with a cache, again, on other threads. For each property the answer says whether it
holds bit for bit, within rounding, or is violated, and by which operator. health says which
operators lose numbers that the outputs need; --only precision, which modules may be narrower.

Exit code: 0 when every property that applies holds, 1 when one is violated, 2 when one cannot be
told or none applies, 3 when CMD fails or calls no model.
"""

from __future__ import annotations

from typing import Any

import click

from whence.cli import _answers
from whence.cli._options import COUNT, TEXT_OR_JSON, option, verb


@verb(
    option(
        "--only ...",
        "Ask for this property; more than once for several. precision is asked in this way alone.",
        (
            "causality",
            "padding",
            "batch",
            "chunking",
            "repeat",
            "packing",
            "equivariance",
            "sensitivity",
            "health",
            "precision",
        ),
        name="properties",
    ),
    option(
        "--causal/--no-causal",
        "Declare that a position may see only what comes before it, or that it may see all.",
        default=None,
    ),
    option(
        "--declare ...",
        "What should hold: documents of one row do not see each other (or may); an image flipped "
        "left to right, or shifted by a column, gives the same.",
        ("packed", "not-packed", "flip", "shift"),
    ),
    option("--call N", "Ask about the N-th outermost call of a model, from 1.", COUNT),
    option("--now", "Ask right after the call, not when CMD ends."),
    option(
        "--to ...",
        "With --only precision: a type that modules may compute in; more than once for several.",
        ("bfloat16", "float16", "float8_e4m3fn", "int8"),
        default=("bfloat16",),
    ),
    option(
        "--budget",
        "With --only precision: largest error of the outputs, relative, root mean square.",
        click.FloatRange(0, 1, min_open=True, max_open=True),
        default=0.01,
    ),
    TEXT_OR_JSON,
    program="whence probe -- python infer.py",
)
def command(form: str, **options: Any) -> int:
    """Words -> `api.probe_command` -> report -> exit code."""
    from whence import api
    from whence.report.probe import probed_text

    result = api.probe_command(tell=lambda line: click.echo(f"whence: {line}", err=True), **options)
    return _answers.told(result, form, probed_text)
