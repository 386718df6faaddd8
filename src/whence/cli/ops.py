"""List a run's operators, and write and compare tests of them.

\b
    whence run --level op -o runs/ops -- python train.py
    whence ops list runs/ops
"""

from __future__ import annotations

import click

from whence.cli import _options
from whence.cli._answers import width


@click.group("ops", help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Its commands follow."""


@command.command("list")
@click.argument("run_path", metavar="RUN", type=click.Path())
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Only operators whose name matches: 'aten.mm.*', 'addmm' (repeatable).",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Skip operators whose name matches (repeatable).",
)
@click.option(
    "--sort",
    type=click.Choice(["time", "count", "name"]),
    default="time",
    show_default=True,
    help="Which operators come first.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv"]),
    default="table",
    show_default=True,
    help="What is printed.",
)
def list_command(
    run_path: str, include: tuple[str, ...], exclude: tuple[str, ...], sort: str, form: str
) -> int:
    """List the operators of RUN by signature: calls, time, shapes, value ranges, and callers."""
    from whence import api
    from whence.report.operators import operators

    run = api.open_run(run_path)
    groups = api.chosen_operators(api.signatures(run), include, exclude, sort)
    for line in operators(groups, form, width()):
        click.echo(line)
    return 0


@command.command("generate")
@click.argument("run_path", metavar="RUN", type=click.Path())
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="TESTS_DIR",
    type=_options.HERE,
    help="A new folder for the tests and their data.",
)
@click.option(
    "--level",
    type=click.Choice(["op", "module"]),
    default="op",
    show_default=True,
    help="Test operators, or leaf modules.",
)
@click.option(
    "--factory",
    type=click.Choice(["load", "random", "special"]),
    default="load",
    show_default=True,
    help="Input values: as recorded, random within the recorded range, or special ones (zeros, "
    "denormals, infinities, NaN, ties).",
)
@click.option(
    "--cpu-init",
    is_flag=True,
    help="Draw random values on the CPU, so that all devices get the same.",
)
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Only operators (modules) whose name matches (repeatable).",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Skip operators (modules) whose name matches (repeatable).",
)
@click.option(
    "--keep-trivial",
    is_flag=True,
    help="Also test random, creation and view operators, by structure only.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    metavar="N",
    default=3,
    show_default=True,
    help="Test at most so many recorded calls of each signature.",
)
@click.option("--force", is_flag=True, help="Replace tests that were written before.")
def generate_command(run_path: str, output: str, **options: object) -> int:
    """Write pytest files for the operators of RUN, with real shapes and data; they need only torch
    and pytest.
    """
    from whence import api
    from whence.report.operator_diff import written

    result = api.generate_tests(run_path, output, **options)  # type: ignore[arg-type]
    for line in written(result):
        click.echo(line)
    return 0


@command.command("diff")
@click.argument("reference", metavar="REF_CSV", type=click.Path())
@click.argument("target", metavar="TGT_CSV", type=click.Path())
@click.option(
    "-o", "--output", metavar="RESULT_CSV", type=_options.HERE, help="Also write the joined table."
)
@click.option("--force", is_flag=True, help="Replace RESULT_CSV.")
def diff_command(reference: str, target: str, output: str | None, force: bool) -> int:
    """Compare what the tests measured on two devices. Exit code: 0 the same, 1 different, 2 nothing
    compared.
    """
    from whence import api
    from whence.report.operator_diff import tested_text

    result = api.diff_results(reference, target, output, force=force)
    click.echo(tested_text(result), nl=False)
    return {"same": 0, "different": 1, "undecided": 2}[result.status]
