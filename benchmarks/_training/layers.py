"""Layers that are put into models: written as users write them, right or wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class _SiLU(torch.autograd.Function):
    """x * sigmoid(x) with its gradient by hand. wrong: what is wrong with it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wrong: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.wrong = wrong
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        share = torch.sigmoid(x)
        slope = x * share * (1 - share)
        if ctx.wrong == "term":
            return gradient * share, None
        if ctx.wrong == "sign":
            slope = -slope
        if ctx.wrong == "scale":
            return gradient * (share + slope) * 1.05, None
        return gradient * (share + slope), None


class CustomSiLU(nn.Module):
    """An activation with a backward pass of its own."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(x)."""
        return _SiLU.apply(x, self.wrong)


class FixedDropout(nn.Module):
    """Dropout with always the same mask. scale: what is left is times this."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.register_buffer("mask", torch.rand(width, generator=draw) > 0.1)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The elements of x that are kept, scaled."""
        return x * self.mask * self.scale


class Behind(nn.Module):
    """A layer and one behind it."""

    def __init__(self, layer: nn.Module, behind: nn.Module) -> None:
        super().__init__()
        self.layer, self.behind = layer, behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both, one after the other."""
        return self.behind(self.layer(x))


class Detached(nn.Module):
    """A layer whose input gets no gradient from it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer, of x without its history."""
        return self.layer(x.detach())


class LowNorm(nn.Module):
    """A norm that computes in bfloat16, weight and all."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, getattr(norm, "variance_epsilon", 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm."""
        low = x.to(torch.bfloat16)
        share = torch.rsqrt(low.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.to(torch.bfloat16) * (low * share)).to(x.dtype)


def swap(model: nn.Module, name: str, change: Callable[[nn.Module], nn.Module]) -> None:
    """Put a changed module in the place of one."""
    above, _, last = name.rpartition(".")
    owner = model.get_submodule(above)
    setattr(owner, last, change(getattr(owner, last)))
