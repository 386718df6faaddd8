"""Runs a module in float64, whatever dtypes its code requests."""

from __future__ import annotations

from typing import Any

import torch

from whence.replay import stepwise
from whence.replay.module_arithmetic import Arithmetic


class Wide(Arithmetic):
    """`Arithmetic` in float64, with replacements for operators that torch has only in lower
    precision.
    """

    def __init__(self, notes: list[str]) -> None:
        super().__init__(torch.float64, False, notes, ())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            named = dict(zip(("self", "mat2", "offs", "bias"), args, strict=False))
            return stepwise.grouped_product(named | (kwargs or {}))[0]
        return super().__torch_dispatch__(func, types, args, kwargs)
