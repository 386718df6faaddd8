"""Paddle tensors <-> host arrays, dtype kept. Paddle itself is asked only for tensors that do not
lie plainly in host memory.

numpy has no bfloat16 and float8, so Paddle hands their bits out as uint16 and int8; they are taken
as what the tensor says it is. oneDNN keeps images in blocks of channels: `canonical` puts them into
the order that the shape says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_ONEDNN = "ONEDNN"
_PLAIN_AXES = 3  # of a tensor that oneDNN leaves in order
_NAMES: dict[Any, str] = {}


def dtype_name(tensor: Any) -> str:
    """whence's name of the tensor's dtype, "" when it has none. Takes a DataType of
    `paddle.inference` too.
    """
    return named(tensor.dtype)


def named(dtype: Any) -> str:
    """whence's name of a Paddle dtype, "" when it has none."""
    name = _NAMES.get(dtype)
    if name is None:
        spelling = str(dtype).rpartition(".")[2].lower()
        name = _NAMES[dtype] = spelling if spelling in dtypes.DTYPES else ""
    return name


def is_tensor(value: Any) -> bool:
    """Is this a tensor with values (an eager one), not a variable of a program that is being
    built?
    """
    return type(value).__name__ in ("Tensor", "EagerParamBase") and hasattr(
        value, "_is_initialized"
    )


def unreadable(tensor: Any) -> str:
    """Why a tensor has no elements to read, "" when it has."""
    if not tensor._is_initialized():
        return "" if tensor.is_dense() and 0 in tensor.shape else "it was not filled"
    if not tensor.is_dense():
        return f"a {'sparse' if tensor.is_sparse() else tensor.type} tensor"
    return "" if dtype_name(tensor) else f"dtype {tensor.dtype} has no host form"


def address(tensor: Any) -> int:
    """Where the canonical bytes of a readable tensor lie in host memory, 0 when they must be copied
    first (`canonical`).
    """
    if not tensor.place.is_cpu_place() or not tensor.is_contiguous() or _is_blocked(tensor):
        return 0
    return int(tensor.data_ptr())


def _is_blocked(tensor: Any) -> bool:
    return len(tensor.shape) > _PLAIN_AXES and bool(tensor.layout == _ONEDNN)


def viewed(place: int, nbytes: int) -> Bytes:
    """The memory at an address as bytes, no copy."""
    if not nbytes or not place:
        return np.empty(0, np.uint8)
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(place)
    return np.frombuffer(memory, np.uint8)


def canonical(tensor: Any) -> Bytes:
    """The tensor's bytes in C order, little endian, 1-D uint8: a view of its memory where that
    holds them, else a copy.

    tensor: readable (`unreadable` gives ""), on any device.
    """
    where = address(tensor)
    if where:
        return viewed(where, _nbytes(tensor))
    if 0 in tensor.shape:
        return np.empty(0, np.uint8)
    if _is_blocked(tensor):
        tensor = _in_order(tensor)
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)


def _in_order(tensor: Any) -> Any:
    """A copy that is laid out as its shape says: Paddle reorders what plain kernels are given."""
    import paddle

    if paddle.in_dynamic_mode():
        return paddle.base.core.eager.ops.assign(tensor)
    with paddle.base.dygraph.guard():  # without a tracer the operator would crash
        return paddle.base.core.eager.ops.assign(tensor)


def _nbytes(tensor: Any) -> int:
    n = dtypes.named(dtype_name(tensor)).itemsize
    for extent in tensor.shape:
        n *= extent
    return int(n)


def to_host(tensor: Any) -> Array:
    """Host array of the same shape and dtype; shares memory where possible. Raises KeyError for a
    dtype without a name.
    """
    return (
        canonical(tensor).view(dtypes.named(dtype_name(tensor)).numpy).reshape(tuple(tensor.shape))
    )


def of_handle(handle: Any) -> Array:
    """What an input or output handle of a predictor holds, copied to the host. Raises what Paddle
    raises when it is not filled.
    """
    array = np.ascontiguousarray(handle.copy_to_cpu())
    name = named(handle.type())
    return (
        array.view(dtypes.named(name).numpy)
        if name and dtypes.named(name).itemsize == array.itemsize
        else array
    )


def fill(tensor: Any, array: Array) -> None:
    """Write the elements of `array` into a tensor of the same shape and dtype, on any device.

    Raises ValueError when they differ, or when the tensor is laid out by oneDNN.
    """
    name = dtype_name(tensor)
    if tuple(tensor.shape) != array.shape or name != dtypes.of(array).name:
        raise ValueError(
            f"{dtypes.of(array).name} {list(array.shape)} does not fit a tensor of {name} "
            f"{list(tensor.shape)}"
        )
    if _is_blocked(tensor):
        raise ValueError("oneDNN has laid it out in blocks; switch oneDNN off for this run")
    raw = np.ascontiguousarray(array)
    where = address(tensor)
    if where:
        ctypes.memmove(where, raw.ctypes.data, raw.nbytes)
        return
    import paddle

    bits = (
        raw.view({"bfloat16": np.uint16}.get(name, np.int8))
        if raw.dtype.kind == "V" or name.startswith(("bf", "float8"))
        else raw
    )
    with paddle.no_grad():
        if paddle.in_dynamic_mode():
            tensor.set_value(bits)
        else:
            with paddle.base.dygraph.guard():
                tensor.set_value(bits)


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors of a value that is one, or lists and tuples of them, in order; anything else
    holds none.
    """
    if is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
