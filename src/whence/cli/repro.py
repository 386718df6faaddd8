"""Write one script that shows the fault of a finding: an operator with its real inputs, run both
ways.

\b
    whence repro cmp -o repro
    whence repro -o repro                       of the last comparison made in this folder
    whence repro cmp --finding 2 -o repro2
    python repro/repro.py                       as the target ran: fails
    python repro/repro.py --side reference      as the reference ran: passes

The script needs torch only, and its data file beside it; `pytest repro.py` runs it as a test. It is
run both ways once it is written.

Exit code: 0 it fails as the target ran and passes as the reference did, 2 it does not, 3 nothing
can be run again.
"""

from __future__ import annotations

import click

from whence.cli import _answers, _options, _progress


@click.command("repro", help=__doc__)
@click.argument("comparison", metavar="[CMP]", required=False)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="DIR",
    help="Folder for repro.py and repro.safetensors.",
)
@click.option(
    "--finding",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Which finding, as whence compare lists them.",
)
@click.option("--force", is_flag=True, help="Write into a folder that holds files.")
@click.option("--no-run", is_flag=True, help="Write the script and do not run it.")
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help="A function that makes REF's model, where no program of the call was recorded; it is run.",
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
