"""Name the step and the place where two trainings part.

\b
    whence run --keep stats -o runs/ref -- python train.py
    whence run --keep stats -o runs/new -- python train_new.py
    whence diverge runs/ref runs/new
    whence diverge runs/ref runs/new --repeat runs/again --plot loss.svg

REFERENCE and TARGET are runs of a training; statistics are enough. Of each step that both have, the
batch, settings, random numbers, outputs, gradients, parameters and the optimiser's state are
compared, and the first is named that differs by more than noise although what it was made from does
not. Noise is what both runs showed in the steps before, and what runs given by --repeat show.

Exit code: 0 when they never part, 1 when they do, 2 when nothing tells, 3 when a run cannot be
read.
"""

from __future__ import annotations

import sys

import click

from whence.cli import _answers, _files, _options


@click.command("diverge", help=__doc__)
@click.argument("reference", metavar="REFERENCE", type=click.Path())
@click.argument("target", metavar="TARGET", type=click.Path())
@click.option(
    "--repeat",
    metavar="RUN",
    type=click.Path(),
    multiple=True,
    help="A run of the reference with other threads or kernels; repeatable.",
)
@click.option("--plot", metavar="FILE.svg", type=_options.HERE, help="Draw losses and drift.")
@click.option("--force", is_flag=True, help="Replace FILE.svg.")
@_options.TEXT_OR_JSON
def command(
    reference: str, target: str, repeat: tuple[str, ...], plot: str | None, force: bool, form: str
) -> int:
    """Words -> `api.diverge` -> report -> exit code."""
    from whence import api
    from whence.cli.compare import CODES
    from whence.report.diverge import diverged_text

    _files.check(plot, force)
    result = api.diverge(reference, target, repeat=repeat)
    if plot is not None:
        from whence.report.diverge_plot import diverged_svg

        _files.write(plot, diverged_svg(result), force)
    if form == "json":
        _answers.put_json(result)
    else:
        sys.stdout.write(diverged_text(result))
    return CODES[result.status]
