"""Write a script that reproduces a finding in one operator.

\b
    whence repro cmp -o repro
    whence repro -o repro                       from the last comparison made in this folder
    whence repro cmp --finding 2 -o repro2
    python repro/repro.py                       as the target ran: fails
    python repro/repro.py --side reference      as the reference ran: passes

The script needs only torch and the data file beside it, and `pytest repro.py` runs it as a test.
Once written, it is run both ways to check that it reproduces the finding.

Exit code: 0 it fails as the target ran and passes as the reference ran, 2 it does not, 3 no
operator can be run again.
"""

from __future__ import annotations

import click

from whence.cli import _answers, _options, _progress


@click.command("repro", help=__doc__)
@click.argument("comparison", metavar="[CMP]", required=False, type=click.Path())
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="DIR",
    type=_options.HERE,
    help="Folder for repro.py and repro.safetensors.",
)
@click.option(
    "--finding",
    type=click.IntRange(1),
    metavar="N",
    default=1,
    show_default=True,
    help="Which finding, counted as whence compare lists them.",
)
@click.option("--force", is_flag=True, help="Write to DIR even if it holds files.")
@click.option("--no-run", is_flag=True, help="Write the script without running it.")
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help="A function that returns REF's model, for calls that were not recorded; it is imported "
    "and run.",
)
@_options.TEXT_OR_JSON
def command(
    comparison: str | None,
    output: str,
    finding: int,
    force: bool,
    no_run: bool,
    model: str | None,
    form: str,
) -> int:
    """Words -> `api.repro` -> report -> exit code."""
    from whence import api
    from whence.report.repro import reproduction

    chosen = _answers.latest() if comparison is None else comparison
    with _progress.telling() as say:
        result = api.repro(
            chosen, output, finding=finding, force=force, run=not no_run, model=model, tell=say
        )
    if form == "json":
        _answers.put_json(result)
    else:
        click.echo(reproduction(result), nl=False)
    return 0 if result.holds is not False else 2
