"""Compare tensors labelled as reference and as target.

\b
    whence labels runs/both -o cmp
    whence labels runs/ref runs/tgt -o cmp

With two runs, labels that name no side count as reference in the first and as target in the second.

Exit code: 0 the same, 1 different, 2 undecided (also when a label has no partner or its tensor is
missing), 3 when there is no label at all.
"""

from __future__ import annotations

from pathlib import Path

import click

from whence.cli import _answers
from whence.cli._answers import CODES
from whence.cli._options import (
    HERE,
    REPLACE_COMPARISON,
    STRICT,
    TEXT_OR_JSON,
    argument,
    option,
    verb,
)


@verb(
    argument("run", "RUN"),
    argument("target", "[TGT]"),
    option(
        "-o, --output CMP",
        "Folder for summary.json, report.csv, report.json and cmp_report.csv.  [default: nothing "
        "is written]",
        HERE,
    ),
    REPLACE_COMPARISON,
    TEXT_OR_JSON,
    STRICT,
)
def command(
    run: str, target: str | None, output: str | None, force: bool, form: str, strict: bool
) -> int:
    """Words -> `api.compare_labels` -> report -> exit code."""
    from whence import api
    from whence.report.answer import answer
    from whence.report.labels import labels_written_to
    from whence.report.summary import summary

    if output is not None:
        api.check_output(Path(output), force)
    result, rows = api.labels_compared(run, target, strict=strict)
    _answers.put(summary(result) if form == "json" else answer(result))

    def written() -> None:
        if output is not None:
            api.write_labels(result, rows, Path(output))
            click.echo(labels_written_to(result, output), err=form != "text")

    _answers.all_of(written)
    _answers.kept(result, output)
    return CODES[result.status]
