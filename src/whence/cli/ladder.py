"""Find the stage, optimiser or release that changes the results.

\b
    whence ladder -o DIR -- python infer.py
    whence ladder -o DIR --seed 0 --bisect-pass -- python train.py
    whence ladder -o DIR --release ort-1.20 --release ort-1.23 -- python serve.py

The command runs twice eagerly, then once per stage: aot_eager (dynamo and AOTAutograd),
aot_eager_decomp_partition (with inductor's decompositions) and inductor; where that is the first
outside the noise, with dynamic shapes and caches of whole graphs off, and with caches off. Nothing
is edited: torch.compile gets another backend in these processes. Each stage is compared with eager
and with the stage before it. With --bisect-pass, torch's own compiler bisector then finds the pass,
lowering or decomposition, with this comparison as its test; that takes about 20 more runs.

A program that compiles nothing and makes sessions of ONNX Runtime runs twice with their graph
optimisations off, then once per level (basic, extended, layout, all). A bisection over more runs
then names the first optimiser that makes the difference, and the node. With --release, the program
runs as it is with one release after the other, each first on its path.

Exit code: 0 no rung is outside the noise, 1 one is named, 2 undecided, 3 when the command fails on
the lowest rung or cannot be run.
"""

from __future__ import annotations

from typing import Any

import click

from whence.cli import _answers, _options, _progress


@click.command(
    "ladder",
    cls=_progress.WithCommand,
    help=__doc__,
    options_metavar="[OPTIONS] -- CMD ...",
)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    required=True,
    type=_options.HERE,
    help="Folder for runs, comparisons and ladder.json; it must not exist yet.",
)
@click.option("--force", is_flag=True, help="Replace DIR if it holds a ladder.")
@click.option(
    "--bisect-pass", is_flag=True, help="Also name the pass, with torch's own compiler bisector."
)
@click.option(
    "--of",
    type=click.Choice(["torch", "onnxruntime"]),
    help="What is climbed.  [default: torch where the program compiles something]",
)
@click.option(
    "--release",
    "releases",
    multiple=True,
    metavar="DIR",
    type=click.Path(),
    help="A folder with a release of onnxruntime (pip install --no-deps --target DIR "
    "onnxruntime==1.20.1); repeatable, tried in this order. Of one alone, what is installed comes "
    "second.",
)
@click.option("--seed", type=int, metavar="N", help="Seed every run.")
@click.option("--deterministic", is_flag=True, help="Switch every run to deterministic kernels.")
@click.option(
    "--steps", metavar="START:STOP", help="Only these steps, STOP excluded (0:10, 5:, :3)."
)
@_options.TEXT_OR_JSON
@click.pass_context
def command(
    ctx: click.Context,
    output: str,
    force: bool,
    bisect_pass: bool,
    of: str | None,
    releases: tuple[str, ...],
    seed: int | None,
    deterministic: bool,
    steps: str | None,
    form: str,
) -> int:
    """Words -> `api.ladder_command` -> report -> exit code."""
    from whence import api
    from whence.cli.compare import CODES
    from whence.report.ladder import rungs

    cmd = ctx.meta.get("whence.command")
    if cmd is None:
        raise click.UsageError("no command given:  whence ladder -o DIR -- python infer.py", ctx)
    options = {"seed": seed, "steps": steps, "deterministic": deterministic or None}
    with _progress.telling() as say:
        given: dict[str, Any] = {n: value for n, value in options.items() if value is not None}
        result = api.ladder_command(
            cmd,
            output=output,
            force=force,
            bisect_pass=bisect_pass,
            of=of or "",
            releases=releases,
            tell=say,
            **given,
        )
    if form == "json":
        _answers.put_json(result)
    else:
        click.echo(rungs(result, output=output), nl=False)
    return CODES[result.status]
