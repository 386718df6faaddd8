"""Write a map of how two runs are paired, to edit for --map.

\b
    whence align runs/ref runs/tgt -o map.yaml
    whence compare runs/ref runs/tgt --map map.yaml

Calls that equal names pair are left out, layer numbers are written {i}, and calls without a partner
are listed as comments.
"""

from __future__ import annotations

from typing import Any

from whence.cli import _files
from whence.cli._options import FIRST_MAP, OUTPUT_FILE, REPLACE_FILE, argument, verb


@verb(
    argument("reference", "REF"),
    argument("target", "TGT"),
    OUTPUT_FILE,
    REPLACE_FILE,
    FIRST_MAP,
)
def command(output: str | None, force: bool, **options: Any) -> None:
    """Words -> `api.align_runs` -> `report.plan_map`."""
    from whence import api
    from whence.report.plan import plan_map

    _files.check(output, force)
    aligned = api.align_runs(**options)
    _files.leave(plan_map(aligned.as_said(), aligned.reference, aligned.target), output, force)
