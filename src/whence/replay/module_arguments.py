"""Arguments of a module's `forward`, rebuilt from the slots that a run recorded."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.frameworks.torch_arrays import TORCH, from_host
from whence.records import Call
from whence.replay.module_copy import copied_module

Rebuilt = Callable[[Any, Callable[[str, Any], Any]], Any]
"""(what a call returned, put) -> the same with `put(slot, tensor)` in the place of each tensor;
slots are named as in a capture.
"""


class _Fields(dict[str, Any]):
    """Values by name, read as a dict or as attributes: which of them an argument was, its slots do
    not tell.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def arguments(
    tensors: Mapping[str, Any], plain: Mapping[str, Any], forward: Callable[..., Any]
) -> tuple[list[Any], dict[str, Any]]:
    """(args, kwargs) of a call from its slots: "input.0" is the first, "input.mask" a keyword,
    "input.0.1" within a tuple.

    tensors, plain: by slot. What has no slot was None, or an object that no slot shows. Raises
    ReplayRefused when a slot is both a value and a part of one.
    """
    tree: dict[str, Any] = {}
    for slot, value in (*plain.items(), *tensors.items()):
        *path, last = slot.split(".")[1:]
        node = tree
        for step in path:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                raise ReplayRefused(
                    f"{slot}: a tensor of several parts cannot be put together again"
                )
        if last in node:
            raise ReplayRefused(f"{slot}: a tensor of several parts cannot be put together again")
        node[last] = value
    places = {int(key): _value(value) for key, value in tree.items() if key.isdigit()}
    args = [places.get(k) for k in range(max(places, default=-1) + 1)]
    kwargs = {key: _value(value) for key, value in tree.items() if not key.isdigit()}
    with contextlib.suppress(ValueError, TypeError):  # a forward without a signature
        for k, (name, parameter) in enumerate(inspect.signature(forward).parameters.items()):
            lacking = (
                k >= len(args)
                if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                else parameter.kind is parameter.KEYWORD_ONLY
            )
            if lacking and parameter.default is parameter.empty:
                kwargs.setdefault(name, None)
    return args, kwargs


def _value(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    values = {key: _value(value) for key, value in node.items()}
    if all(key.isdigit() for key in values):
        places = {int(key): value for key, value in values.items()}
        return tuple(places.get(k) for k in range(max(places) + 1))
    return _Fields(values)


def call_order(slot: str, otherwise: int) -> int:
    """Of "3:input.0": 3; of a slot of the call itself: `otherwise`."""
    head, colon, _ = slot.partition(":")
    return int(head) if colon else otherwise


def form_of(module: Any, call: Call, inputs: Mapping[str, Array], rebuilt: Rebuilt) -> Any:
    """Something of the form that a module returns when it is called as `call` was, with the weights
    it has, whatever they are.

    inputs: recorded, by slot. Tensors in what is returned stand for nothing. Raises ReplayRefused
    when it fails.
    """
    copy, _ = copied_module(module)
    for part in copy.modules():
        part.training = False
        for name, value in part._buffers.items():
            part._buffers[name] = value.clone() if value is not None else None
    example = next(
        (t for t in (*copy.parameters(), *copy.buffers()) if t.is_floating_point()), torch.empty(0)
    )

    def like(array: Array) -> Any:
        tensor = from_host(array)
        return tensor.to(
            example.device, example.dtype if tensor.is_floating_point() else tensor.dtype
        )

    plain = {
        slot: TORCH.get(value, value) if isinstance(value, str) else value
        for slot, value in call.arguments.items()
    }
    args, kwargs = arguments(
        {slot: like(array) for slot, array in inputs.items()}, plain, copy.forward
    )
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = copy(*args, **kwargs)
    except Exception as error:  # the user's code
        text = f"{type(error).__name__}: {str(error)[:200]}"
        raise ReplayRefused(
            f"what {call.scope} of the model returns is not known: {text}"
        ) from error
    return rebuilt(out, lambda slot, tensor: torch.empty(0))
