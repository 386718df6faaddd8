"""Reads TensorProto, the tensor of ONNX files: the header first, elements on request; they are
inline, packed into number fields, or in another file.

Source: onnx/onnx.proto3 and onnx/external_data_helper.py of onnx 1.19; field numbers are part of
the format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.readers.encodings import limits, protobuf
from whence.readers.encodings.archive import File, unpacked, words

_NAMES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    8: "string", 9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64",
    14: "complex64", 15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz", 21: "uint4", 22: "int4", 23: "float4_e2m1",
    24: "float8_e8m0fnu", 25: "uint2", 26: "int2",
}  # fmt: skip
# Types of less than a byte, several to one: (bits, the narrowest type of whence that holds their
# values).
_PACKED = {
    "uint4": (4, "uint8"),
    "int4": (4, "int8"),
    "float4_e2m1": (4, "float8_e5m2"),
    "uint2": (2, "uint8"),
    "int2": (2, "int8"),
}
# float_data, double_data; the others are varints
_NUMBERS: dict[int, np.dtype[Any]] = {4: np.dtype("<f4"), 10: np.dtype("<f8")}


@dataclass(slots=True)
class OnnxTensor:
    """A TensorProto. dtype: whence's name; for types of less than a byte, that of the type which
    holds them.
    """

    name: str = ""
    shape: tuple[int, ...] = ()
    number: int = 0
    raw: Any = None
    typed: list[tuple[int, int, Any]] = field(default_factory=list)
    external: dict[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> str:
        """The type in ONNX's spelling."""
        return _NAMES.get(self.number, f"type {self.number}")

    @property
    def dtype(self) -> str:
        return _PACKED[self.stored][1] if self.stored in _PACKED else self.stored

    def why(self) -> str:
        """Why it has no elements, "" when it should have them."""
        if self.number == 8:
            return "it holds texts"
        return "" if self.dtype in dtypes.DTYPES else f"its {self.stored} is not known"

    def array(self, inside: Callable[[str], Path]) -> Array:
        """Returns the elements. inside: returns the file of a name in the dump. Raises
        ElementsMissing.
        """
        kind, count = dtypes.named(self.dtype), limits.count(self.shape)
        bits = _PACKED[self.stored][0] if self.stored in _PACKED else kind.bits
        nbytes = (count * bits + 7) // 8
        if not nbytes:
            return np.empty(self.shape, kind.numpy)
        data = self._bytes(nbytes, inside)
        if data.size != nbytes:
            raise ElementsMissing(
                f"{self.stored} {self.shape} needs {nbytes} bytes, {data.size} are there"
            )
        if self.stored in _PACKED:
            small = unpacked(data, self.stored, bits, count)
            return small.astype(kind.numpy).reshape(self.shape)
        return words(data, kind.numpy).reshape(self.shape)

    def _bytes(
        self, nbytes: int, inside: Callable[[str], Path]
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self.external:
            try:
                start, length = (
                    int(self.external.get(key, default))
                    for key, default in (("offset", "0"), ("length", str(nbytes)))
                )
            except ValueError as error:
                raise ElementsMissing(
                    f"its external data is described by {str(self.external)[:80]}"
                ) from error
            path = inside(self.external.get("location", ""))
            if not path.is_file():
                raise ElementsMissing(f"its elements are in {path.name}, which is not there")
            return File(path).part(start, length)
        if self.raw is not None:
            return np.frombuffer(self.raw, np.uint8)
        if (
            sum(len(v) if kind == protobuf.BYTES else 8 for _, kind, v in self.typed)
            < min(nbytes, limits.count(self.shape)) // 8
        ):
            raise ElementsMissing(
                f"{self.stored} {self.shape} needs {nbytes} bytes; far fewer are there"
            )
        return self._of_numbers()

    def _of_numbers(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Converts float_data, int32_data, int64_data, double_data or uint64_data to the bytes of
        the tensor.
        """
        parts: list[Any] = []
        for number, kind, value in self.typed:
            if number in _NUMBERS:
                parts.append(words(np.frombuffer(value, np.uint8), _NUMBERS[number]))
            else:
                parts.append(
                    np.array(
                        [n & 0xFFFF_FFFF_FFFF_FFFF for n in protobuf.packed(kind, value)], np.uint64
                    )
                )
        flat: np.ndarray[Any, np.dtype[Any]] = (
            np.concatenate(parts) if parts else np.empty(0, np.uint8)
        )
        if flat.dtype == np.uint64:
            # A number stands for the bits of one element; of types below a byte, for a byte of
            # them.
            size = 1 if self.stored in _PACKED else dtypes.named(self.dtype).itemsize
            flat = flat.astype(np.dtype(f"<u{size}"))
        return np.ascontiguousarray(flat).view(np.uint8)


def dtype_of(number: int) -> str:
    """Returns whence's name of an ONNX type number; "" for an unknown one."""
    stored = _NAMES.get(number, "")
    return _PACKED[stored][1] if stored in _PACKED else stored


def parse(message: protobuf.Buffer) -> OnnxTensor:
    """Reads a TensorProto; only its header is decoded. Raises ValueError when it is none."""
    tensor, shape = OnnxTensor(), list[int]()
    for number, kind, value in protobuf.fields(message):
        if number == 1:
            shape += protobuf.packed(kind, value)
        elif number == 2 and kind == protobuf.VARINT:
            tensor.number = value
        elif number in (4, 5, 7, 10, 11):
            tensor.typed.append((number, kind, value))
        elif number == 8 and kind == protobuf.BYTES:
            tensor.name = protobuf.text(value)
        elif number == 9 and kind == protobuf.BYTES:
            tensor.raw = value
        elif number == 13:
            tensor.external |= protobuf.table(protobuf.PAIRS(kind, value))
        elif number not in (3, 6, 12, 14, 16):
            raise ValueError(f"field {number} does not belong to a tensor")
    tensor.shape = limits.extents(tuple(shape), "a tensor")
    if not tensor.number:
        raise ValueError("it has no type")
    return tensor
