"""Follows a precision plan by plain torch: modules are replaced by copies in the narrower type. It
shares no code with what made the plan.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Cast(torch.nn.Module):
    """A module in half precision: what goes in and out is cast."""

    def __init__(self, inner: Any, dtype: Any) -> None:
        super().__init__()
        self.own = next(p.dtype for p in inner.parameters() if p.is_floating_point())
        self.inner, self.dtype = copy.deepcopy(inner).to(dtype), dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def into(x: Any) -> Any:
            return x.to(self.dtype) if torch.is_tensor(x) and x.is_floating_point() else x

        args = [tuple(map(into, a)) if type(a) is tuple else into(a) for a in args]
        out = self.inner(*args, **{k: into(v) for k, v in kwargs.items()})
        return self._back(out)

    def _back(self, out: Any) -> Any:
        if torch.is_tensor(out):
            return out.to(self.own) if out.dtype == self.dtype else out
        return type(out)(self._back(o) for o in out) if isinstance(out, tuple | list) else out

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class EightBits(torch.nn.Module):
    """A product of weights and inputs that take the values of an 8-bit type."""

    def __init__(self, inner: Any, to: str) -> None:
        super().__init__()
        self.inner, self.to_type = copy.deepcopy(inner), to
        weight = self.inner.weight.data
        if to == "int8":  # a scale for each output channel
            is_last = type(inner).__name__ == "Conv1D" or "Transpose" in type(inner).__name__
            rows = weight.transpose(0, 1) if is_last else weight
            scale = rows.flatten(1).abs().amax(1).clamp(min=1e-30) / 127
            rows = (rows / scale.view(-1, *[1] * (rows.dim() - 1))).round() * scale.view(
                -1, *[1] * (rows.dim() - 1)
            )
            weight = rows.transpose(0, 1) if is_last else rows
        else:
            weight = self._fp8(weight)
        self.inner.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)

    @staticmethod
    def _fp8(x: Any) -> Any:
        scale = x.abs().max() / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale if scale > 0 else x

    def forward(self, x: Any, *rest: Any, **named: Any) -> Any:
        if torch.is_tensor(x) and x.is_floating_point():
            scale = x.abs().max() / 127
            x = (
                self._fp8(x)
                if self.to_type != "int8"
                else (x / scale).round() * scale
                if scale > 0
                else x
            )
        return self.inner(x, *rest, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def followed(model: Any, plan: Any) -> Any:
    """A copy of a model with the plan's modules replaced."""
    mixed = copy.deepcopy(model)
    for path in plan.modules:
        inner = mixed.get_submodule(path)
        narrow = (
            Cast(inner, getattr(torch, plan.to))
            if plan.to in ("bfloat16", "float16")
            else EightBits(inner, plan.to)
        )
        narrow.training = inner.training
        if not path:
            return narrow
        parent, _, name = path.rpartition(".")
        setattr(mixed.get_submodule(parent), name, narrow)
    return mixed


def error(model: Any, mixed: Any, inputs: dict[str, Any]) -> float:
    """||y' - y|| / ||y|| of the output where it is largest."""
    with torch.no_grad():
        before, after = (list(outputs(m(**inputs))) for m in (model, mixed))
    return max(
        float((b.double() - a.double()).norm() / a.double().norm())
        for a, b in zip(before, after, strict=True)
    )


def outputs(out: Any) -> Any:
    """The tensors of floating-point numbers that a call returned, without caches."""
    if torch.is_tensor(out):
        if out.is_floating_point():
            yield out
    elif isinstance(out, dict | list | tuple):
        for value in out.values() if isinstance(out, dict) else out:
            yield from outputs(value)


CHOOSE = ("aten.topk", "aten.argmax", "aten.max.dim", "aten.gt", "aten.lt", "aten.ge", "aten.le")


class Choices(TorchDispatchMode):
    """Notes what a run chooses: experts, keys."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func).startswith(CHOOSE):
            indices = out if torch.is_tensor(out) else out[1]
            self.chosen.append(indices.sort(-1).values if "topk" in str(func) else indices)
        return out


def choices_changed(model: Any, mixed: Any, inputs: dict[str, Any]) -> int:
    """How many elements of what a model chooses are others in the mixed one."""
    lists = []
    for one in (model, mixed):
        with torch.no_grad(), Choices() as choices:
            one(**inputs)
        lists.append(choices.chosen)
    return sum(int((a != b).sum()) for a, b in zip(*lists, strict=False) if a.shape == b.shape)
