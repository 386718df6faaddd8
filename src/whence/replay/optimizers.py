"""Runs one step of one of torch's optimisers on one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from whence.errors import ReplayRefused

_HOW = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
"""How an optimiser goes about its step; what it computes is the same."""


def optimizer_step(
    name: str,
    parameter: Any,
    gradient: Any,
    names: Sequence[str],
    state: Sequence[Any],
    left: Sequence[str],
    **hyper_parameters: Any,
) -> list[Any]:
    """[the parameter, *its state] after one step, by torch's own code, parameter by parameter.

    name: class in `torch.optim`. names, state: what the optimiser keeps of the parameter. left:
    names of the state to return. All tensors are in the dtype of the run; none is written. Raises
    ReplayRefused where this release of torch has no such optimiser or argument.
    """
    kind = getattr(torch.optim, name, None)
    if kind is None:
        raise ReplayRefused(f"torch {torch.__version__} has no optimiser {name}")
    taken = inspect.signature(kind.__init__).parameters
    unknown = [key for key in hyper_parameters if key not in taken]
    if unknown:
        raise ReplayRefused(f"{name} of torch {torch.__version__} takes no {unknown[0]}")
    how = {key: value for key, value in _HOW.items() if key in taken}
    updated = torch.nn.Parameter(parameter.detach().clone())
    updated.grad = gradient.detach().to(updated.dtype).clone()
    with torch.enable_grad():
        optimizer = kind([updated], **hyper_parameters, **how)
        optimizer.state[updated] = {key: t.clone() for key, t in zip(names, state)}
        optimizer.step()
    after = optimizer.state[updated]
    missing = [key for key in left if not isinstance(after.get(key), torch.Tensor)]
    if missing:
        raise ReplayRefused(f"{name} of torch {torch.__version__} leaves no {missing[0]}")
    return [updated.detach(), *(after[key] for key in left)]
