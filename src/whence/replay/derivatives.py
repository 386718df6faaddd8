"""Torch's own derivatives of operators that autograd recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from whence.errors import ReplayRefused


def gradients_of(
    results: Sequence[Any], incoming: Sequence[Any], wanted: Sequence[Any]
) -> list[Any]:
    """Returns the gradients of `wanted`, given the incoming gradients of `results`. Raises
    ReplayRefused when one of `wanted` receives no gradient.
    """
    pairs = [(r, g.to(r.dtype)) for r, g in zip(results, incoming) if r.requires_grad]
    if not pairs:
        raise ReplayRefused("no gradient reaches what is to be differentiated")
    computed = torch.autograd.grad(
        [result for result, _ in pairs],
        wanted,
        [gradient for _, gradient in pairs],
        allow_unused=True,
    )
    if any(gradient is None for gradient in computed):
        raise ReplayRefused("a gradient does not reach an input or a parameter")
    return list(computed)


def longest_sum(results: Sequence[Any], incoming: Sequence[Any]) -> int:
    """Returns the largest number of terms that one element of a gradient is summed from, estimated
    as the longest row or column of the incoming gradients.
    """
    summed = [g for r, g in zip(results, incoming) if r.requires_grad and g.dim()]
    lengths = [n for g in summed for n in (g.shape[-1], g.numel() // max(1, g.shape[-1]))]
    return max(lengths, default=1)
