"""A copy of a module of the user that shares no tensor with it, and where its tensors hang."""

from __future__ import annotations

import copy
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch

from whence.errors import ReplayRefused


def copied_module(module: Any) -> tuple[Any, dict[int, Any]]:
    """(a copy that shares the tensors with the module, by the id of each module below it its
    copy).
    """
    memo: dict[int, Any] = {}
    parts = list(module.modules())
    for part in parts:
        for box in (part._parameters, part._buffers, vars(part)):
            for value in box.values():
                inner = (
                    value.values()
                    if isinstance(value, dict)
                    else value
                    if isinstance(value, (list, tuple))
                    else (value,)
                )
                memo.update((id(t), t) for t in inner if isinstance(t, torch.Tensor))
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:  # a module may hold anything
        raise ReplayRefused(
            f"the model's {type(module).__name__} cannot be copied: {type(error).__name__}: "
            f"{str(error)[:200]}"
        ) from error
    copies = {id(part): memo[id(part)] for part in parts if id(part) in memo}
    for part in copies.values():
        for name, value in list(vars(part).items()):
            # `self.core = torch.compile(self.plain)` is bound to the module itself and is not
            # copied with it.
            plain = getattr(value, "_torchdynamo_orig_callable", None)
            if isinstance(plain, types.MethodType) and id(plain.__self__) in copies:
                vars(part)[name] = types.MethodType(plain.__func__, copies[id(plain.__self__)])
    return copied, copies


def find_tensor(module: Any, name: str) -> tuple[Any, Any] | None:
    """(box, key) of the tensor called `name`: a module's own, of a module below, a plain attribute,
    or within one ("tables.0").
    """
    for box in (module._parameters, module._buffers, vars(module)):
        if isinstance(box.get(name), torch.Tensor):
            return module, name
    head, _, inner = name.partition(".")
    if inner and module._modules.get(head) is not None:
        return find_tensor(module._modules[head], inner)
    inside = vars(module).get(head)
    if isinstance(inside, tuple):
        inside = vars(module)[head] = list(inside)
    if (
        isinstance(inside, list)
        and inner.isdigit()
        and int(inner) < len(inside)
        and isinstance(inside[int(inner)], torch.Tensor)
    ):
        return inside, int(inner)
    if isinstance(inside, dict):
        return next(
            (
                (inside, key)
                for key, item in inside.items()
                if str(key) == inner and isinstance(item, torch.Tensor)
            ),
            None,
        )
    return None


def get_at(box: Any, key: Any) -> Any:
    return getattr(box, key) if isinstance(box, torch.nn.Module) else box[key]


def set_at(box: Any, key: Any, value: Any) -> None:
    # A module is told: an LSTM keeps its weights in a list too.
    if isinstance(box, torch.nn.Module):
        setattr(box, key, value)
    else:
        box[key] = value


def hidden_tensors(
    module: Any, recorded: Collection[tuple[int, Any]]
) -> Iterator[tuple[Any, Any, Any]]:
    """(box, key, tensor) of attributes that no capture sees: they are the user's model's own."""
    for part in module.modules():
        for name, value in vars(part).items():
            if (
                isinstance(value, torch.Tensor)
                and (id(part), name) not in recorded
                and value.device.type != "meta"
            ):
                yield part, name, value


def addresses(model: Any) -> frozenset[int]:
    """Where the elements of a model's parameters and buffers lie."""
    tensors = (
        t
        for t in (*model.parameters(), *model.buffers())
        if t.device.type == "cpu" and not torch.nn.parameter.is_lazy(t)
    )
    return frozenset(t.data_ptr() for t in tensors) - {0}
