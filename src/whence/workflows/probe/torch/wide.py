"""A module run in float64, whatever dtypes its code asks for."""

from __future__ import annotations

from typing import Any

import torch

from whence.replay.module_arithmetic import Arithmetic


class Wide(Arithmetic):
    """`Arithmetic` in float64, with what torch has in lower precision alone written out."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(torch.float64, False, notes, ())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            return _grouped(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _grouped(
    a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Products of groups of rows of `a` (offs: where each ends) with a matrix of `b` each."""
    if a.ndim != 2 or b.ndim != 3 or offs is None or bias is not None:
        raise NotImplementedError("grouped product of this form in float64")
    out = a.new_zeros(a.shape[0], b.shape[2])
    start = 0
    for group, stop in enumerate(offs.tolist()):
        out[start:stop] = a[start:stop] @ b[group]
        start = stop
    return out
