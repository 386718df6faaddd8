"""Inspects a module without running it: the direction of casts in its code, what its code refers
to, and which tensors it holds.
"""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

_BLOCK_CACHE_BYTES = 64 << 20


def cast_way(frame: Any) -> str:
    """Direction of the cast at the current instruction of `frame`: "up" for `.to(torch.float32)`,
    "back" for `.to(x.dtype)`, "" where a variable holds the dtype.
    """
    return _way_at(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _way_at(code: CodeType, last: int) -> str:
    attributes: list[Any] = []
    for instruction in dis.get_instructions(code):
        if instruction.offset >= last:
            break
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            attributes = (
                [] if instruction.argval in ("to", "type") else [*attributes, instruction.argval]
            )
    if "float32" in attributes or "float" in attributes:
        return "up"
    return "back" if "dtype" in attributes else ""


def asks_for_listeners(module: Any) -> bool:
    """Whether the module's forward itself calls `has_torch_function` (nn.MultiheadAttention does,
    to choose its fast path).

    Such code takes another path while a torch-function mode is active; record it with
    `casts=False`.
    """
    return "has_torch_function" in _names(module)


def compiled_inside(module: Any) -> str:
    """Name of a compiled function or module that the module's forward refers to, "" when none is
    found.

    A dispatch mode around compiled code silently makes it eager, so such a module is not recorded.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return type(module).__name__
    forward = getattr(type(module).forward, "__wrapped__", type(module).forward)
    reachable = getattr(forward, "__globals__", {})
    for name in _names(module):
        # its modules are calls of their own
        for value in (reachable.get(name), module.__dict__.get(name)):
            if hasattr(value, "_torchdynamo_orig_callable") or isinstance(
                value, torch.jit.ScriptFunction
            ):
                return name
    return ""


def _names(module: Any) -> tuple[str, ...]:
    forward: Callable[..., Any] | None = module.__dict__.get("forward") or getattr(
        type(module), "forward", None
    )
    forward = getattr(forward, "__func__", forward)
    forward = getattr(forward, "__wrapped__", forward)
    code = getattr(forward, "__code__", None)
    return code.co_names if code is not None else ()


def is_block_cache(name: str, value: Any) -> bool:
    """Whether this plain attribute is the memory in which an inference engine keeps keys and values
    of all requests.
    """
    parts = (
        [value]
        if isinstance(value, torch.Tensor)
        else value
        if isinstance(value, (list, tuple))
        else []
    )
    return (
        "cache" in name
        and sum(t.numel() * t.element_size() for t in parts if isinstance(t, torch.Tensor))
        >= _BLOCK_CACHE_BYTES
    )


def tensors_of(module: Any) -> list[tuple[str, Any]]:
    """(slot, tensor) of everything a leaf module holds: parameters, buffers and plain attributes,
    also those of children that it does not call.

    Slots: "param.weight", "param.out_proj.weight", "param.scale" for a plain attribute
    `self.scale`, "param.tables.0" in a list or dict. The block cache of an inference engine is left
    out: it is no parameter, and takes up all memory that was free.
    """
    named = [
        (f"param.{name}", tensor)
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers())
    ]
    for name, value in module.__dict__.items():
        if (name.startswith("_") and name != "_flat_weights") or is_block_cache(name, value):
            continue
        if isinstance(value, torch.Tensor):
            named.append((f"param.{name}", value))
        elif isinstance(value, dict):
            named += [
                (f"param.{name}.{key}", item)
                for key, item in value.items()
                if isinstance(item, torch.Tensor)
            ]
        elif isinstance(value, (list, tuple)):
            named += [
                (f"param.{name}.{key}", item)
                for key, item in enumerate(value)
                if isinstance(item, torch.Tensor)
            ]
    return named
