"""Tensors of OpenVINO, and the forms that a model declares."""

from __future__ import annotations

from typing import Any

import numpy as np

from whence import dtypes
from whence.instrument.engines.values import Seen

_NAMES = {
    "boolean": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
"""whence's names of element types."""
_SINK = "/sink_port_"
"""Behind the name of what a result of a model is of."""


def dtype_of(element_type: Any) -> str:
    """whence's name of an element type, or of its text; its own name where whence has none."""
    text = element_type if isinstance(element_type, str) else str(element_type.get_type_name())
    return _NAMES.get(text, text)


def of_tensor(tensor: Any) -> Seen:
    """A tensor as it lies in memory, without a copy."""
    name, shape = dtype_of(tensor.element_type), tuple(int(n) for n in tensor.shape)
    if name == "string":
        return Seen("string", shape, why="it holds texts")
    if name not in dtypes.DTYPES:
        return Seen(name, shape, why=f"elements of {name} are not known")
    if not tensor.byte_size:
        return Seen(name, shape, data=np.empty(0, np.uint8))
    if not tensor.is_continuous():
        return of_bytes(name, shape, np.ascontiguousarray(tensor.data))
    address = int(tensor.data.__array_interface__["data"][0])
    return Seen(name, shape, address, int(tensor.byte_size), owner=tensor)


def of_bytes(name: str, shape: tuple[int, ...], array: np.ndarray[Any, Any]) -> Seen:
    """An array of numpy whose bytes are elements of a dtype of whence."""
    if name not in dtypes.DTYPES:
        return Seen(name, shape, why=f"elements of {name} are not known")
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if data.size != dtypes.named(name).itemsize * int(np.prod(shape, dtype=np.int64)):
        return Seen(name, shape, why=f"elements of {name} do not fill their bytes")
    return Seen(name, shape, nbytes=data.size, data=data)


def port_name(port: Any, place: int) -> str:
    """The name of an input or output of a model: that of its node where tensors are named, else the
    shortest of its own, else its place. A pass may give the tensor further ones.
    """
    names = sorted(port.get_names(), key=lambda n: (len(n), n))
    friendly = str(port.get_node().get_friendly_name()).partition(_SINK)[0]
    return friendly if friendly in names else str(names[0]) if names else str(place)


def form_of(port: Any) -> str:
    """ "float32 [?,3]"."""
    return f"{dtype_of(port.element_type)} {port.partial_shape}"
