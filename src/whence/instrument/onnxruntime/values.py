"""Values that sessions take and return: tensors of numpy, `OrtValue`s on any device, and what has
no elements to read: texts, sequences, maps, optionals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from whence import dtypes
from whence.instrument.engines.values import Seen, of_array
from whence.instrument.wording import raised

_NAMES = {
    "float": "float32",
    "double": "float64",
    "float8e4m3fn": "float8_e4m3fn",
    "float8e4m3fnuz": "float8_e4m3fnuz",
    "float8e5m2": "float8_e5m2",
    "float8e5m2fnuz": "float8_e5m2fnuz",
}
_NESTING = 8


def element_dtype(type_text: str) -> str:
    """whence's name of the elements of "tensor(float)"; "" of what is not a tensor of numbers."""
    if not type_text.startswith("tensor("):
        return ""
    inner = type_text[7:].partition(")")[0]
    name = _NAMES.get(inner, inner)
    return name if name in dtypes.DTYPES else ""


def seen_values(value: Any, slot: str, type_text: str = "") -> Iterator[tuple[str, Seen]]:
    """(slot, value) of each tensor in what a session takes or returns; members of a sequence have
    their place behind its name.

    type_text: what the model declares, "tensor(float)".
    """
    yield from _walk(value, slot, type_text, 0)


def _walk(value: Any, slot: str, type_text: str, depth: int) -> Iterator[tuple[str, Seen]]:
    is_sequence = isinstance(value, (list, tuple)) and not type_text.startswith("tensor(")
    if is_sequence and depth < _NESTING:
        if not value:
            yield slot, Seen("", (), why="an empty sequence")
        for place, member in enumerate(value):
            yield from _walk(member, f"{slot}.{place}", "", depth + 1)
        return
    yield slot, _seen(value, type_text)


def _seen(value: Any, type_text: str) -> Seen:
    native = getattr(value, "_ortvalue", value)
    if hasattr(native, "is_tensor_sequence") and hasattr(native, "data_ptr"):
        # the memory may belong to an array that only the outer object holds
        return of_native(native)._replace(owner=value)
    if value is None:
        return Seen("", (), why="an optional without a value")
    if isinstance(value, dict):
        return Seen("", (), why="a map of ONNX, which has no elements in order")
    if hasattr(value, "dense_shape"):
        return Seen("", (), why="a sparse tensor")
    try:
        wanted = dtypes.DTYPES.get(element_dtype(type_text))
        is_array = isinstance(value, np.ndarray)
        array = value if is_array or wanted is None else np.asarray(value, wanted.numpy)
        return of_array(np.asarray(array))
    except (TypeError, ValueError) as error:
        return Seen("", (), why=f"a {type(value).__name__} that is not an array: {raised(error)}")


def of_native(native: Any) -> Seen:
    """An OrtValue of the runtime. What lies on another device is copied to the host."""
    if not native.has_value():
        return Seen("", (), why="an optional without a value")
    if not native.is_tensor():
        sort = "a sequence of tensors" if native.is_tensor_sequence() else "no tensor"
        return Seen("", (), why=f"{sort}: passed on, its members are not read")
    shape, text = tuple(native.shape()), str(native.data_type())
    if text == "tensor(string)":
        return Seen("string", shape, why="it holds texts")
    name, device = element_dtype(text), str(native.device_name()).lower()
    if not name:
        return Seen(text, shape, why=f"elements of {text} are not known")
    if device != "cpu":
        try:
            return of_array(np.array(native.numpy()))._replace(device=device)
        except Exception as error:  # noqa: BLE001 - whatever a provider raises: the value stays unread
            return Seen(name, shape, why=f"on {device}, not copied: {raised(error)}", device=device)
    nbytes = dtypes.named(name).itemsize * math.prod(shape)
    address = int(native.data_ptr()) if nbytes else 0
    data = None if address else np.empty(0, np.uint8)
    return Seen(name, shape, address, nbytes, data, owner=native)


def at_pointer(element_type: Any, shape: Any, device: str, pointer: int) -> Seen:
    """A buffer that a program bound by its address."""
    extents = tuple(int(n) for n in shape)
    try:
        name = dtypes.of(np.empty(0, element_type)).name
    except (KeyError, TypeError):
        return Seen(str(element_type), extents, why="a buffer whose element type is not known")
    if device.lower() != "cpu":
        return Seen(name, extents, why=f"a buffer on {device}, not copied", device=device)
    nbytes = dtypes.named(name).itemsize * math.prod(extents)
    data = None if nbytes else np.empty(0, np.uint8)
    return Seen(name, extents, int(pointer) if nbytes else 0, nbytes, data)
