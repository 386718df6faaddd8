"""Controls the dtypes in which a user's module computes while it runs in a wider dtype."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whence.errors import ReplayRefused
from whence.frameworks.torch_arrays import tensors_in
from whence.replay import stepwise as written_out
from whence.replay.dtype_policy import HALF


class Arithmetic(TorchDispatchMode):  # type: ignore[misc]
    """Intercepts every operator: widens the dtypes that the code requests, and may write fused
    operators out step by step.

    forbidden: addresses of tensors that no operator may read. length: the largest number of terms
    that one element was summed from.
    """

    def __init__(
        self, wide: Any, stepwise: bool, notes: list[str], forbidden: Collection[int]
    ) -> None:
        super().__init__()
        self._wide, self._stepwise, self._notes, self._forbidden, self.length = (
            wide,
            stepwise,
            notes,
            forbidden,
            1,
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        base = func._schema.name.partition("::")[2]
        for tensor in tensors_in([*args, *kwargs.values()]):
            # mm of a CPU tensor and a meta tensor gives uninitialised memory and no error.
            if tensor.device.type == "meta":
                raise ReplayRefused(
                    "it uses a weight of a module below it without calling that module"
                )
            if tensor.data_ptr() in self._forbidden:
                raise ReplayRefused(
                    "it reads the model's own weights past what it holds (a closure?)"
                )
        if base != "view":  # view.dtype reads the same bits as another dtype
            args = tuple(self._dtype(a) for a in args)
            kwargs = {name: self._dtype(value) for name, value in kwargs.items()}
        named = (
            dict(zip((a.name for a in func._schema.arguments if not a.kwarg_only), args)) | kwargs
        )
        self.length = max(self.length, written_out.reduction_length(base, named))
        table = (
            written_out.WRITTEN_OUT
            if self._stepwise
            else written_out.WIDE
            if self._wide is torch.float64
            else {}
        )
        if func.namespace == "aten" and base in table:
            results = table[base](named)
            count = len(func._schema.returns)
            return results[0] if count == 1 else (*results, *[None] * (count - len(results)))
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if func._schema.is_mutable:
                raise
            return self._in_float32(func, args, kwargs, error)

    def _dtype(self, value: Any) -> Any:
        if self._wide is None or not isinstance(value, torch.dtype):
            return value
        if self._wide is torch.float64 and value.is_complex:
            return torch.complex128
        narrow = value in HALF or (self._wide is torch.float64 and value.is_floating_point)
        return self._wide if narrow else value

    def _in_float32(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Runs one operator that has no kernel for this dtype in float32, and converts its results
        back to the dtype of its operands.
        """
        floats = {t.dtype for t in tensors_in([*args, *kwargs.values()]) if t.is_floating_point()}
        if len(floats) != 1 or torch.float32 in floats:
            raise error
        dtype = floats.pop()

        def to(value: Any, old: Any, new: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(new) if value.dtype is old else value
            if isinstance(value, (list, tuple)):
                return type(value)(to(item, old, new) for item in value)
            return value

        try:
            out = func(
                *to(args, dtype, torch.float32),
                **{k: to(v, dtype, torch.float32) for k, v in kwargs.items()},
            )
        except (RuntimeError, NotImplementedError):
            raise error from None
        text = f"{func} in float32: {str(error).splitlines()[0][:200]}"
        if text not in self._notes:
            self._notes.append(text)
        return to(out, torch.float32, dtype)
