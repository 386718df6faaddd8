"""Propose a map of who faces whom in two runs, to edit and give to `whence compare --map`.

\b
    whence align runs/ref runs/tgt -o map.yaml
    whence compare runs/ref runs/tgt --map map.yaml

What exact names pair is left out; numbers are written {i}; calls without a partner stand there as comments.
"""

from __future__ import annotations

from pathlib import Path

import click

from whence.errors import OutputExists, StoreFailed


@click.command("align", help=__doc__)
@click.argument("reference", metavar="REF")
@click.argument("target", metavar="TGT")
@click.option("-o", "--output", metavar="FILE", help="Write to this file instead of the terminal.")
@click.option("--force", is_flag=True, help="Replace FILE when it exists.")
@click.option("--map", "chart", metavar="FILE", help="Start from this map.")
def command(reference: str, target: str, output: str | None, force: bool, chart: str | None) -> int:
    """Words -> `api.face` -> `report.plan_map`."""
    from whence import api, report

    if output is not None and Path(output).exists() and not force:
        raise OutputExists(f"{output} exists; --force replaces it, or choose another -o")
    aligned = api.face(reference, target, mapping=chart)
    text = report.plan_map(aligned.as_said(), aligned.reference, aligned.target)
    if output is None:
        click.echo(text, nl=False)
        return 0
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreFailed(f"cannot write {output}: {error.strerror or error}") from error
    return 0
