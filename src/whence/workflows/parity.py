"""Two models on the same inputs, each captured, and compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whence.results import Comparison

REFERENCE, TARGET, COMPARED = "reference", "target", "cmp"


def parity(
    model_a: Any,
    model_b: Any,
    inputs: Any = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    options: Mapping[str, Any] | None = None,
    **how: Any,
) -> Comparison:
    """Call two models once on the same inputs, captured, and compare them; `model_a` is the reference.

    model_a, model_b: torch modules, Paddle layers or predictors, also one of each; they may be the same object. A path is a run that
    was captured before, on the same inputs. inputs: a tuple
    is the positional arguments, a mapping the named ones, anything else the only one; each model gets copies on its own device, in its
    own framework and floating dtype. Both see the same random numbers, in the mode (train, eval) they are in, without gradients.
    folder: for the runs `reference` and `target`, and the comparison `cmp`; None keeps nothing. force: replace such runs.
    options: of the captures (`whence.capture`). how: arguments of `whence.compare`.
    Raises what a model raises, with the side it was on; UsageError, CaptureError, OutputExists, StoreFailed, UnreadableRun.
    """
    from whence.workflows.capture.capture import capture
    from whence.workflows.compare import compare
    from whence.workflows.feeding import called

    if folder is None:
        with tempfile.TemporaryDirectory(prefix="whence-parity-") as scratch:
            return parity(model_a, model_b, inputs, scratch, force=True, options=options, **how)
    place, runs = Path(folder), []
    for side, model in ((REFERENCE, model_a), (TARGET, model_b)):
        runs.append(Path(model) if isinstance(model, (str, os.PathLike)) else place / side)
        if runs[-1] != place / side:
            continue
        with capture(model, place / side, **{"force": force, **(options or {})}):
            try:
                called(model, inputs)
            except Exception as error:  # whatever the user's model raises: told which of the two it was, and raised again
                error.add_note(f"whence: raised by the {side} model, {type(model).__name__}, on the inputs given")
                raise
    return compare(runs[0], runs[1], output=place / COMPARED, force=force, **how)
