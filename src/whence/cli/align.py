"""Write a map of how two runs are paired, to edit for --map.

\b
    whence align runs/ref runs/tgt -o map.yaml
    whence compare runs/ref runs/tgt --map map.yaml

Calls that equal names pair are left out, layer numbers are written {i}, and calls without a partner
are listed as comments.
"""

from __future__ import annotations

import click

from whence.cli import _files, _options


@click.command("align", help=__doc__)
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="TGT", type=click.Path())
@_options.OUTPUT_FILE
@_options.REPLACE_FILE
@_options.FIRST_MAP
def command(reference: str, target: str, output: str | None, force: bool, chart: str | None) -> int:
    """Words -> `api.align_runs` -> `report.plan_map`."""
    from whence import api
    from whence.report.plan import plan_map

    _files.check(output, force)
    aligned = api.align_runs(reference, target, mapping=chart)
    _files.leave(plan_map(aligned.as_said(), aligned.reference, aligned.target), output, force)
    return 0
