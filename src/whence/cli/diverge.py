"""Name the step and the place where two trainings part.

\b
    whence run --keep stats -o runs/ref -- python train.py
    whence run --keep stats -o runs/new -- python train_new.py
    whence diverge runs/ref runs/new
    whence diverge runs/ref runs/new --repeat runs/again

REFERENCE and TARGET are runs of a training; statistics are enough. Of each step that both have, the
batch, settings, random numbers, outputs, gradients, parameters and the optimiser's state are
compared, and the first is named that differs by more than noise although what it was made from does
not. Noise is what both runs showed in the steps before, and what runs given by --repeat show.

Exit code: 0 when they never part, 1 when they do, 2 when nothing tells, 3 when a run cannot be
read.
"""

from __future__ import annotations

from typing import Any

from whence.cli import _answers
from whence.cli._options import PATH, TEXT_OR_JSON, argument, option, verb


@verb(
    argument("reference", "REFERENCE"),
    argument("target", "TARGET"),
    option(
        "--repeat RUN ...",
        "A run of the reference with other threads or kernels; repeatable.",
        PATH,
    ),
    TEXT_OR_JSON,
)
def command(form: str, **options: Any) -> int:
    """Words -> `api.diverge` -> report -> exit code."""
    from whence import api
    from whence.report.diverge import diverged_text

    return _answers.told(api.diverge(**options), form, diverged_text)
