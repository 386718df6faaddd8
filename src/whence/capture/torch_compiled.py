"""Could the code of a module run something compiled? Decided from the code itself, before it runs.

A dispatch mode around compiled code makes it run eagerly, or fail: where that cannot be excluded, operators are not recorded.
"""

from __future__ import annotations

import builtins
import sys
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_DEPTH = 8
_ITEMS = 1000
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device, torch.Size)
_SAFE_MODULES = ("torch", "math", "numpy", "operator", "functools", "itertools", "typing", "collections", "builtins", "einops")


def anything_compiled() -> bool:
    """Has this process compiled anything with dynamo?"""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and bool(getattr(frames, "cached_backends", None))


def may_run_compiled(module: Any) -> str:
    """The first name in the module's own code that could lead to compiled code, "" when there is none.

    Followed are its forward, the functions and methods that this calls by name, and what lies in its attributes. A name that leads
    nowhere known counts as compiled, unless it is one that tensors have.
    """
    forward = module.__dict__.get("forward") or type(module).forward
    return _suspect(forward, module, set(), 0)


def _suspect(value: Any, module: Any, seen: set[int], depth: int) -> str:
    """A name when `value`, called or used by code of `module`, may be or reach compiled code."""
    name = getattr(value, "__name__", type(value).__name__)
    if isinstance(value, (torch.jit.ScriptFunction, torch.jit.ScriptModule)) or hasattr(value, "_torchdynamo_orig_callable"):
        return name
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        if id(value) in seen or _is_safe(value.__module__):
            return ""
        seen.add(id(value))
        return name if depth >= _DEPTH else _suspect_code(value, value.__code__, module, seen, depth)
    if isinstance(value, (*_PLAIN, ModuleType)):
        return "" if not isinstance(value, ModuleType) or _is_safe(value.__name__) else name
    if isinstance(value, torch.nn.Module):
        # Its call would make this module a container, which is not recorded.
        return name if "_orig_mod" in value._modules or value._compiled_call_impl is not None else ""
    if isinstance(value, (list, tuple, dict)):
        if len(value) > _ITEMS or depth >= _DEPTH:
            return name
        held = value.values() if isinstance(value, dict) else value
        return next((found for item in held if (found := _suspect(item, module, seen, depth + 1))), "")
    kind = value if isinstance(value, type) else type(value)
    return "" if _is_safe(kind.__module__) else name


def _suspect_code(function: FunctionType, code: CodeType, module: Any, seen: set[int], depth: int) -> str:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    for name in code.co_freevars:
        cell = cells.get(name)
        try:
            found = _suspect(cell.cell_contents, module, seen, depth + 1) if cell is not None else ""
        except ValueError:  # an empty cell
            found = name
        if found and name != "__class__":
            return found
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and (found := _suspect_code(function, constant, module, seen, depth)):
            return found
    for name in code.co_names:
        known, values = _values(name, function, module)
        if not known:
            return name
        for value in values:
            if found := _suspect(value, module, seen, depth + 1):
                return found
    return ""


def _values(name: str, function: FunctionType, module: Any) -> tuple[bool, list[Any]]:
    """(is it known what this name may mean, what it may mean in this process) for code of `function` working on `module`."""
    values = [table[name] for table in (function.__globals__, vars(module), module._modules) if name in table]
    method = getattr(type(module), name, None)
    if isinstance(method, property):
        values.append(method.fget)
    elif method is not None:
        values.append(method)
    if values or name in module._parameters or name in module._buffers or hasattr(builtins, name) or hasattr(torch.Tensor, name):
        return True, values
    spaces = (torch, torch.nn, torch.nn.functional, torch.special, torch.linalg, torch.fft, torch.backends, torch.autograd)
    math = sys.modules.get("math")
    return any(hasattr(space, name) for space in (*spaces, math)), values


def _is_safe(module_name: str | None) -> bool:
    return (module_name or "").partition(".")[0] in _SAFE_MODULES
