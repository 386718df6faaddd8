"""Tensors in whatever a module returns, by the slot names of the capture, and the same with other tensors in their places."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from whence.frameworks.torch_trees import NESTING, SIMPLE


def rebuilt(out: Any, put: Callable[[str, Any], Any]) -> Any:
    """What a call returned with `put(slot, tensor)` in the place of each tensor; slots are named as the capture names them.

    Containers are new ones of the same class, nothing that was returned is written. Caches and other plain objects stay.
    """
    if isinstance(out, (list, tuple, dict)) or (dataclasses.is_dataclass(out) and not isinstance(out, type)):
        return _rebuilt(out, "output", put)
    return _rebuilt(out, "output.0", put)


def _rebuilt(value: Any, slot: str, put: Callable[[str, Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return put(slot, value)
    if value is None or isinstance(value, SIMPLE) or slot.count(".") > NESTING:
        return value
    if isinstance(value, dict):
        items = {k: _rebuilt(v, f"{slot}.{k if isinstance(k, SIMPLE) else type(k).__name__}", put) for k, v in value.items()}
        if all(items[k] is value[k] for k in items):
            return value
        made = copy.copy(value)
        for k, v in items.items():
            made[k] = v
        return made
    if isinstance(value, (list, tuple)):
        parts = [_rebuilt(v, f"{slot}.{i}", put) for i, v in enumerate(value)]
        if all(new is old for new, old in zip(parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        whole: Any = value
        made = copy.copy(whole)
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            object.__setattr__(made, field.name, _rebuilt(old, f"{slot}.{field.name}", put))
        return made
    return value
