"""Run a command on two commits, and compare what it computes.

\b
    whence commits -o DIR v1.4 HEAD -- python -m pytest tests/test_predictor.py
    whence commits -o DIR v1.4 HEAD --texts predict.json --expected golden.json -- python ask.py
    whence commits -o DIR v1.4 HEAD --bisect -- python infer.py
    whence commits -o DIR ../old-checkout . -- python infer.py
    whence commits -o DIR old/venv new/venv -- python infer.py

FIRST is the reference. Both are commits, folders to run in, or virtual environments to run with.
Each commit is checked out beside the repository, which is not touched, the command runs there,
captured, and the checkout is removed. Modules are taken from it (it and its src come first in
PYTHONPATH). With --bisect, the first commit behind FIRST that is different is named.

Exit code: 0 the same, 1 different, 2 undecided, 3 when the command computes nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from whence.cli import _answers, _progress
from whence.cli._answers import CODES
from whence.cli._options import HERE, PATH, TEXT_OR_JSON, argument, option, verb


@verb(
    argument("first", "FIRST", str),
    argument("second", "SECOND", str),
    option("-o, --output DIR", "A new folder for the runs.", HERE, required=True),
    option("--bisect", "Also name the commit between them that changed the results."),
    option(
        "--texts FILE", "Compare the answers that CMD writes here, prompt by prompt.", default=""
    ),
    option("--expected FILE", "Compare the answers of both with these.", PATH, default=""),
    option(
        "--link PATH ...",
        "What git does not keep, as weights: every checkout gets a link (repeatable).",
        PATH,
        name="links",
    ),
    TEXT_OR_JSON,
    program="whence commits -o DIR v1.4 HEAD -- python infer.py",
    options_metavar="[OPTIONS] -o DIR",
)
def command(form: str, **options: Any) -> int:
    """Words -> `api.commits` -> report -> exit code."""
    from whence import api
    from whence.report.commits import commits_json, commits_text

    with _progress.shown() as line:
        result = api.commits(tell=line.say, **options)
    if form == "json":
        sys.stdout.write(commits_json(result))
    else:
        _answers.put(commits_text(result, width=_answers.width()))
    _answers.kept(result.comparison)
    return CODES[result.comparison.status]
