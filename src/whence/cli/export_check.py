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

import click

from whence.cli import _answers, _options


@click.command("export-check", help=__doc__)
@click.argument("onnx", metavar="[MODEL.onnx]", required=False, type=click.Path())
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    required=True,
    help="A function that returns the torch model; it is imported and run.",
)
@click.option(
    "--inputs",
    metavar="MODULE:FUNCTION",
    help="A function that returns its arguments: a tuple, a mapping by name, or one tensor.",
)
@click.option(
    "-o",
    "--output",
    metavar="CMP",
    type=_options.HERE,
    help="Folder for the comparison, and for both runs below it.  [default: nothing is written]",
)
@_options.REPLACE_COMPARISON
@click.option("--opset", type=int, metavar="N", help="The operator set to export for.")
@click.option(
    "--optimisation",
    type=click.Choice(["off", "basic", "extended", "all"]),
    default="off",
    show_default=True,
    help="How far ONNX Runtime may rewrite the graph; off: as it was exported.",
)
@_options.STRICT
@_options.TEXT_OR_JSON
def command(onnx: str | None, output: str | None, form: str, **values: Any) -> int:
    """Words -> `api.export_check` -> report -> exit code."""
    from whence import api
    from whence.cli.compare import CODES

    if output is not None:
        api.check_output(Path(output), values["force"])
    result = api.export_check(onnx, values.pop("model"), output=output, **values)
    _answers.put(_answers.said(result, form, annotations=False, output=output))
    if output is not None:
        _answers.kept(result, output)
    return CODES[result.status]
