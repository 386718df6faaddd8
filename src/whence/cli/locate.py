"""Measure how much of the output's error each finding explains.

\b
    whence locate runs/ref -- python infer.py --dtype bf16
    whence locate runs/ref runs/tgt                       runs the command that made TGT again
    whence locate cmp                                     the same, of a comparison
    whence locate                                         the same, of the last comparison made in this folder
    whence locate cmp --patch layers.3.mlp --patch layers.7
    whence locate cmp --search                            bisects the calls, without a finding

The target runs again, with the outputs of a call replaced by those of the reference; everything
after that call goes on with them. Without --patch and --search this is done for the first finding,
then for the first one that remains, until none does. CALL is NAME[@STEP[.OCCURRENCE]][:SLOT].
Shares are of the squared error, so those of independent faults add up.

Exit code, as without any patch: 0 the runs are the same, 1 different, 2 undecided; 3 when the
command fails or cannot be run.
"""  # noqa: E501

from __future__ import annotations

import click

from whence.cli import _answers, _options, _progress


@click.command(
    "locate",
    cls=_progress.WithCommand,
    help=__doc__,
)
@click.argument("reference", metavar="[REF|CMP]", required=False, type=click.Path())
@click.argument("target", metavar="[TGT] [-- CMD ...]", required=False, type=click.Path())
@click.option(
    "--patch",
    multiple=True,
    metavar="CALL",
    help="Patch this call (repeatable: each patch is added to those before it).",
)
@click.option(
    "--search",
    is_flag=True,
    help="Find, by bisection, the call by which half of the squared error has arisen.",
)
@click.option(
    "--max",
    "most",
    type=click.IntRange(1),
    metavar="N",
    default=8,
    show_default=True,
    help="Patch at most so many findings.",
)
@click.option(
    "--seed",
    type=int,
    metavar="N",
    help="Seed every run.  [default: the reference's seed, if it had one]",
)
@_options.KEEP_RUNS
@_options.TEXT_OR_JSON
@click.pass_context
def command(
    ctx: click.Context,
    reference: str | None,
    target: str | None,
    patch: tuple[str, ...],
    search: bool,
    most: int,
    seed: int | None,
    keep: str | None,
    form: str,
) -> int:
    """Words -> `api.locate` -> report -> exit code."""
    from whence import api
    from whence.cli.compare import CODES
    from whence.report.locate import location

    chosen = _answers.latest() if reference is None else reference
    with _progress.telling() as say:
        result = api.locate(
            chosen,
            target,
            command=ctx.meta.get("whence.command"),
            patch=patch,
            search=search,
            most=most,
            seed=seed,
            keep=keep,
            tell=say,
        )
    if form == "json":
        _answers.put_json(result)
    else:
        click.echo(location(result, output=keep or ""), nl=False)
    return CODES[result.status]
