"""Measure how much of the output's error each finding explains.

\b
    whence locate runs/ref -- python infer.py --dtype bf16
    whence locate runs/ref runs/tgt                       runs the command that made TGT again
    whence locate cmp                                     the same, of a comparison
    whence locate                                         the same, of the last comparison made in this folder
    whence locate cmp --patch layers.3.mlp --patch layers.7
    whence locate cmp --search                            bisects the calls, without a finding

The target runs again, with the outputs of a call replaced by those of the reference; everything
after that call goes on with them. Without --patch and --search this is done for the first finding,
then for the first one that remains, until none does. CALL is NAME[@STEP[.OCCURRENCE]][:SLOT].
Shares are of the squared error, so those of independent faults add up.

Exit code, as without any patch: 0 the runs are the same, 1 different, 2 undecided; 3 when the
command fails or cannot be run.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

from whence.cli import _answers, _progress
from whence.cli._options import COUNT, KEEP_RUNS, TEXT_OR_JSON, argument, option, verb


@verb(
    argument("reference", "[REF|CMP]"),
    argument("target", "[TGT] [-- CMD ...]"),
    option(
        "--patch CALL ...", "Patch this call (repeatable: each patch is added to those before it)."
    ),
    option(
        "--search", "Find, by bisection, the call by which half of the squared error has arisen."
    ),
    option("--max N", "Patch at most so many findings.", COUNT, name="most", default=8),
    option("--seed N", "Seed every run.  [default: the reference's seed, if it had one]", int),
    KEEP_RUNS,
    TEXT_OR_JSON,
    program="",
)
def command(reference: str | None, form: str, **options: Any) -> int:
    """Words -> `api.locate` -> report -> exit code."""
    from whence import api
    from whence.report.locate import location

    chosen = _answers.latest() if reference is None else reference
    options["command"] = options["command"] or None
    with _progress.shown() as line:
        result = api.locate(chosen, tell=line.say, **options)
    return _answers.told(result, form, lambda each: location(each, output=options["keep"] or ""))
