"""Converts the recorded slots of a module's call to the arguments of its `forward`, and to a
program without operations.
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
"""Slot -> (dtype, shape) of a call's tensors."""


@dataclass(frozen=True, slots=True)
class Kid:
    """A call that the borrowed module makes.

    module: of the user's model. inputs, outputs: its slots in the recording. fresh: inputs that no
    earlier slot recorded; the replay overwrites them with the target's values and continues from
    these, not from the tensors they were computed from. returned: an object of the same structure
    as its return value, with arbitrary tensors.
    """

    scope: str
    module: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    returned: Any
    fresh: tuple[str, ...] = ()


class _Fields(dict[str, Any]):
    """Values by name, readable as a dict or as attributes: the slots do not tell which of the two
    the argument was.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def arguments(
    tensors: Mapping[str, Any], plain: Mapping[str, Any], forward: Callable[..., Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns (args, kwargs) of a call, given its slots: "input.0" is the first argument,
    "input.mask" a keyword, "input.0.1" inside a tuple.

    tensors, plain: by slot. An argument without a slot was None, or an object without recorded
    contents. Raises ReplayRefused when a slot is both a value and the parent of one.
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
    """Returns 3 for "3:input.0"; `otherwise` for a slot of the call itself."""
    return split_child(slot)[0] if is_of_child(slot) else otherwise


def form_of(module: Any, call: Call, inputs: Mapping[str, Array]) -> Any:
    """Runs a copy of the module as `call` was recorded, with its current weights, and returns an
    object of the structure that it returns.

    inputs: recorded, by slot. Tensors in the returned object are empty placeholders. Raises
    ReplayRefused when the run fails.
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
    """Returns a program that has the slots of a call and no operations."""
    slots = [ref.slot for ref in call.refs]
    params = dict.fromkeys(s for s in slots if is_param(s))
    inputs = [s for s in slots if is_input(s)]
    inputs += [f"{k}:{s}" for k, kid in enumerate(kids) for s in (*kid.fresh, *kid.outputs)]
    outputs = [f"{k}:{s}" for k, kid in enumerate(kids) for s in kid.inputs]
    outputs += [s for s in slots if is_written(s)]
    # A cache is an object that changes tensors inside; slots record neither its class nor its
    # initial state.
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
