"""Programs that torch.compile computes wrongly, silently, on a processor: rebuilt from public
threads of pytorch, each with the stage where it goes wrong and what names the operator or its line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Bug:
    """A program and where it goes wrong.

    thread: number of the public thread. stage: of the compiler. place: what names the operator or
    the line, a pattern.
    """

    thread: int
    program: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    stage: str
    place: str


def unsigned_abs(x: torch.Tensor) -> torch.Tensor:
    y = -x.abs()
    return torch.cat([y, y]).sum()


def unsigned_any(x: torch.Tensor) -> torch.Tensor:
    return torch.any(x) * 200 + 100


def int8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b)


def written_through_dropout(x: torch.Tensor) -> torch.Tensor:
    y = nn.functional.dropout(x, 0.5, False)
    y += y
    return y


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


def custom_gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda z: _NoGradient.apply(z).sum())(x)


class _Held:
    hidden = torch.tensor(0.0)


@torch.compiler.nested_compile_region
def _region() -> torch.Tensor:
    return _Held.hidden + 1


def region_of_a_global(hidden: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        _Held.hidden = hidden
        hidden = _region()
    return hidden


def int16_abs(x: torch.Tensor) -> torch.Tensor:
    return torch.abs(x).to(torch.int32)


BUGS = (
    Bug(187018, unsigned_abs, lambda: (torch.tensor([200, 200], dtype=torch.uint8),),
        "inductor", "abs"),
    Bug(198081, unsigned_any, lambda: (torch.tensor([[0, 3], [0, 0]], dtype=torch.uint8),),
        "inductor", "any"),
    Bug(191308, int8_product,
        lambda: (torch.ones((1, 1, 2), dtype=torch.int8), torch.ones((1, 2, 2), dtype=torch.int8)),
        "inductor", "matmul"),
    Bug(195422, written_through_dropout, lambda: (torch.ones(2, 2),),
        "dynamo|aot_autograd", "dropout"),
    Bug(193279, custom_gradient, lambda: (torch.arange(4.0),), "dynamo", "zeros_like"),
    Bug(191821, region_of_a_global, lambda: (torch.tensor(0.0),), "dynamo",
        r"_Held.hidden \+ 1|_region"),
    Bug(187018, int16_abs, lambda: (torch.tensor([15, -32768], dtype=torch.int16),),
        "inductor", "abs"),
)  # fmt: skip
