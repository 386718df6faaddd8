"""Check an exported ONNX model against its torch model.

\b
    whence export-check model.onnx --model infer:make_model
    whence export-check --model infer:make_model --inputs infer:make_inputs -o cmp

Both are run on the same inputs, torch as it is and the file in ONNX Runtime, with everything that
they compute inside captured, and compared; torch is the reference. Without a file the model is
exported first, to a temporary folder. Without --inputs they are drawn, of the forms that the file
states.

Exit code: 0 the same, 1 different (a likely or certain finding), 2 undecided, 3 an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whence.cli import _answers
from whence.cli._answers import CODES
from whence.cli._options import (
    HERE,
    REPLACE_COMPARISON,
    STRICT,
    TEXT_OR_JSON,
    argument,
    option,
    verb,
)


@verb(
    argument("onnx", "[MODEL.onnx]"),
    option(
        "--model MODULE:FACTORY",
        "A function that returns the torch model; it is imported and run.",
        required=True,
    ),
    option(
        "--inputs MODULE:FUNCTION",
        "A function that returns its arguments: a tuple, a mapping by name, or one tensor.",
    ),
    option(
        "-o, --output CMP",
        "Folder for the comparison, and for both runs below it.  [default: nothing is written]",
        HERE,
    ),
    REPLACE_COMPARISON,
    option("--opset N", "The operator set to export for.", int),
    option(
        "--optimisation",
        "How far ONNX Runtime may rewrite the graph; off: as it was exported.",
        ("off", "basic", "extended", "all"),
        default="off",
    ),
    STRICT,
    TEXT_OR_JSON,
)
def command(form: str, output: str | None, force: bool, **options: Any) -> int:
    """Words -> `api.export_check` -> report -> exit code."""
    from whence import api

    if output is not None:
        api.check_output(Path(output), force)
    result = api.export_check(output=output, force=force, **options)
    _answers.put(_answers.said(result, form, annotations=False, output=output))
    if output is not None:
        _answers.kept(result, output)
    return CODES[result.status]
