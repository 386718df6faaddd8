"""Write a comparison as one HTML page that explains it.

\b
    whence report cmp -o report.html
    whence report cmp -o report.html --tokens tokens.json
    whence report tokens.json -o report.html

CMP is a folder that `whence compare -o CMP` wrote, or what `whence tokens --format json` printed. The page is one file and loads nothing;
it is opened in any browser. Where the two runs still lie where they were, tensors of the findings and of what lies beside them are looked
at closely; where they do not, the page says what is missing.

Exit code: 0 when it was written, 3 when there is no such comparison.
"""

from __future__ import annotations

import click

from whence.cli._progress import teller


@click.command("report", help=__doc__)
@click.argument("comparison", metavar="CMP")
@click.option("-o", "--output", metavar="FILE", help="The page.  [default: CMP/report.html]")
@click.option(
    "--details", type=click.IntRange(0), default=40, show_default=True, help="Calls whose tensors are looked at closely; 0: none."
)
@click.option("--tokens", metavar="FILE", help="What `whence tokens --format json` printed: text of both sides on the same page.")
@click.option("--force", is_flag=True, help="Replace a page that exists.")
def command(comparison: str, output: str | None, details: int, tokens: str | None, force: bool) -> int:
    """Words -> `api.report_html` -> exit code."""
    from pathlib import Path

    from whence import api
    from whence.report import plain

    place = Path(comparison)
    default = place / "report.html" if place.is_dir() else place.with_suffix(".html")
    say, wipe = teller()
    try:
        written = api.report_html(
            comparison, output or default, details=details, tokens=tokens, force=force,
            progress=lambda done, of, what: say(f"{what} {done}/{of}"),
        )  # fmt: skip
    finally:
        wipe()
    click.echo(f"written to {plain.clean(written)}: {plain.size(written.stat().st_size)}")
    return 0
