"""Runs one step of one of torch's optimisers on one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from whence.errors import ReplayRefused
from whence.replay.allowed_operators import OPTIMIZERS


def step_alone(kind, parameter, gradient, state, **hyper_parameters):  # type: ignore[no-untyped-def]
    """(the parameter, what the optimiser keeps of it by name) after one step on it alone, by
    torch's plain code. Nothing that is handed in is written.
    """
    updated = torch.nn.Parameter(parameter.detach().clone())
    updated.grad = gradient.detach().to(updated.dtype).clone()
    with torch.enable_grad():
        optimizer = kind([updated], **hyper_parameters)
        group = optimizer.param_groups[0]
        for how in ("foreach", "fused", "capturable", "differentiable"):
            if how in group:  # what is computed is the same
                group[how] = False
        optimizer.state[updated] = {name: tensor.clone() for name, tensor in state.items()}
        optimizer.step()
    return updated.detach(), optimizer.state[updated]


def optimizer_class(name: str, hyper_parameters: Iterable[str]) -> Any:
    """Returns the class of this name in `torch.optim`, which accepts these hyper-parameters. Raises
    ReplayRefused when this release of torch lacks the optimiser or an argument.
    """
    kind = getattr(torch.optim, name, None) if name in OPTIMIZERS else None
    if kind is None:
        raise ReplayRefused(f"torch {torch.__version__} has no optimiser {name}")
    taken = inspect.signature(kind.__init__).parameters
    unknown = [key for key in hyper_parameters if key not in taken]
    if unknown:
        raise ReplayRefused(f"{name} of torch {torch.__version__} takes no {unknown[0]}")
    return kind


def optimizer_step(
    name: str,
    parameter: Any,
    gradient: Any,
    names: Sequence[str],
    state: Sequence[Any],
    left: Sequence[str],
    **hyper_parameters: Any,
) -> list[Any]:
    """Returns [the parameter, *its state] after one step of torch's own code on this parameter
    alone.

    name: class in `torch.optim`. names, state: state tensors that the optimiser keeps for the
    parameter. left: names of the state to return. All tensors are in the dtype of the run; none is
    written. Raises ReplayRefused when this release of torch lacks the optimiser or an argument.
    """
    kind = optimizer_class(name, hyper_parameters)
    updated, after = step_alone(  # type: ignore[no-untyped-call]
        kind, parameter, gradient, dict(zip(names, state)), **hyper_parameters
    )
    missing = [key for key in left if not isinstance(after.get(key), torch.Tensor)]
    if missing:
        raise ReplayRefused(f"{name} of torch {torch.__version__} leaves no {missing[0]}")
    return [updated, *(after[key] for key in left)]
