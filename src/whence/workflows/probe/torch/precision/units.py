"""The modules that are measured: those with weights of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.leaf_calls import leaf_calls
from whence.workflows.probe.torch.subject import Subject


class Unit(NamedTuple):
    """A module that runs as a whole in one type.

    path: in the model. parameters: number of its parameters.
    """

    path: str
    module: Any
    parameters: int

    @property
    def op_type(self) -> str:
        """The name of its class."""
        return type(self.module).__name__


def units(subject: Subject, inputs: CallInputs) -> list[Unit]:
    """The innermost modules with parameters that this call runs, in the order of their first call.

    A module counts when no module below it that runs has parameters. Raises what the model raises.
    """
    modules = dict(subject.model.named_modules())
    called = {
        name: modules[name]
        for name in leaf_calls(subject, inputs).order
        if any(True for _ in modules[name].parameters())
    }
    inner = {path for path in called if not any(_below(other, path) for other in called)}
    return [
        Unit(path, module, sum(p.numel() for p in module.parameters()))
        for path, module in called.items()
        if path in inner
    ]


def _below(path: str, above: str) -> bool:
    return path != above and path.startswith(f"{above}." if above else "")


def products(module: Any) -> Iterator[tuple[str, int]]:
    """(name, axis of output channels) of the weights that a module multiplies its input with.

    Only for modules that do nothing else; 8-bit types are simulated for them. Empty for others.
    """
    nn = torch.nn
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        yield "weight", 0
    elif isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        yield "weight", 1
    elif isinstance(module, nn.Embedding):
        yield "weight", 0
    elif type(module).__name__ == "Conv1D" and "nf" in vars(module):  # a linear layer of GPT-2
        yield "weight", 1
