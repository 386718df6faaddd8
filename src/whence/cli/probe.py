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

from whence.cli import _options, _progress


@click.command(
    "probe", cls=_progress.WithCommand, help=__doc__, options_metavar="[OPTIONS] -- CMD ..."
)
@click.option(
    "--only",
    "properties",
    multiple=True,
    type=click.Choice(
        [
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
        ]
    ),
    help="Ask for this property; more than once for several. precision is asked in this way alone.",
)
@click.option(
    "--causal/--no-causal",
    default=None,
    help="Declare that a position may see only what comes before it, or that it may see all.",
)
@click.option(
    "--declare",
    multiple=True,
    type=click.Choice(["packed", "not-packed", "flip", "shift"]),
    help="What should hold: documents of one row do not see each other (or may); an image flipped "
    "left to right, or shifted by a column, gives the same.",
)
@click.option(
    "--call",
    type=click.IntRange(1),
    metavar="N",
    help="Ask about the N-th outermost call of a model, from 1.",
)
@click.option("--now", is_flag=True, help="Ask right after the call, not when CMD ends.")
@click.option(
    "--twice", is_flag=True, help="Run CMD in two processes one after the other, and compare both."
)
@click.option("--html", metavar="FILE", type=_options.HERE, help="Also write the answer as a page.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option(
    "--to",
    multiple=True,
    default=("bfloat16",),
    show_default=True,
    type=click.Choice(["bfloat16", "float16", "float8_e4m3fn", "int8"]),
    help="With --only precision: a type that modules may compute in; more than once for several.",
)
@click.option(
    "--budget",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=1e-2,
    show_default=True,
    help="With --only precision: largest error of the outputs, relative, root mean square.",
)
@_options.TEXT_OR_JSON
@click.pass_context
def command(ctx: click.Context, /, form: str, html: str | None, force: bool, **values: Any) -> int:
    """Words -> `api.probe_command` -> report -> exit code."""
    from whence import api
    from whence.cli import _answers, _files
    from whence.cli.compare import CODES
    from whence.report.probe import probed_text

    cmd = ctx.meta.get("whence.command")
    if cmd is None:
        raise click.UsageError("no command given:  whence probe -- python infer.py", ctx)
    _files.check(html, force)
    result = api.probe_command(
        cmd, tell=lambda line: click.echo(f"whence: {line}", err=True), **values
    )
    if html is not None:
        from whence.report.html.probed import probed_html

        _files.write(html, probed_html(result), force)
    if form == "json":
        _answers.put_json(result)
    else:
        click.echo(probed_text(result), nl=False)
    return CODES[result.status]
