"""Name the first operator that does not repeat itself.

\b
    whence repeat -- python train.py
    whence repeat --times 3 --steps 0:5 -- bash run.sh

CMD runs twice, in fresh processes with the same arguments and environment, and is captured both
times; nothing is edited. Every tensor of one run is compared with that of the other, bit for bit.
Named is the first call whose output differs although its inputs are equal, or the first input,
parameter or random draw that differs, with what would make it repeat.

Exit code: 0 when every captured tensor is equal in all runs, 1 when something differs, 2 when
nothing does but not all could be compared, 3 when CMD fails or cannot be run.
"""

from __future__ import annotations

from typing import Any

import click

from whence.cli import _answers, _progress
from whence.cli._options import KEEP_RUNS, SETTLED_RUNS, TEXT_OR_JSON, given, option, verb


@verb(
    option(
        "--times N",
        "How many runs; with 3, whether only the first differs.",
        click.IntRange(2),
        default=2,
    ),
    *SETTLED_RUNS,
    option(
        "--level",
        "Compare calls of modules, or every operator too (op).",
        ("modules", "op"),
        default="modules",
    ),
    KEEP_RUNS,
    TEXT_OR_JSON,
    program="whence repeat -- python train.py",
)
def command(form: str, **options: Any) -> int:
    """Words -> `api.repeat_command` -> report -> exit code."""
    from whence import api
    from whence.report.repeat import repeated_text

    with _progress.shown() as line:
        result = api.repeat_command(tell=line.say, **given(options))
    return _answers.told(result, form, repeated_text)
