"""Check whence on your program, with faults that it plants.

\b
    whence doctor -- python infer.py
    whence doctor --faults 20 --seed 1 --keep runs/doctor -- bash run.sh

It must be silent on equal runs and name known faults. It runs CMD once without capture, twice with
capture, once on a single thread, and once for every fault that it plants in a module of the model
(nothing is edited), and compares each run with the first. A fault smaller than the rounding of its
operator counts as "below rounding", not as missed. The output of CMD is shown only when it fails.

Exit code: 0 when the clean runs were silent and every clear fault was named first, otherwise 1; 3
when CMD fails or cannot be run.
"""

from __future__ import annotations

from typing import Any

import click

from whence.cli import _answers, _progress
from whence.cli._options import KEEP_RUNS, TEXT_OR_JSON, option, verb


@verb(
    option("--faults N", "How many faults to plant.", click.IntRange(0), default=8),
    option(
        "--seed N",
        "Chooses the faults, and seeds every run.  [default: 0 for the faults; runs are not "
        "seeded]",
        int,
    ),
    KEEP_RUNS,
    TEXT_OR_JSON,
    program="whence doctor -- python infer.py",
)
def command(keep: str | None, form: str, **options: Any) -> int:
    """Words -> `api.doctor_command` -> report -> exit code."""
    from whence import api
    from whence.report.doctor import checkup

    with _progress.shown() as line:
        result = api.doctor_command(keep=keep, tell=line.say, **options)
    _answers.told(result, form, lambda each: checkup(each, output=keep or ""))
    return 0 if result.healthy else 1
