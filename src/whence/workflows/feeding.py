"""Calls one model on inputs that another model receives too: each gets copies in its own framework,
on its device, in its dtype.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from whence.errors import UsageError
from whence.frameworks import paddle_arrays as paddle
from whence.instrument import paddle as paddle_models


def called(model: Any, inputs: Any) -> Any:
    """What `model` returns for `inputs`, without gradients; the random generators of its framework
    are left as they were.

    model: a torch module, a Paddle layer or predictor. inputs: a tuple is the positional arguments,
    a mapping the named ones, anything else the only one. Tensors in them (torch, Paddle, numpy; in
    lists, tuples and mappings) are copied to the model's framework and device; floating ones take
    the dtype of its parameters where these have one alone. The caller's are never written. Raises
    UsageError for a tensor that the framework cannot hold, and whatever the model raises.
    """
    adapt, scope = (_paddle if paddle_models.owns(model) else _torch)(model)
    is_named = isinstance(inputs, Mapping)
    positional = () if is_named else inputs if type(inputs) is tuple else (inputs,)
    args, kwargs = _mapped(positional, adapt), _mapped(inputs if is_named else {}, adapt)
    with scope:
        if not hasattr(model, "register_output_hook"):
            return model(*args, **kwargs)
        if kwargs:
            raise UsageError(
                "a Paddle predictor takes its inputs in order, not by name "
                f"({', '.join(kwargs)}): give a tuple"
            )
        return model.run(list(args))


def _mapped(value: Any, adapt: Callable[[Any], Any]) -> Any:
    """A copy of `value` in which every tensor is converted to the model's framework, device and
    dtype.
    """
    if isinstance(value, np.ndarray) or _is_torch(value) or _is_paddle(value):
        return adapt(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, adapt) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, adapt) for item in value)
    return copy.deepcopy(value)


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_paddle(value: Any) -> bool:

    return type(value).__module__.partition(".")[0] == "paddle" and paddle.is_tensor(value)


def _host(value: Any) -> Any:
    from whence.frameworks import array_protocols as named

    return np.array(paddle.to_host(value) if _is_paddle(value) else named.to_host(value, "inputs"))


def _torch(
    model: Any,
) -> tuple[Callable[[Any], Any], contextlib.AbstractContextManager[Any]]:
    import torch

    from whence.frameworks import torch_arrays as arrays

    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else None
    floating = {p.dtype for p in model.parameters() if p.is_floating_point()}
    dtype = floating.pop() if len(floating) == 1 else None

    def own(value: Any) -> Any:
        tensor = value.detach().clone() if _is_torch(value) else arrays.from_host(_host(value))
        tensor = tensor.to(device) if device is not None else tensor
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        kind = device.type if device is not None else "cpu"
        generators = (
            {"devices": [device], "device_type": kind}
            if kind not in ("cpu", "meta")
            else {"devices": []}
        )
        with torch.no_grad(), torch.random.fork_rng(**generators):
            yield

    return own, scope()


def _paddle(
    model: Any,
) -> tuple[Callable[[Any], Any], contextlib.AbstractContextManager[Any]]:
    import paddle

    from whence import dtypes
    from whence.frameworks import paddle_arrays as arrays

    parameters = list(model.parameters()) if hasattr(model, "parameters") else []
    place = parameters[0].place if parameters else None
    floating = {
        name for p in parameters if dtypes.named(name := arrays.dtype_name(p)).kind == "float"
    }
    dtype = floating.pop() if len(floating) == 1 else ""

    def own(value: Any) -> Any:
        array = _host(value)
        name = dtypes.of(array).name
        # only numpy's own dtypes are accepted
        if array.dtype.kind == "V" or name.startswith(("bf", "float8")):
            tensor = paddle.to_tensor(array.astype(np.float32), place=place).cast(name)
        else:
            tensor = paddle.to_tensor(array, place=place)
        return (
            tensor.cast(dtype)
            if dtype and name != dtype and dtypes.named(name).kind == "float"
            else tensor
        )

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        state = paddle.get_rng_state()
        try:
            with paddle.no_grad():
                yield
        finally:
            paddle.set_rng_state(state)

    return own, scope()
