"""Runs a model in float64 throughout: where its code requests float32, it receives float64.

The difference between two implementations of one formula shrinks 2^29-fold from float32 to float64;
the difference between two formulas stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def widened(value: Any) -> Any:
    """The same tensors in float64, in tuples, lists and dicts."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: widened(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(widened(inner) for inner in value)
    return value


@contextlib.contextmanager
def everything_in_float64() -> Iterator[None]:
    """Run the block in float64; conversions to float32 inside it are overruled."""
    import torch
    from torch.overrides import TorchFunctionMode

    narrow = {torch.float32, torch.float16, torch.bfloat16, torch.get_default_dtype()}

    def wide(argument: Any) -> Any:
        return (
            torch.float64 if isinstance(argument, torch.dtype) and argument in narrow else argument
        )

    class Widening(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self,
            called: Callable[..., Any],
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            if called in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
                return args[0].double()
            kept = {name: wide(value) for name, value in (kwargs or {}).items()}
            return called(*map(wide, args), **kept)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widening():
            yield
    finally:
        torch.set_default_dtype(before)
