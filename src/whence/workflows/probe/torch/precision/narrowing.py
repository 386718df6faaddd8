"""Modules that compute in a narrower type while everything around them stays as it is.

bfloat16, float16: the module runs in this dtype. Its parameters, buffers and floating-point inputs
are rounded to it, its kernels compute in it, and its results are brought back to its own dtype.

float8_e4m3fn, int8: the weight and the input take the values that they have in the type, and
products of these are computed in the module's own dtype, in which biases, sums and results stay
too, as in a kernel that adds up in float32. Values are divided by a scale (largest magnitude / 448,
/ 127), rounded and multiplied again. float8 has one scale for each tensor; int8 one for each output
channel of the weight, and one for the input of each call. Of an embedding only the weight is
rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from whence.errors import UsageError
from whence.results.precision import NARROW_TYPES
from whence.workflows.probe.torch.precision.units import products

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}


def check_type(name: str) -> None:
    """Raise UsageError for a type to which modules cannot be narrowed."""
    if name not in NARROW_TYPES:
        raise UsageError(
            f"no module is narrowed to {name!r}; give one of {', '.join(NARROW_TYPES)}"
        )


def unfit(module: Any, to: str) -> str:
    """The reason why a module cannot be narrowed to a type, "" when it can."""
    own = own_dtype(module)
    if own is None:
        return "it has no floating-point parameters"
    if to in HALF:
        return f"it is in {_name(own)} already" if torch.finfo(own).bits <= 16 else ""
    if not list(products(module)):
        return f"{type(module).__name__} is not a product of an input with a weight"
    return ""


def own_dtype(module: Any) -> Any:
    """The dtype of a module's first floating-point parameter, None without one."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


class Narrowed:
    """Lets modules of a model compute in narrower types until `remove` is called or a `with` block
    ends.

    types: path -> type. The model's own tensors are unchanged, so tied weights of other modules
    keep their values. Raises UsageError for a path that the model lacks, or a module that cannot be
    narrowed.
    """

    def __init__(self, model: Any, types: Mapping[str, str]) -> None:
        modules = dict(model.named_modules())
        self._handles: list[Any] = []
        for path, to in types.items():
            check_type(to)
            if path not in modules:
                raise UsageError(f"{type(model).__name__} has no module {path!r}")
            if why := unfit(modules[path], to):
                raise UsageError(f"{path} cannot be narrowed to {to}: {why}")
        for path, to in types.items():
            self._handles += _narrow(modules[path], to)

    def remove(self) -> None:
        """Restore the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Narrowed:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def _narrow(module: Any, to: str) -> list[Any]:
    """Hooks that give a module its narrower tensors for the duration of a call."""
    own = own_dtype(module)
    lent = _in_half(module, HALF[to]) if to in HALF else _in_eight_bits(module, to)
    into, out_of = _casts(module, own, to)
    stack: list[contextlib.ExitStack] = []

    def enters(module: Any, args: Any, kwargs: Any) -> Any:
        calls = contextlib.ExitStack()
        calls.enter_context(_swapped(lent))
        stack.append(calls)
        return tree_map(into, args), tree_map(into, kwargs)

    def leaves(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        if stack:
            stack.pop().close()
        return tree_map(out_of, out)

    return [
        module.register_forward_pre_hook(enters, with_kwargs=True),
        module.register_forward_hook(leaves, with_kwargs=True, always_call=True, prepend=True),
    ]


_Lent = list[tuple[Any, str, Any]]
"""(module, name, tensor to put there) of parameters and buffers."""


@contextlib.contextmanager
def _swapped(lent: _Lent) -> Iterator[None]:
    before = [(part, name, getattr(part, name)) for part, name, _ in lent]
    try:
        for part, name, value in lent:  # a module is told: an LSTM keeps its weights in a list too
            setattr(part, name, value)
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


def _in_half(module: Any, dtype: Any) -> _Lent:
    return [
        (part, name, _as(value, value.detach().to(dtype)))
        for part in module.modules()
        for box in (part._parameters, part._buffers)
        for name, value in box.items()
        if value is not None and value.is_floating_point()
    ]


def _in_eight_bits(module: Any, to: str) -> _Lent:
    lent: _Lent = []
    for name, axis in products(module):
        weight = module._parameters.get(name)
        if weight is None:  # made by a parametrization
            continue
        per_channel = axis if to == "int8" else None
        lent.append((module, name, _as(weight, rounded(weight.detach(), to, per_channel))))
    return lent


def _as(old: Any, new: torch.Tensor) -> Any:
    return (
        torch.nn.Parameter(new, requires_grad=False) if isinstance(old, torch.nn.Parameter) else new
    )


def rounded(tensor: torch.Tensor, to: str, axis: int | None = None) -> torch.Tensor:
    """The values of a tensor rounded to an 8-bit type, in the tensor's dtype.

    axis: each index along it has its own scale; None uses one scale for the whole tensor. The scale
    maps the largest magnitude to the largest number of the type; a tensor of zeros is unchanged.
    """
    wide = tensor.float() if tensor.dtype != torch.float64 else tensor
    axes = (
        [n for n in range(wide.dim()) if n != axis] if axis is not None else list(range(wide.dim()))
    )
    most = wide.abs().amax(axes, keepdim=True) if wide.numel() else wide
    scale = torch.where(most > 0, most / _LARGEST[to], torch.ones_like(most))
    codes = wide / scale
    codes = codes.round() if to == "int8" else codes.to(torch.float8_e4m3fn).to(wide.dtype)
    return (codes * scale).to(tensor.dtype)


def _casts(module: Any, own: Any, to: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """(conversion of a module's arguments, conversion of its results)."""
    if to in HALF:
        dtype = HALF[to]
        return _to(dtype), _to(own, only=dtype)
    if isinstance(module, torch.nn.Embedding):
        return (lambda value: value), (lambda value: value)
    return (lambda value: rounded(value, to) if _is_float(value) else value), (lambda value: value)


def _to(dtype: Any, only: Any = None) -> Callable[[Any], Any]:
    def cast(value: Any) -> Any:
        if not _is_float(value) or (only is not None and value.dtype != only):
            return value
        return value.to(dtype)

    return cast


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
