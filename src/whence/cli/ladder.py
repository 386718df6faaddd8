"""Find the stage, optimiser or release that changes the results.

\b
    whence ladder -o DIR -- python infer.py
    whence ladder -o DIR --seed 0 --bisect-pass -- python train.py
    whence ladder -o DIR --release ort-1.20 --release ort-1.23 -- python serve.py

The command runs twice eagerly, then once per stage: aot_eager (dynamo and AOTAutograd),
aot_eager_decomp_partition (with inductor's decompositions) and inductor; where that is the first
outside the noise, with dynamic shapes and caches of whole graphs off, and with caches off. Nothing
is edited: torch.compile gets another backend in these processes. Each stage is compared with eager
and with the stage before it. More runs, in which only a piece of the traced graphs is compiled,
then name the operators and lines that go wrong. With --bisect-pass, torch's own compiler bisector
finds the pass, lowering or decomposition too, with this comparison as its test; that takes about 20
more runs.

A program that compiles nothing and makes sessions of ONNX Runtime runs twice with their graph
optimisations off, then once per level (basic, extended, layout, all). A bisection over more runs
then names the first optimiser that makes the difference, and the node. With --release, the program
runs as it is with one release after the other, each first on its path.

Exit code: 0 no rung is outside the noise, 1 one is named, 2 undecided, 3 when the command fails on
the lowest rung or cannot be run.
"""

from __future__ import annotations

from typing import Any

from whence.cli import _answers, _progress
from whence.cli._options import HERE, PATH, SETTLED_RUNS, TEXT_OR_JSON, given, option, verb


@verb(
    option(
        "-o, --output DIR",
        "Folder for runs, comparisons and ladder.json; it must not exist yet.",
        HERE,
        required=True,
    ),
    option("--force", "Replace DIR if it holds a ladder."),
    option("--bisect-pass", "Also name the pass, with torch's own compiler bisector."),
    option(
        "--of",
        "What is climbed.  [default: torch where the program compiles something]",
        ("torch", "onnxruntime"),
    ),
    option(
        "--release DIR ...",
        "A folder with a release of onnxruntime (pip install --no-deps --target DIR "
        "onnxruntime==1.20.1); repeatable, tried in this order. Of one alone, what is installed "
        "comes second.",
        PATH,
        name="releases",
    ),
    *SETTLED_RUNS,
    TEXT_OR_JSON,
    program="whence ladder -o DIR -- python infer.py",
)
def command(form: str, output: str, **options: Any) -> int:
    """Words -> `api.ladder_command` -> report -> exit code."""
    from whence import api
    from whence.report.ladder import rungs

    with _progress.shown() as line:
        result = api.ladder_command(output=output, tell=line.say, **given(options))
    return _answers.told(result, form, lambda each: rungs(each, output=output))
