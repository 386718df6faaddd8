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

import click

from whence.cli import _answers, _options, _progress


def _seconds(_ctx: Any, _parameter: Any, text: str) -> float:
    """Seconds, of "90", "90s", "15m" or "2h"."""
    units = {"s": 1, "m": 60, "h": 3600}
    number = text[:-1] if text[-1:] in units else text
    try:
        seconds = float(number) * units.get(text[-1:], 1)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise click.BadParameter(f"{text!r} is no time; 90s, 15m and 2h are")
    return seconds


@click.command(
    "upgrade",
    cls=_progress.WithCommand,
    help=__doc__,
    options_metavar="[OPTIONS] -o DIR",
)
@click.argument("first")
@click.argument("second")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="DIR",
    type=_options.HERE,
    help="Environments, results and scripts.",
)
@click.option(
    "--models",
    default="",
    metavar="NAMES",
    help="Architectures, by commas and with *; all without it, none beside a CMD.",
)
@click.option(
    "--catalogue",
    metavar="FILE",
    help="A Python file with names() and build(name) -> (model, inputs).",
)
@click.option("--train", is_flag=True, help="Compare losses and gradients too, in training mode.")
@click.option(
    "--budget",
    "budget_s",
    default="2h",
    show_default=True,
    metavar="TIME",
    callback=_seconds,
    help="Begin no further model after this.",
)
@click.option(
    "--limit",
    "limit_s",
    default="2m",
    show_default=True,
    metavar="TIME",
    callback=_seconds,
    help="For one model in one environment.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Models at a time, each in two processes.",
)
@click.option("--all", "everything", is_flag=True, help="Show the models that are the same too.")
@_options.TEXT_OR_JSON
@click.pass_context
def command(
    ctx: click.Context, /, first: str, second: str, everything: bool, form: str, **values: Any
) -> int:
    """Words -> `api.upgrade` -> report -> exit code."""
    from whence import api
    from whence.cli.compare import CODES
    from whence.report.upgrade import upgrade_text

    cmd = ctx.meta.get("whence.command") or ()
    with _progress.telling() as say:
        result = api.upgrade(first, second, command=cmd, tell=say, **values)
    if form == "json":
        _answers.put_json(result)
    else:
        click.echo(upgrade_text(result, everything=everything), nl=False)
    return CODES[result.status]
