"""`whence.auto_diff`: captures two models on one input and compares them in one call."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whence.errors import UsageError
from whence.results import Comparison, Status
from whence.workflows.compare import compare
from whence.workflows.saved import AnyPath


class Difference(Comparison, frozen=True):
    """A Comparison with a truth value: true when `status` is "same", false when different or
    undecided.
    """

    def __bool__(self) -> bool:
        return self.status == Status.SAME


def auto_diff(
    model_a: Any,
    model_b: Any,
    inputs: Any,
    *,
    output: AnyPath | None = None,
    force: bool = False,
    capture: dict[str, Any] | None = None,
    **options: Any,
) -> Difference:
    """Run two models on the same inputs, compare everything they compute, print the answer and
    return it; it is true if they are the same.

        assert whence.auto_diff(paddle_layer, torch_module, {"x": x})

    model_a (the reference), model_b (the target): torch modules or Paddle layers, with their
    weights and modes as they are. inputs: a dict of keyword arguments, a tuple or list of
    arguments, or one tensor, which both get, each in its framework, on its device, in its floating
    dtype; or a pair of two dicts or two tuples, one for each model. Tensors may be torch, Paddle or
    numpy. output: folder for the comparison, with the runs in `reference` and `target` below it;
    None keeps nothing. capture: options of `whence.capture`; options: those of `whence.compare`.
    Only forward passes are compared, without gradients. Raises UsageError, CaptureError,
    OutputExists, and what a model raises.
    """
    from whence.instrument import paddle as paddle_models
    from whence.report.answer import answer
    from whence.workflows.saved import check_output

    for model in (model_a, model_b):
        if not hasattr(model, "named_modules") and not paddle_models.owns(model):
            raise UsageError(
                f"auto_diff compares torch modules and Paddle layers, not a {type(model).__name__}"
            )
    folder = Path(output) if output is not None else None
    if folder is not None:
        check_output(folder, force)
    with tempfile.TemporaryDirectory(prefix="whence-") as scratch:
        runs = _captured(
            (model_a, model_b),
            _each(inputs),
            folder or Path(scratch),
            {"force": force, **(capture or {})},
        )
        result = compare(*runs, output=folder, force=True, **options)
    sys.stdout.write(answer(result, output=str(folder) if folder is not None else ""))
    return Difference(**{name: getattr(result, name) for name in Comparison.__struct_fields__})


def _each(inputs: Any) -> list[Any]:
    """The inputs of each of the two models, in the form that `feeding.called` takes."""
    pair = inputs, inputs
    if isinstance(inputs, (tuple, list)) and len(inputs) == 2:
        for kind in (dict, (tuple, list)):
            if all(isinstance(values, kind) for values in inputs):
                pair = tuple(inputs)
    return [tuple(values) if isinstance(values, list) else values for values in pair]


REFERENCE, TARGET, COMPARED = "reference", "target", "cmp"


def parity(
    model_a: Any,
    model_b: Any,
    inputs: Any = None,
    folder: AnyPath | None = None,
    *,
    force: bool = False,
    options: Mapping[str, Any] | None = None,
    **how: Any,
) -> Comparison:
    """Call two models once on the same inputs, captured, and compare them; `model_a` is the
    reference.

    model_a, model_b: torch modules, Paddle layers or predictors, also one of each; they may be the
    same object. A path is a run that was captured before, on the same inputs. inputs: a tuple is
    the positional arguments, a mapping the named ones, anything else the only one; each model gets
    copies on its own device, in its own framework and floating dtype. Both see the same random
    numbers, in the mode (train, eval) they are in, without gradients. folder: for the runs
    `reference` and `target`, and the comparison `cmp`; None keeps nothing. force: replace such
    runs. options: of the captures (`whence.capture`). how: arguments of `whence.compare`. Raises
    what a model raises, with the side it was on; UsageError, CaptureError, OutputExists,
    StoreFailed, UnreadableRun.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="whence-parity-") as scratch:
            return parity(model_a, model_b, inputs, scratch, force=True, options=options, **how)
    place, each = Path(folder), {"force": force, **(options or {})}
    runs = _captured((model_a, model_b), (inputs, inputs), place, each)
    return compare(*runs, output=place / COMPARED, force=force, **how)


def _captured(
    models: Sequence[Any], inputs: Sequence[Any], place: Path, options: dict[str, Any]
) -> list[Path]:
    """The runs of both models: captured below `place`, or opened when a path is given."""
    from whence.workflows.capture.capture import capture
    from whence.workflows.feeding import called

    runs = []
    for side, model, values in zip((REFERENCE, TARGET), models, inputs, strict=True):
        if isinstance(model, (str, os.PathLike)):
            runs.append(Path(model))
            continue
        runs.append(place / side)
        with capture(model, runs[-1], **options):
            try:
                called(model, values)
            # any exception of the user's model is raised again, with a note that names the model
            except Exception as error:
                error.add_note(
                    f"whence: raised by the {side} model, {type(model).__name__}, on the inputs "
                    "given"
                )
                raise
    return runs
