"""Say which quantised layers to leave in float, measured.

\b
    whence recipe cmp                                  of a comparison of the float and the quantised model
    whence recipe                                      the same, of the last comparison made in this folder
    whence recipe cmp --tool compressed-tensors        in the words of another quantiser
    whence recipe cmp --seconds 0                      from estimates alone, nothing is run
    whence recipe cmp -- python infer.py --int8        when the target's command was not recorded

The target's command runs again with layers computed in float, by the float run's weights, on what
they are given there: each layer alone, the most promising first, then the best ones together.
Beside each stands the estimate from replay, where there is one, and what may quantise the layer
better.

Exit code: 0 when it was answered, 3 when no layer is quantised or the command fails.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import click

from whence.cli import _answers, _progress
from whence.cli._options import HERE, KEEP_RUNS, TEXT_OR_JSON, argument, option, verb

TOOLS = ("onnxruntime", "nncf", "torchao", "compressed-tensors", "modelopt", "msmodelslim")


@verb(
    argument("comparison", "[CMP] [-- CMD ...]", default=""),
    option("--tool", "The quantiser.  [default: that of the target's engine]", TOOLS),
    option("--seconds N", "Begin no further run after so long.", click.FloatRange(0), default=120),
    option("--model FILE", "The float ONNX file, for the names of its nodes.", HERE),
    KEEP_RUNS,
    TEXT_OR_JSON,
    program="",
)
def command(comparison: str, form: str, **options: Any) -> int:
    """Words -> `api.recipe` -> report -> exit code."""
    from whence import api
    from whence.report.recipe import recipe

    options["command"], options["tool"] = options["command"] or None, options["tool"] or ""
    with _progress.shown() as line:
        result = api.recipe(comparison or _answers.latest(), tell=line.say, **options)
    return _answers.told(result, form, recipe)
