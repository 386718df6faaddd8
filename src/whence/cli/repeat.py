"""Name the first operator that does not repeat itself.

\b
    whence repeat -- python train.py
    whence repeat --times 3 --steps 0:5 -- bash run.sh

CMD runs twice, in fresh processes with the same arguments and environment, and is captured both
times; nothing is edited. Every tensor of one run is compared with that of the other, bit for bit.
Named is the first call whose output differs although its inputs are equal, or the first input,
parameter or random draw that differs, with what would make it repeat.

Exit code: 0 when every captured tensor is equal in all runs, 1 when something differs, 2 when
nothing does but not all could be compared, 3 when CMD fails or cannot be run.
"""

from __future__ import annotations

from typing import Any

import click

from whence.cli import _answers, _options, _progress


@click.command(
    "repeat", cls=_progress.WithCommand, help=__doc__, options_metavar="[OPTIONS] -- CMD ..."
)
@click.option(
    "--times",
    type=click.IntRange(2),
    metavar="N",
    default=2,
    show_default=True,
    help="How many runs; with 3, whether only the first differs.",
)
@click.option("--seed", type=int, metavar="N", help="Seed every run.")
@click.option("--deterministic", is_flag=True, help="Switch every run to deterministic kernels.")
@click.option(
    "--steps", metavar="START:STOP", help="Only these steps, STOP excluded (0:10, 5:, :3)."
)
@click.option(
    "--level",
    type=click.Choice(["modules", "op"]),
    default="modules",
    show_default=True,
    help="Compare calls of modules, or every operator too (op).",
)
@_options.KEEP_RUNS
@_options.TEXT_OR_JSON
@click.pass_context
def command(
    ctx: click.Context, /, keep: str | None, form: str, deterministic: bool, **values: Any
) -> int:
    """Words -> `api.repeat_command` -> report -> exit code."""
    from whence import api
    from whence.cli.compare import CODES
    from whence.report.repeat import repeated_text

    cmd = ctx.meta.get("whence.command")
    if cmd is None:
        raise click.UsageError("no command given:  whence repeat -- python train.py", ctx)
    options = {"deterministic": deterministic or None, **values}
    given = {name: value for name, value in options.items() if value is not None}
    with _progress.telling() as say:
        result = api.repeat_command(cmd, keep=keep, tell=say, **given)
    if form == "json":
        _answers.put_json(result)
    else:
        click.echo(repeated_text(result), nl=False)
    return CODES[result.status]
