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

from whence.cli import _answers, _files, _help, _options, _progress

_GROUPS = {
    "Page": "--output --details --tokens",
    "Other forms": "--format --annotations --junit --plots --parquet --table",
    "Files": "--force",
}


@click.command("report", cls=_help.Grouped, help=__doc__, groups=_GROUPS)
@click.argument("comparison", metavar="[CMP]", required=False, type=click.Path())
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=_options.HERE,
    help="File for the page.  [default: CMP/report.html, or ./report.html without CMP]",
)
@click.option(
    "--details",
    type=click.IntRange(0),
    metavar="N",
    default=40,
    show_default=True,
    help="Show the tensors of at most so many calls.",
)
@click.option(
    "--tokens",
    metavar="FILE",
    type=click.Path(),
    help="Output of `whence tokens --format json`: shows the texts of both sides on the page. Or "
    "the model's tokenizer.json, or its folder: shows generated tokens as text.",
)
@click.option(
    "--plots",
    metavar="DIR",
    type=_options.HERE,
    help="Write the main plots as PNG and SVG to this new folder (needs matplotlib).",
)
@click.option(
    "--parquet",
    metavar="FILE",
    type=_options.HERE,
    help="Write a table of it as a Parquet file (needs pyarrow).",
)
@click.option(
    "--table",
    metavar="NAME",
    default="pairs",
    show_default=True,
    help="Which table goes into it; `whence query CMP --tables` lists them.",
)
@_answers.options(None)
@click.option("--force", is_flag=True, help="Replace files that exist.")
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
) -> int:
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
    count, close = _progress.bar()
    how: dict[str, Any] = {
        "details": details,
        "force": force,
        **({"progress": count} if count is not None else {}),
    }
    lines = []
    try:
        if parquet is not None:
            _files.check(parquet, force)
            rows = api.to_parquet(chosen, parquet, table=table)
            lines.append(f"written to {tables.clean(parquet)}: {tables.count(rows, 'row')}")
        if plots is not None:
            files = api.plots(
                chosen,
                plots,
                tell=lambda text: click.echo(f"note: {tables.clean(text)}", err=True),
                **how,
            )
            lines.append(f"written to {tables.clean(plots)}: {tables.count(len(files), 'file')}")
        if output is not None:
            page = api.report_html(chosen, output, tokens=tokens, **how)
            lines.append(f"written to {tables.clean(page)}: {tables.size(page.stat().st_size)}")
    finally:
        close()
    for line in lines:
        click.echo(line, err=answers)
    return 0
