"""Name the first operator of a run that makes NaN or overflows.

\b
    whence nans runs/ref
    whence nans runs/ref --format json

RUN may be captured with --keep stats; its statistics are enough. The answer is the first call whose
output has NaN although its inputs had none, with the ranges of what it read, and what overflowed
before it. Infinities that are masks, made between modules, are not counted.

Exit code: 0 when every tensor is finite, 1 when one is not, 2 when some have no statistics and the
others are finite, 3 when the run cannot be read.
"""

from __future__ import annotations

from whence.cli import _answers
from whence.cli._options import TEXT_OR_JSON, argument, verb


@verb(
    argument("run", "RUN"),
    TEXT_OR_JSON,
)
def command(run: str, form: str) -> int:
    """Words -> `api.nans` -> report -> exit code."""
    from whence import api
    from whence.report.nans import nans_text

    result = api.nans(run)
    _answers.told(result, form, nans_text)
    if result.first is not None:
        return 1
    return 2 if result.unmeasured else 0
