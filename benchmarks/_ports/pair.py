"""What a port is: a model, the same model written anew, and faults that the second can have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

LAYER = 1
"""The layer that has a planted fault."""


@dataclass
class Pair:
    """Two models that compute the same, and what both are called with.

    drive: runs a model on the inputs, with a fault by name, and returns what both must agree in.
    """

    reference: nn.Module
    port: nn.Module
    inputs: tuple[Tensor, ...]
    drive: Callable[[nn.Module, tuple[Tensor, ...], str], Sequence[Tensor]]

    def to(self, dtype: torch.dtype) -> Pair:
        """The same pair in another dtype; integers stay."""
        inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in self.inputs)
        return Pair(self.reference.to(dtype), self.port.to(dtype), inputs, self.drive)


@dataclass(frozen=True)
class Port:
    """build: makes the pair in float32, with a fault of the port by name or "" for none. faults:
    by name what has to be named: modules of the reference, one space apart, "." for all of it, "*"
    for any. trains:
    whether its drive trains. like: where its name differs, the port that it trains.
    """

    name: str
    build: Callable[[str], Pair]
    faults: Mapping[str, str] = field(default_factory=dict)
    trains: bool = False


class Ported(nn.Module):
    """A model written anew."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def has(self, fault: str, layer: int = LAYER) -> bool:
        """Whether a fault is planted in a layer."""
        return self.fault == fault and layer == LAYER


def forward(model: nn.Module, inputs: tuple[Tensor, ...], fault: str) -> Sequence[Tensor]:
    """One forward pass."""
    out = model(*inputs)
    if isinstance(out, Tensor):
        return (out,)
    return tuple(out) if isinstance(out, tuple) else (out.logits,)


def parameter(tensor: Tensor) -> nn.Parameter:
    """A parameter of its own with these numbers."""
    return nn.Parameter(tensor.detach().clone())


def parameters(tensors: Sequence[Tensor]) -> nn.ParameterList:
    """One for each tensor."""
    return nn.ParameterList(parameter(tensor) for tensor in tensors)


def own(module: nn.Module) -> nn.Module:
    """A module of its own with these numbers."""
    return copy.deepcopy(module)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A product with these numbers."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    module.weight = parameter(weight)
    if bias is not None:
        module.bias = parameter(bias)
    return module


def stacked(*modules: nn.Linear) -> nn.Linear:
    """Several products of one input as one."""
    biases = [m.bias for m in modules if m.bias is not None]
    return linear(torch.cat([m.weight for m in modules]), torch.cat(biases) if biases else None)


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model, ready to run, with numbers that no fault can hide behind: no vector is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.rand(tensor.shape, generator=generator)
            if tensor.ndim > 1:
                spread = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(
                    spread / (tensor.shape[-1] if tensor.ndim == 3 else tensor[0].numel()) ** 0.5
                )
            else:
                tensor.copy_(noise * 0.4 + (-0.2 if "bias" in name else 0.8))
    return model.eval()


def whole(*shape: int, below: int, seed: int = 1) -> Tensor:
    """Whole numbers, drawn evenly."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 1) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
