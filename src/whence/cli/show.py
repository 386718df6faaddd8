"""Show what a run holds: modules, calls, tensors.

\b
    whence show runs/ref                               the command, then every call with its tensors
    whence show runs/ref --tree                        the tree of modules, with their numbers
    whence show runs/ref layers.3.mlp                  one tensor: values, statistics, histogram
    whence show runs/ref layers.3.mlp:input.0 --step 2
    whence show runs/ref --format csv -o ref.csv

NAME is a dotted module name, a tree number (3, 7_1), or one of these with :SLOT. Where a module is
named like a tree number, the number is taken, and a line on stderr says so. PATTERN is a shell
pattern ('layers.*.mlp') or re:REGEX.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from whence.cli import _files
from whence.cli._answers import width
from whence.cli._options import OUTPUT_FILE, REPLACE_FILE, argument, option, verb

if TYPE_CHECKING:
    from whence.records import Run
    from whence.report.run import Choice

LIMIT = 2000


@verb(
    argument("run_path", "RUN"),
    argument("name", "[NAME]", str),
    option("--name PATTERN", "Only calls whose name matches.", name="pattern", default=""),
    option("--ids 3,7_1", "Only calls with these tree numbers, and the calls inside them."),
    option("--step N", "Only this step.", int),
    option("--tree", "Show the tree of module calls, numbered."),
    option(
        "--format",
        "What is printed: lines, data, or a table of statistics.",
        ("text", "json", "csv", "table"),
        name="form",
        default="text",
    ),
    option("--all", f"Show every tensor, not only the first {LIMIT}.", name="everything"),
    OUTPUT_FILE,
    REPLACE_FILE,
)
def command(
    run_path: str,
    name: str | None,
    pattern: str,
    ids: str | None,
    step: int | None,
    tree: bool,
    form: str,
    everything: bool,
    output: str | None,
    force: bool,
) -> int:
    """Words -> `api.open_to_show` -> `report.show`."""
    if tree and form != "text":
        raise click.UsageError(
            f"--tree is text only; --format {form} has the tree number of every call"
        )
    if tree and name:
        raise click.UsageError(
            "--tree shows modules and NAME shows one tensor: give one of the two (--name PATTERN "
            "selects modules of the tree)"
        )
    if name and form in ("csv", "table"):
        raise click.UsageError(
            f"one tensor is shown as text or json; for --format {form} use --name {name}"
        )
    from whence import api
    from whence.report.pack import state as packed_state
    from whence.report.run import Choice, other_meaning

    numbers = tuple(part.strip() for part in (ids or "").split(",") if part.strip())
    run = api.open_to_show(run_path, every=not name)
    wide = None if output else width()
    choice = Choice(pattern, numbers, step)
    if name and (sentence := other_meaning(run, name, choice)):
        click.echo(f"whence: {sentence}", err=True)
    if packing := api.packing_state(run):
        click.echo(f"whence: {packed_state(packing)}", err=True)
    lines = _lines(
        run,
        choice,
        name,
        tree,
        form,
        None if everything or output else LIMIT,
        wide,
    )
    if output is None:
        for line in lines:
            click.echo(line)
    else:
        _files.write(Path(output), (line + "\n" for line in lines), force)
    unreadable: list[str] = getattr(run, "unreadable", [])
    if unreadable:
        more = f" (and {len(unreadable) - 1} more)" if unreadable[1:] else ""
        click.echo(
            f"whence: a part of this run cannot be read: {unreadable[0]}{more}; the rest is shown. "
            "Copy or capture it again to get all of it",
            err=True,
        )
    return 3 if unreadable else 0


def _lines(
    run: Run,
    choice: Choice,
    name: str | None,
    tree: bool,
    form: str,
    limit: int | None,
    wide: int | None,
) -> Iterator[str]:
    from whence.report import run as show

    if name:
        return show.one_json(run, name, choice) if form == "json" else show.one(run, name, choice)
    if tree:
        return show.tree(run, choice, wide)
    if form == "text":
        return show.text(run, choice, limit, wide)
    if form == "table":
        return show.table(run, choice, wide)
    return show.json(run, choice) if form == "json" else show.csv(run, choice)
