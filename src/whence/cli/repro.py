"""Write a script that reproduces a finding in one operator.

\b
    whence repro cmp -o repro
    whence repro -o repro                       from the last comparison made in this folder
    whence repro cmp --finding 2 -o repro2
    python repro/repro.py                       as the target ran: fails
    python repro/repro.py --side reference      as the reference ran: passes

The script needs only torch and the data file beside it, and `pytest repro.py` runs it as a test.
Once written, it is run both ways to check that it reproduces the finding.

Exit code: 0 it fails as the target ran and passes as the reference ran, 2 it does not, 3 no
operator can be run again.
"""

from __future__ import annotations

from typing import Any

from whence.cli import _answers, _progress
from whence.cli._options import COUNT, HERE, TEXT_OR_JSON, argument, option, verb


@verb(
    argument("comparison", "[CMP]"),
    option("-o, --output DIR", "Folder for repro.py and repro.safetensors.", HERE, required=True),
    option("--finding N", "Which finding, counted as whence compare lists them.", COUNT, default=1),
    option("--force", "Write to DIR even if it holds files."),
    option("--no-run", "Write the script without running it."),
    option(
        "--model MODULE:FACTORY",
        "A function that returns REF's model, for calls that were not recorded; it is imported "
        "and run.",
    ),
    TEXT_OR_JSON,
)
def command(comparison: str | None, no_run: bool, form: str, **options: Any) -> int:
    """Words -> `api.repro` -> report -> exit code."""
    from whence import api
    from whence.report.repro import reproduction

    chosen = _answers.latest() if comparison is None else comparison
    with _progress.shown() as line:
        result = api.repro(chosen, run=not no_run, tell=line.say, **options)
    _answers.told(result, form, reproduction)
    return 0 if result.holds is not False else 2
