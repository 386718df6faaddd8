"""Two models on one input, captured and compared in one call: `whence.auto_diff`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.errors import UsageError
from whence.results import Comparison, Status

if TYPE_CHECKING:
    from whence.results import Comparison


class Difference(Comparison, frozen=True):
    """A Comparison that is true where the two are the same, as `status` says it: "same"; false when
    different or undecided.
    """

    def __bool__(self) -> bool:
        return self.status == Status.SAME


def auto_diff(
    model_a: Any,
    model_b: Any,
    inputs: Any,
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    capture: dict[str, Any] | None = None,
    **options: Any,
) -> Difference:
    """Run two models on the same inputs, compare everything they compute, print the answer and
    return it; it is true if they are the same.

        assert whence.auto_diff(paddle_layer, torch_module, {"x": x})

    model_a (the reference), model_b (the target): torch modules or Paddle layers, with their
    weights and modes as they are. inputs: a dict of keyword arguments, a tuple or list of
    arguments, or one tensor, which both get, each in its framework, on its device; or a pair of two
    dicts or two tuples, one for each model. Tensors may be torch, Paddle or numpy. output: folder
    for the comparison, with the runs in `reference` and `target` below it; None keeps nothing.
    capture: options of `whence.capture`; options: those of `whence.compare`. Only forward passes
    are compared. Raises UsageError, CaptureError, OutputExists, and what a
    model raises.
    """
    from whence.report.answer import answer
    from whence.workflows.capture.capture import capture as capturing
    from whence.workflows.compare import compare
    from whence.workflows.saved import check_output

    inputs_of_each = _each(inputs)
    folder = Path(output) if output is not None else None
    if folder is not None:
        check_output(folder, force)
    with tempfile.TemporaryDirectory(prefix="whence-") as scratch:
        place = folder or Path(scratch)
        for name, model, values in zip(
            ("reference", "target"), (model_a, model_b), inputs_of_each, strict=True
        ):
            args, kwargs = _arguments(values, _converter(model))
            with capturing(model, place / name, force=force, **(capture or {})):
                model(*args, **kwargs)
        result = compare(
            place / "reference", place / "target", output=folder, force=True, **options
        )
    sys.stdout.write(answer(result, output=str(folder) if folder is not None else ""))
    return Difference(**{name: getattr(result, name) for name in Comparison.__struct_fields__})


def _each(inputs: Any) -> tuple[Any, Any]:
    """What each of the two models is given."""
    if isinstance(inputs, (tuple, list)) and len(inputs) == 2:
        first, second = inputs
        if (isinstance(first, dict) and isinstance(second, dict)) or (
            isinstance(first, (tuple, list)) and isinstance(second, (tuple, list))
        ):
            return first, second
    return inputs, inputs


def _arguments(
    values: Any, converted: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(values, dict):
        return (), {name: converted(value) for name, value in values.items()}
    if isinstance(values, (tuple, list)):
        return tuple(converted(value) for value in values), {}
    return (converted(values),), {}


def _converter(model: Any) -> Callable[[Any], Any]:
    """A function that makes what a model takes of a tensor or array, on the model's device; what is
    neither stays as it is.
    """
    from whence.instrument import paddle as paddle_models

    if paddle_models.owns(model):
        return _to_paddle
    if not hasattr(model, "named_modules"):
        raise UsageError(
            f"auto_diff compares torch modules and Paddle layers, not a {type(model).__name__}"
        )
    device = next((tensor.device for tensor in model.parameters()), None)

    def to_torch(value: Any) -> Any:
        import torch

        from whence.frameworks import torch_arrays as adapter

        if not isinstance(value, torch.Tensor):
            array = _host(value)
            if array is None:
                return value
            value = adapter.from_host(array)
        return value if device is None else value.to(device)

    return to_torch


def _to_paddle(value: Any) -> Any:
    import paddle

    if isinstance(value, paddle.Tensor):
        return value
    array = _host(value)
    if array is None:
        return value
    if array.dtype.isbuiltin == 1:
        return paddle.to_tensor(array)
    name = array.dtype.name
    # float32 holds all numbers of 16 and 8 bits
    return paddle.to_tensor(array.astype(np.float32)).astype(name)


def _host(value: Any) -> Any:
    """A tensor or array as a host array; None for what is neither."""
    torch, paddle = sys.modules.get("torch"), sys.modules.get("paddle")
    if torch is not None and isinstance(value, torch.Tensor):
        from whence.frameworks import torch_arrays as of_torch

        return of_torch.to_host(value.detach())
    if paddle is not None and isinstance(value, paddle.Tensor):
        from whence.frameworks import paddle_arrays as of_paddle

        return of_paddle.to_host(value.detach())
    return value if isinstance(value, np.ndarray) else None


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
            # whatever the user's model raises: told which of the two it was, and raised again
            except Exception as error:
                error.add_note(
                    f"whence: raised by the {side} model, {type(model).__name__}, on the inputs "
                    "given"
                )
                raise
    return compare(runs[0], runs[1], output=place / COMPARED, force=force, **how)
