"""What decides beside its arguments what a module runs: its class, and what it holds.

Modules of which all that is alike run the same operators on tensors of their own, as the layers of
a model do. A tensor is alike by dtype, shape and place, an object that is no plain value only if it
is the very same one.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch

Code = tuple[Any, ...]

_PLAIN = (type(None), bool, int, str, torch.dtype, torch.device)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_MOST = 64  # values in a list of a module that are looked at
_OF_FILES = ("_state_dict", "_load_state_dict")  # what only saving and loading asks


def code_of(module: Any) -> Code | None:
    """Equal for two modules that run the same; None for a module of which that cannot be told: one
    with hooks, of more than two levels, compiled, or that holds one tensor twice.
    """
    children = [child for child in module._modules.values() if child is not None]
    if any(child._modules for child in children):
        return None
    try:
        return _Likeness().of_module(module, is_called=True)
    except (_UnlikeAnyError, TypeError, RuntimeError):  # of a tensor without memory, an object
        # without weak references
        return None


class _UnlikeAnyError(Exception):
    """There is no telling what this module runs."""


class _Likeness:
    """The likeness of what one module holds. It knows the tensors that were met."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def of_module(self, module: Any, *, is_called: bool = False) -> Code:
        """is_called: its `training` is of the call's signature."""
        if isinstance(module, torch.jit.ScriptModule):
            raise _UnlikeAnyError
        held = []
        for name, value in vars(module).items():
            if name.startswith(_OF_FILES) or (is_called and name == "training"):
                continue
            if "hooks" in name and value:
                raise _UnlikeAnyError
            held.append((name, self.of(value)))
        return (type(module), *held)

    def of(self, value: Any) -> Any:
        """The likeness of one value."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)  # 0.0 is no -0.0
        if kind in _TENSORS:
            return self._of_tensor(value)
        if isinstance(value, torch.nn.Module):
            return self.of_module(value)
        if kind in (tuple, list, set, dict, OrderedDict):
            if len(value) > _MOST:
                raise _UnlikeAnyError
            items = value.items() if isinstance(value, dict) else value
            return kind, tuple([self.of(item) for item in items])
        if isinstance(value, torch.Tensor):
            raise _UnlikeAnyError
        return _VerySame(value)

    def _of_tensor(self, tensor: Any) -> Code:
        address = tensor.data_ptr()
        if address in self._addresses and address:
            raise _UnlikeAnyError
        self._addresses.add(address)
        return (
            type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device,
            tensor.requires_grad, tensor.is_inference(),
        )  # fmt: skip


class _VerySame:
    """Equal to another one of the same object, while that lives; it does not keep it alive."""

    def __init__(self, value: Any) -> None:
        self._ref, self._hash = weakref.ref(value), id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, across: object) -> bool:
        value = self._ref()
        return value is not None and isinstance(across, _VerySame) and across._ref() is value
