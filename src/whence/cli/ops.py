"""List a run's operators, and write and compare tests of them.

\b
    whence run --level op -o runs/ops -- python train.py
    whence ops list runs/ops
    whence ops fuzz kernels:rmsnorm kernels:reference --input 'x: float32[rows, cols]'
"""

from __future__ import annotations

from typing import Any

from whence.cli._answers import say, told, width
from whence.cli._options import COUNT, HERE, TEXT_OR_JSON, argument, below, given, group, option

command = group("ops", __doc__)


@below(
    command,
    "list",
    argument("run", "RUN"),
    option(
        "--include PATTERN ...",
        "Only operators whose name matches: 'aten.mm.*', 'addmm' (repeatable).",
    ),
    option("--exclude PATTERN ...", "Skip operators whose name matches (repeatable)."),
    option("--sort", "Which operators come first.", ("time", "count", "name"), default="time"),
    option("--format", "What is printed.", ("table", "json", "csv"), name="form", default="table"),
)
def list_command(
    run: str, include: tuple[str, ...], exclude: tuple[str, ...], sort: str, form: str
) -> None:
    """List the operators of RUN by signature: calls, time, shapes, value ranges, and callers."""
    from whence import api
    from whence.report.operators import operators

    groups = api.chosen_operators(api.signatures(api.open_run(run)), include, exclude, sort)
    say(operators(groups, form, width()))


@below(
    command,
    "generate",
    argument("run", "RUN"),
    option(
        "-o, --output TESTS_DIR", "A new folder for the tests and their data.", HERE, required=True
    ),
    option("--level", "Test operators, or leaf modules.", ("op", "module"), default="op"),
    option(
        "--factory",
        "Input values: as recorded, random within the recorded range, or special ones (zeros, "
        "denormals, infinities, NaN, ties).",
        ("load", "random", "special"),
        default="load",
    ),
    option("--cpu-init", "Draw random values on the CPU, so that all devices get the same."),
    option("--include PATTERN ...", "Only operators (modules) whose name matches (repeatable)."),
    option("--exclude PATTERN ...", "Skip operators (modules) whose name matches (repeatable)."),
    option("--keep-trivial", "Also test random, creation and view operators, by structure only."),
    option(
        "--samples N", "Test at most so many recorded calls of each signature.", COUNT, default=3
    ),
    option("--force", "Replace tests that were written before."),
)
def generate_command(**options: Any) -> None:
    """Write pytest files for the operators of RUN, with real shapes and data; they need only torch
    and pytest.
    """
    from whence import api
    from whence.report.operator_diff import written

    say(written(api.generate_tests(**options)))


@below(
    command,
    "diff",
    argument("reference", "REF_CSV"),
    argument("target", "TGT_CSV"),
    option("-o, --output RESULT_CSV", "Also write the joined table.", HERE),
    option("--force", "Replace RESULT_CSV."),
)
def diff_command(**options: Any) -> int:
    """Compare what the tests measured on two devices. Exit code: 0 the same, 1 different, 2 nothing
    compared.
    """
    from whence import api
    from whence.report.operator_diff import tested_text

    return told(api.diff_results(**options), "text", tested_text)


@below(
    command,
    "fuzz",
    argument("kernel", "KERNEL", str),
    argument("reference", "[REFERENCE]", str),
    option(
        "--input FORM ...",
        "A tensor that it takes, in order: 'x: float32[rows, cols]'; equal names are equal sizes.",
        name="inputs",
    ),
    option("--argument NAME=VALUE ...", "An argument beside the tensors.", name="arguments"),
    option("--output FORM ...", "A tensor that a function of C writes.", name="outputs"),
    option(
        "--order NAMES",
        "Parameters of a function of C in order: 'x, y, rows:i32'.  [default: inputs, outputs, "
        "sizes, arguments]",
    ),
    option("--without ...", "Values that it need not take (nan, inf, large, ...)."),
    option("--cases N", "How many cases are tried.", COUNT, default=160),
    option("--tests DIR", "Write a pytest file for each fault into this folder.", HERE),
    TEXT_OR_JSON,
)
def fuzz_command(
    form: str, arguments: tuple[str, ...], reference: str | None, **options: Any
) -> int:
    """Try KERNEL on edges of tiles, odd layouts and awkward values against REFERENCE in float64.

    Each is MODULE:FUNCTION (torch, numba, numpy, Triton), LIBRARY.so:FUNCTION, FILE.onnx, or
    RUN:MODULE or RUN:OPERATOR for a recorded call. Exit code: 0 sound, 1 a fault, 2 no case could
    be judged, 3 an error.
    """
    from whence import api
    from whence.report.fuzz import fuzzed_text

    beside = api.parsed_arguments(arguments)
    result = api.fuzz(reference=reference or "", arguments=beside, **given(options))
    return told(result, form, fuzzed_text)
