"""Check whence on your program, with faults that it plants.

\b
    whence doctor -- python infer.py
    whence doctor --faults 20 --seed 1 --keep runs/doctor -- bash run.sh

It must be silent on equal runs and name known faults. It runs CMD once without capture, twice with
capture, once on a single thread, and once for every fault that it plants in a module of the model
(nothing is edited), and compares each run with the first. A fault smaller than the rounding of its
operator counts as "below rounding", not as missed. The output of CMD is shown only when it fails.

Exit code: 0 when the clean runs were silent and every clear fault was named first, otherwise 1; 3
when CMD fails or cannot be run.
"""

from __future__ import annotations

import click

from whence.cli import _answers, _options, _progress


@click.command(
    "doctor", cls=_progress.WithCommand, help=__doc__, options_metavar="[OPTIONS] -- CMD ..."
)
@click.option(
    "--faults",
    type=click.IntRange(0),
    metavar="N",
    default=8,
    show_default=True,
    help="How many faults to plant.",
)
@click.option(
    "--seed",
    type=int,
    metavar="N",
    help="Chooses the faults, and seeds every run.  [default: 0 for the faults; runs are not "
    "seeded]",
)
@_options.KEEP_RUNS
@_options.TEXT_OR_JSON
@click.pass_context
def command(ctx: click.Context, faults: int, seed: int | None, keep: str | None, form: str) -> int:
    """Words -> `api.doctor_command` -> report -> exit code."""
    from whence import api
    from whence.report.doctor import checkup

    cmd = ctx.meta.get("whence.command")
    if cmd is None:
        raise click.UsageError("no command given:  whence doctor -- python infer.py", ctx)
    with _progress.telling() as say:
        result = api.doctor_command(cmd, faults=faults, seed=seed, keep=keep, tell=say)
    if form == "json":
        _answers.put_json(result)
    else:
        click.echo(checkup(result, output=keep or ""), nl=False)
    return 0 if result.healthy else 1
