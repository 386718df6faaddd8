"""Say which models an upgrade of a package changes.

\b
    whence upgrade -o DIR transformers==5.12.0 transformers==5.20.0
    whence upgrade -o DIR --models 'llama,qwen*' --train old-site new-site
    whence upgrade -o DIR onnxruntime==1.30.0 onnxruntime==1.32.0 -- python infer.py

FIRST and SECOND are requirements for pip, folders of packages, or interpreters. Every architecture
of transformers that a small configuration gives, or every model that --catalogue lists, runs under
both with the same weights and inputs; where a bit of an output differs, both are captured and
compared. CMD is captured under both as it stands. DIR keeps the environments, a line of results for
each model, and a script for each that differs; the same call goes on where an earlier one ended.

Exit code: 0 when none differs, 1 when one does, 2 when that cannot be told of all, 3 when an
environment cannot be made.
"""

from __future__ import annotations

from typing import Any

from whence.cli import _answers, _progress
from whence.cli._options import COUNT, HERE, TEXT_OR_JSON, argument, option, seconds, verb


@verb(
    argument("first", "FIRST", str),
    argument("second", "SECOND", str),
    option("-o, --output DIR", "Environments, results and scripts.", HERE, required=True),
    option(
        "--models NAMES",
        "Architectures, by commas and with *; all without it, none beside a CMD.",
        default="",
    ),
    option("--catalogue FILE", "A Python file with names() and build(name) -> (model, inputs)."),
    option("--train", "Compare losses and gradients too, in training mode."),
    option(
        "--budget TIME",
        "Begin no further model after this.",
        seconds,
        name="budget_s",
        default="2h",
    ),
    option(
        "--limit TIME", "For one model in one environment.", seconds, name="limit_s", default="2m"
    ),
    option("--jobs N", "Models at a time, each in two processes.", COUNT, default=1),
    option("--all", "Show the models that are the same too.", name="everything"),
    TEXT_OR_JSON,
    program="",
    options_metavar="[OPTIONS] -o DIR",
)
def command(everything: bool, form: str, **options: Any) -> int:
    """Words -> `api.upgrade` -> report -> exit code."""
    from whence import api
    from whence.report.upgrade import upgrade_text

    with _progress.shown() as line:
        result = api.upgrade(tell=line.say, **options)
    return _answers.told(result, form, lambda each: upgrade_text(each, everything=everything))
