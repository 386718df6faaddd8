"""The slots that a run recorded of a module's call: as arguments of its `forward`, and as a program
without operations.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.frameworks.torch_arrays import TORCH, from_host
from whence.frameworks.torch_trees import rebuilt
from whence.records import Call, Program
from whence.records.slots import (
    SlotKind,
    is_input,
    is_mutated,
    is_of_child,
    is_param,
    is_written,
    slot_of_kind,
    split_child,
)
from whence.replay.module_copy import copied_module

Forms = Mapping[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) of a call's tensors by slot."""


@dataclass(frozen=True, slots=True)
class Kid:
    """A call that the borrowed module makes. module: of the user's model. inputs, outputs: its
    slots when it was recorded.

    fresh: inputs that no slot showed before; what follows starts from the target's, not from what
    they were computed of. returned: something of the form that it returns, whatever its tensors
    are.
    """

    scope: str
    module: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    returned: Any
    fresh: tuple[str, ...] = ()


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
                raise ReplayRefused(f"{slot}: a tensor of several pieces cannot be joined again")
        if last in node:
            raise ReplayRefused(f"{slot}: a tensor of several pieces cannot be joined again")
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
    return split_child(slot)[0] if is_of_child(slot) else otherwise


def form_of(module: Any, call: Call, inputs: Mapping[str, Array]) -> Any:
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


def program_of_slots(name: str, call: Call, kids: Sequence[Kid], forms: Forms) -> Program:
    """The slots of a call as a program without operations."""
    slots = [ref.slot for ref in call.refs]
    params = dict.fromkeys(s for s in slots if is_param(s))
    inputs = [s for s in slots if is_input(s)]
    inputs += [f"{k}:{s}" for k, kid in enumerate(kids) for s in (*kid.fresh, *kid.outputs)]
    outputs = [f"{k}:{s}" for k, kid in enumerate(kids) for s in kid.inputs]
    outputs += [s for s in slots if is_written(s)]
    # A cache: what it holds is changed inside an object, of which slots show neither the class nor
    # how it began.
    inside = [
        s
        for s in outputs
        if is_mutated(s)
        and not {slot_of_kind(s, SlotKind.INPUT), slot_of_kind(s, SlotKind.PARAM)} & {*slots}
    ]
    outputs = [s for s in outputs if s not in inside]
    floating = (
        dtype
        for slot in (*params, *slots)
        if (dtype := forms[slot][0]) in TORCH and TORCH[dtype].is_floating_point
    )
    why = "hangs in an object, which the model's module cannot be given"
    return Program(
        name,
        (),
        tuple(dict.fromkeys(inputs)),
        tuple((slot, {"op": [0, n]}) for n, slot in enumerate(dict.fromkeys(outputs))),
        tuple(params),
        base=next(floating, ""),
        lost=tuple((slot, why) for slot in inside),
    )
