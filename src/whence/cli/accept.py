"""Say whether a moved expectation may be renewed.

\b
    whence accept golden.json now.json --program train:losses
    whence accept golden.npy --program infer:run --inputs infer:batch --write
    whence accept golden.json now.json --again threads2.json --again threads4.json --again cpu.json

EXPECTED and ACTUAL are JSON or YAML files with numbers, or arrays (.npy, .npz, .safetensors, .pt).
How far rounding goes comes from evidence: the program, run in several ways and in float64, or
further runs of it. Without ACTUAL it is what the program gives.

Exit code: 0 it may be renewed, 1 it may not, 2 the evidence does not decide, 3 an error.
"""

from __future__ import annotations

from typing import Any

from whence.cli import _answers
from whence.cli._options import PATH, TEXT_OR_JSON, argument, given, option, verb


@verb(
    argument("expected", "EXPECTED"),
    argument("actual", "[ACTUAL]"),
    option(
        "--program MODULE:FUNCTION", "A function that returns the values; it is imported and run."
    ),
    option("--inputs MODULE:FUNCTION", "A function that returns the program's arguments."),
    option(
        "--again FILE ...",
        "Actual values of another run: other threads, kernels, order of the batch (repeatable).",
        PATH,
    ),
    option("--exact FILE", "Exact values that do not come from this program.", PATH),
    option(
        "--was DTYPE",
        "The dtype that the expectation was computed in, where it is a coarser one.",
        ("bfloat16", "float16", "tf32", "float32"),
    ),
    option("--write", "Renew EXPECTED, where it may be renewed."),
    TEXT_OR_JSON,
)
def command(form: str, write: bool, **options: Any) -> int:
    """Words -> `api.accept` -> report -> exit code."""
    from whence import api
    from whence.report.accept import accepted_text

    answer = api.accept(**given(options))
    if write:
        answer = api.renew_expectation(options["expected"], answer)
    return _answers.told(answer, form, accepted_text)
