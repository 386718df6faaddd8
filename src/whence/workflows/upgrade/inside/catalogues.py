"""The models to check: the architectures of transformers, or those listed by a user's file."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from . import values

GENERATED = "generate, step "
"""What names the outputs of a generation, before the number of the step."""
_STEPS = 4


class Built(NamedTuple):
    """A model with weights and inputs.

    chosen: what another process needs to build it again. settings: its configuration. missing:
    weights that a checkpoint lacked.
    """

    model: Any
    inputs: Any
    chosen: dict[str, Any]
    settings: dict[str, Any]
    missing: tuple[str, ...] = ()


class Catalogue(Protocol):
    """Models by name."""

    def names(self) -> list[str]: ...

    def build(self, name: str, task: dict[str, Any]) -> Built: ...

    def quiet(self) -> contextlib.AbstractContextManager[None]: ...


class OfFile:
    """A file with `names() -> list of str` and `build(name) -> (model, inputs)`; inputs are a dict
    of keyword arguments or a tuple of arguments, numpy or torch.
    """

    def __init__(self, path: str) -> None:
        spec = importlib.util.spec_from_file_location("whence_catalogue", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        self._module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)

    def names(self) -> list[str]:
        return [str(name) for name in self._module.names()]

    def build(self, name: str, task: dict[str, Any]) -> Built:
        held: list[Any] = []

        def make() -> Any:
            model, inputs = self._module.build(name)
            held.append(inputs)
            return model

        model, random = values.buffers_drawn(make)
        values.fill(model, random=random, called=task.get("called"))
        model.eval()
        return Built(model, held[-1], {}, {})

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        yield


class OfTransformers:
    """Every architecture of the installed transformers."""

    def names(self) -> list[str]:
        from . import transformers_models

        return transformers_models.names()

    def build(self, name: str, task: dict[str, Any]) -> Built:
        from . import transformers_models

        return Built(
            *transformers_models.build(
                name, task.get("chosen"), task.get("settings"), task.get("load", "")
            )
        )

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        from . import transformers_models

        return transformers_models.quiet()


def opened(path: str) -> Catalogue:
    """The catalogue in a file; "" selects transformers."""
    return OfFile(path) if path else OfTransformers()


def run(built: Built, train: bool, wide: bool = False) -> dict[str, Any]:
    """Run a model and return its outputs by name.

    wide: in float64 throughout. train: in training mode, with the gradient of every parameter
    added. The loss is the model's own, or the sum of its outputs times fixed numbers.
    """
    from . import widening

    arguments = _as_tensors(built.inputs)
    if not wide:
        return _run(built.model, arguments, train)
    with widening.everything_in_float64():
        return _run(built.model.double(), widening.widened(arguments), train)


def _run(model: Any, arguments: Any, train: bool) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    if not train:
        with torch.no_grad():
            result = _call(model, arguments)
            generated = _generated(model, arguments)
        return {**dict(values.tensors(result)), **generated}
    model.train()
    for module in model.modules():
        if "Dropout" in type(module).__name__ and hasattr(module, "p"):
            module.p = 0.0
    if _takes_labels(model, arguments):
        arguments = {**arguments, "labels": arguments["input_ids"].clone()}
    result = _call(model, arguments)
    found = dict(values.tensors(result))
    loss = found.get("loss")
    if loss is None:
        terms = [
            (tensor * torch.from_numpy(values.drawn(name, tensor.shape)).to(tensor.dtype)).sum()
            for name, tensor in found.items()
            if tensor.requires_grad and tensor.is_floating_point()
        ]
        if not terms:
            raise ValueError("no output depends on a parameter")
        loss = torch.stack(terms).sum()
    loss.backward()
    found["loss"] = loss
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
    return found


def _generated(model: Any, arguments: Any) -> dict[str, Any]:
    """What each step of a greedy generation gives, {} of a model that does not generate: "generate,
    step 1" are the scores from which the first token is chosen.
    """
    if not isinstance(arguments, dict) or not getattr(model, "can_generate", bool)():
        return {}
    given = {name: value for name, value in arguments.items() if not name.startswith("decoder_")}
    try:
        result = model.generate(
            **given,
            max_new_tokens=_STEPS,
            min_new_tokens=_STEPS,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    except Exception:  # noqa: BLE001 - what generation asks for beyond forward is the model's affair
        return {}
    scores = getattr(result, "scores", None) or ()
    return {f"{GENERATED}{step}": held for step, held in enumerate(scores, 1)}


def _takes_labels(model: Any, arguments: Any) -> bool:
    kind = type(model).__name__
    return (
        isinstance(arguments, dict)
        and "input_ids" in arguments
        and kind.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM"))
        and "labels" in inspect.signature(model.forward).parameters
    )


def _as_tensors(inputs: Any) -> Any:
    import torch

    def tensor(value: Any) -> Any:
        return torch.from_numpy(value) if hasattr(value, "__array_interface__") else value

    if isinstance(inputs, dict):
        return {name: tensor(value) for name, value in inputs.items()}
    return tuple(tensor(value) for value in inputs)


def _call(model: Any, arguments: Any) -> Any:
    return model(**arguments) if isinstance(arguments, dict) else model(*arguments)
