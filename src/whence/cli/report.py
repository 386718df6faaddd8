"""Write a comparison as an HTML page, plots, or a build report.

\b
    whence report cmp -o report.html
    whence report cmp -o report.html --tokens tokens.json
    whence report tokens.json -o report.html
    whence report cmp --plots plots
    whence report cmp --format markdown --junit whence.xml
    whence report cmp --parquet pairs.parquet

CMP is a folder written by `whence compare -o CMP`, or the output of `whence tokens --format json`;
without CMP, the last comparison made in this folder is used. The page is one file that loads
nothing else and opens in any browser. While both runs are still in their places, it also shows
tensors of the findings and of the calls around them; otherwise it says what is missing. With
--plots, --parquet, --format, --annotations or --junit, the page is only written when -o names it.

Exit code: 0 when it was written, 3 when there is no such comparison.
"""

from __future__ import annotations

from typing import Any

import click

from whence.cli import _answers, _files, _progress
from whence.cli._options import HERE, PATH, argument, option, verb


@verb(
    argument("comparison", "[CMP]"),
    "Page",
    option(
        "-o, --output FILE",
        "File for the page.  [default: CMP/report.html, or ./report.html without CMP]",
        HERE,
    ),
    option(
        "--details N", "Show the tensors of at most so many calls.", click.IntRange(0), default=40
    ),
    option(
        "--tokens FILE",
        "Output of `whence tokens --format json`: shows the texts of both sides on the page. Or "
        "the model's tokenizer.json, or its folder: shows generated tokens as text.",
        PATH,
    ),
    "Other forms",
    option(
        "--plots DIR",
        "Write the error along the run as PNG and SVG to this new folder (needs matplotlib).",
        HERE,
    ),
    option("--parquet FILE", "Write a table of it as a Parquet file (needs pyarrow).", HERE),
    option(
        "--table NAME",
        "Which table goes into it; `whence query CMP --tables` lists them.",
        default="pairs",
    ),
    *_answers.options(None),
    _answers.JUNIT,
    "Files",
    option("--force", "Replace files that exist."),
)
def command(
    comparison: str | None,
    output: str | None,
    form: str | None,
    annotations: bool,
    junit: str | None,
    plots: str | None,
    parquet: str | None,
    table: str,
    details: int,
    tokens: str | None,
    force: bool,
) -> None:
    """Words -> `api.report_html`, `api.plots`, `api.load_comparison` -> report -> exit code."""
    from whence import api
    from whence.report import tables

    _answers.check(form, annotations, junit, force)
    chosen = _answers.latest() if comparison is None else comparison
    answers = form is not None or annotations
    if answers or junit is not None:
        result = api.load_comparison(chosen) if isinstance(chosen, str) else chosen
        _answers.put(_answers.said(result, form or "github", annotations) if answers else "")
        _answers.junit(result, junit)
    elif plots is None and output is None and parquet is None:
        output = str(api.page_beside(chosen))
    lines = []
    with _progress.shown() as line:
        how: dict[str, Any] = {"details": details, "force": force}
        if line.count is not None:
            how["progress"] = line.count
        if parquet is not None:
            _files.check(parquet, force)
            rows = api.to_parquet(chosen, parquet, table=table)
            lines.append(f"written to {tables.clean(parquet)}: {tables.count(rows, 'row')}")
        if plots is not None:
            files = api.plots(chosen, plots, force=force)
            lines.append(f"written to {tables.clean(plots)}: {tables.count(len(files), 'file')}")
        if output is not None:
            page = api.report_html(chosen, output, tokens=tokens, **how)
            lines.append(f"written to {tables.clean(page)}: {tables.size(page.stat().st_size)}")
    for text in lines:
        click.echo(text, err=answers)
