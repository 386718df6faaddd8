"""Collectives with gradients, as programs write them by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

Group = Any


def rank_in(group: Group) -> int:
    """This rank's place in a group."""
    return dist.get_rank(group)


def size_of(group: Group) -> int:
    """How many ranks a group has."""
    return dist.get_world_size(group)


def total(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over a group."""
    x = x.detach().clone().contiguous()
    dist.all_reduce(x, group=group)
    return x


def gathered(x: torch.Tensor, axis: int, group: Group) -> torch.Tensor:
    """The pieces of a group, one behind the other."""
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size_of(group))
    ]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, axis)


def piece(x: torch.Tensor, axis: int, group: Group) -> torch.Tensor:
    """This rank's piece."""
    return x.detach().chunk(size_of(group), axis)[rank_in(group)].contiguous()


Way = Callable[[torch.Tensor], torch.Tensor]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
        context.back = back
        return there(x)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return context.back(gradients[0]), None, None


def collective(x: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
    """What `there` makes of a tensor; its gradient is what `back` makes of the result's."""
    result: torch.Tensor = _Collective.apply(x, there, back)
    return result


def same(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself."""
    return x.view_as(x)


class Parallel:
    """How a program adds up and gathers over a group; faults replace parts of it."""

    def __init__(self, group: Group = None) -> None:
        self.group = group
        self.sum_up: Way = lambda x: total(x, self.group)
        self.sum_back: Way = lambda x: total(x, self.group)

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """What all ranks read: its gradient is the sum over ranks."""
        return collective(x, same, lambda g: self.sum_back(g))

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        return collective(x, lambda y: self.sum_up(y), same)


class Columns(nn.Module):
    """A Linear of which this rank has some outputs."""

    def __init__(self, whole: nn.Linear, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = nn.Parameter(piece(whole.weight, 0, parallel.group).clone())
        bias = whole.bias
        self.bias = None if bias is None else nn.Parameter(piece(bias, 0, parallel.group).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.parallel.copied(x), self.weight, self.bias)


class Rows(nn.Module):
    """A Linear of which this rank has some inputs."""

    def __init__(self, whole: nn.Linear, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = nn.Parameter(piece(whole.weight, 1, parallel.group).clone())
        self.bias = whole.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.parallel.reduced(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias
