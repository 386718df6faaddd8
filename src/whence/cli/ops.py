"""Operators of a run: list them, write tests of them, compare what the tests measured.

\b
    whence run --level op -o runs/ops -- python train.py
    whence ops list runs/ops
"""

from __future__ import annotations

import click


@click.group("ops", help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Its commands follow."""


@command.command("list")
@click.argument("run_path", metavar="RUN", type=click.Path())
@click.option("--include", multiple=True, metavar="PATTERN", help="Only operators whose name matches: 'aten.mm.*', 'addmm' (repeatable).")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Not operators whose name matches (repeatable).")
@click.option("--sort", type=click.Choice(["time", "count", "name"]), default="time", show_default=True, help="What comes first.")
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
def list_command(run_path: str, include: tuple[str, ...], exclude: tuple[str, ...], sort: str, form: str) -> int:
    """List the operators of RUN by signature: how often each ran, on what, in which range, for how long, and where."""
    from whence import api, report

    run = api.open_run(run_path)
    groups = api.chosen_operators(api.signatures(run), include, exclude, sort)
    for line in report.operators(groups, form):
        click.echo(line)
    return 0
