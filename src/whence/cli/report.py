"""Write a comparison as one HTML page that explains it, as plots, or for tickets and build servers.

\b
    whence report cmp -o report.html
    whence report cmp -o report.html --tokens tokens.json
    whence report tokens.json -o report.html
    whence report cmp --plots plots
    whence report cmp --format markdown --junit whence.xml

CMP is a folder that `whence compare -o CMP` wrote, or what `whence tokens --format json` printed;
without it, the last comparison that was
made in this folder. The page is one file and loads nothing; it is opened in any browser.
Where the two runs still lie where they were, tensors of the findings and of what lies beside them
are looked
at closely; where they do not, the page says what is missing. With --plots, --format, --annotations
or --junit the page is written only when
-o asks for it.

Exit code: 0 when it was written, 3 when there is no such comparison.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from whence.cli import _answers, _progress


@click.command("report", help=__doc__)
@click.argument("comparison", metavar="[CMP]", required=False)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="The page.  [default: CMP/report.html, without CMP ./report.html]",
)
@click.option(
    "--details",
    type=click.IntRange(0),
    default=40,
    show_default=True,
    help="Calls whose tensors are looked at closely; 0: none.",
)
@click.option(
    "--tokens",
    metavar="FILE",
    help="What `whence tokens --format json` printed: text of both sides on the same page.",
)
@click.option(
    "--plots",
    metavar="DIR",
    help="Write the main plots as PNG and SVG into this new folder (needs matplotlib).",
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
    elif plots is None and output is None:
        place = Path(chosen) if isinstance(chosen, str) else Path()
        output = str(place / "report.html" if place.is_dir() else place.with_suffix(".html"))
    count, close = _progress.bar()
    how: dict[str, Any] = {
        "details": details,
        "force": force,
        **({"progress": count} if count is not None else {}),
    }
    lines = []
    try:
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
