"""What the commands that give a comparison's answer put on stdout and into files."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from whence.cli import _files, _options
from whence.cli._options import HERE, option

if TYPE_CHECKING:
    from whence.results import Comparison

CODES = {"same": 0, "different": 1, "undecided": 2}
"""Exit codes of answers."""
FORMATS = ("text", "json", "csv", "markdown", "github", "sarif")


JUNIT = option("--junit FILE", "Also write JUnit XML, with one test case per compared call.", HERE)
"""Its value is for `junit`."""


def options(default: str | None) -> tuple[_options.Option, ...]:
    """--format and --annotations, which a command hands to `said`. default: of --format."""
    form = option(
        "--format",
        "What is printed; github: findings as annotations of a GitHub workflow; sarif: as SARIF, "
        "for code scanners and editors.",
        FORMATS,
        name="form",
        default=default,
    )
    annotations = option(
        "--annotations", "Also print the findings as annotations of a GitHub workflow."
    )
    return form, annotations


def width() -> int | None:
    """Of the terminal that stdout is, None where it is none: what is piped is never cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def check(form: str | None, annotations: bool, junit: str | None, force: bool) -> None:
    """Raise UsageError or OutputExists before any work is done."""
    from whence.errors import UsageError

    if annotations and form in ("json", "csv", "sarif"):
        raise UsageError(
            f"--annotations and --format {form} would mix on stdout; use --format text, markdown "
            "or github"
        )
    _files.check(junit, force)


def said(
    result: Comparison,
    form: str,
    annotations: bool,
    *,
    occurrences: bool = False,
    output: str | None = None,
) -> str:
    """The text for stdout. output: the folder that the comparison is written to."""
    from whence.report.answer import answer
    from whence.report.files import table_csv
    from whence.report.generation import generation_csv
    from whence.report.github import github_annotations
    from whence.report.markdown import markdown
    from whence.report.sarif import sarif
    from whence.report.summary import summary

    if output is not None:
        result = result.in_folder(output)
    tokens_only = result.generation is not None and result.generation.logits_only
    if form == "text":
        text = answer(result, occurrences=occurrences, width=width())
    elif form == "csv":
        text = generation_csv(result) if tokens_only else "".join(table_csv(result))
    elif form == "markdown":
        text = markdown(result)
    elif form == "sarif":
        text = sarif(result)
    else:
        text = summary(result) if form == "json" else github_annotations(result)
    return text + (github_annotations(result) if annotations and form != "github" else "")


def put(text: str) -> None:
    """Put an answer on stdout now: whatever goes wrong with files afterwards, it is there."""
    from whence.report.colour import coloured, is_wanted

    sys.stdout.write(coloured(text) if is_wanted(sys.stdout) else text)
    sys.stdout.flush()


def told(result: Any, form: str, text: Callable[[Any], str]) -> int:
    """Put a result on stdout, as JSON or as the text that `text` makes of it; the exit code of its
    status, 0 where it has none.
    """
    if form == "json":
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        click.echo(text(result), nl=False)
    return CODES.get(getattr(result, "status", ""), 0)


def say(lines: Iterable[str]) -> None:
    """Put lines on stdout as they are made."""
    for line in lines:
        click.echo(line)


def kept(result: Comparison, output: str | None = None) -> None:
    """Keep a comparison for the commands that are given none. That it cannot be kept is a line on
    stderr, no failure.
    """
    from whence import api
    from whence.report import tables

    if why := api.keep_latest(result, output):
        click.echo(
            "note: this comparison is not remembered for whence report, trace, repro and locate "
            f"({tables.clean(why)}); keep it with -o CMP",
            err=True,
        )


def latest() -> Any:
    """The last comparison made in this folder, or the folder it lies in; which one is said on
    stderr. Raises UnreadableRun.
    """
    from whence import api
    from whence.report import tables

    comparison, words = api.latest()
    click.echo(f"whence: using the last comparison made here: {tables.clean(words)}", err=True)
    return comparison


def all_of(*jobs: Callable[[], None] | None) -> None:
    """Do every job, also when one before it fails; then raise the first StoreFailed or
    OutputExists, saying that the answer stands.
    """
    from whence.errors import OutputExists, StoreFailed

    failed: list[StoreFailed | OutputExists] = []
    for job in jobs:
        try:
            if job is not None:
                job()
        except (StoreFailed, OutputExists) as error:
            failed.append(error)
    if failed:
        raise type(failed[0])(
            "; ".join(map(str, failed)) + "; the answer above is still valid"
        ) from failed[0]


def junit(result: Comparison, file: str | None) -> None:
    """Write the JUnit file, where one was asked for. Raises StoreFailed."""
    if file is not None:
        from whence.report.junit import junit_xml

        _files.write(file, junit_xml(result), force=True)
