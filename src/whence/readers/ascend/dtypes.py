"""Element types of the Ascend tools in their two numberings, and the conversion of their bytes to
numpy arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.readers.encodings import limits
from whence.readers.encodings.archive import unpacked

ACL = {
    0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 7: "uint16",
    8: "uint32", 9: "int64", 10: "uint64", 11: "float64", 12: "bool", 13: "string", 16: "complex64",
    17: "complex128", 27: "bfloat16",
}  # fmt: skip
"""aclDataType: ATB files and nano dumps."""

GE = {
    0: "undefined", 1: "float32", 2: "float16", 3: "int8", 4: "uint8", 5: "int16", 6: "uint16",
    7: "int32", 8: "int64", 9: "uint32", 10: "uint64", 11: "bool", 12: "float64", 13: "string",
    14: "dual_sub_int8", 15: "dual_sub_uint8", 16: "complex64", 17: "complex128", 18: "qint8",
    19: "qint16", 20: "qint32", 21: "quint8", 22: "quint16", 23: "resource", 24: "string_ref",
    25: "dual", 26: "variant", 27: "bfloat16", 28: "int4", 29: "uint1", 30: "int2", 31: "uint2",
    32: "complex32", 33: "hifloat8", 34: "float8_e5m2", 35: "float8_e4m3fn", 36: "float8_e8m0",
    37: "float6_e3m2", 38: "float6_e2m3", 39: "float4_e2m1", 40: "float4_e1m2",
}  # fmt: skip
"""data_type of a GE dump."""

_SAME = {
    "undefined": "int8", "dual_sub_int8": "int8", "dual_sub_uint8": "uint8", "qint8": "int8",
    "qint16": "int16", "qint32": "int32", "quint8": "uint8", "quint16": "uint16",
    "float8_e8m0": "float8_e8m0fnu",
}  # fmt: skip
# Types of less than a byte: (bits, dtype that holds every value).
_PACKED = {
    "int4": (4, "int8"), "uint1": (1, "uint8"), "int2": (2, "int8"), "uint2": (2, "uint8"),
    "float6_e3m2": (6, "bfloat16"), "float6_e2m3": (6, "bfloat16"), "float4_e2m1": (4, "bfloat16"),
}  # fmt: skip


class Type(NamedTuple):
    """An element type of a dump. name: in the tool's spelling. dtype: whence's dtype that holds it
    exactly, "" when its elements are not read. bits: stored per element.
    """

    name: str
    dtype: str
    bits: int


def acl(code: int) -> Type:
    """Returns the type of an aclDataType code."""
    return named(ACL.get(code, f"data type {code}"))


def ge(code: int) -> Type:
    """Returns the type of a data_type code of a GE dump."""
    return named(GE.get(code, f"data type {code}"))


def named(name: str) -> Type:
    """Returns the type of that name: one of the tools', or whence's own."""
    if name in _PACKED:
        bits, dtype = _PACKED[name]
        return Type(name, dtype, bits)
    if name == "complex32":
        return Type(name, "complex64", 32)
    dtype = _SAME.get(name, name)
    return (
        Type(name, dtype, dtypes.named(dtype).bits) if dtype in dtypes.DTYPES else Type(name, "", 0)
    )


def nbytes(kind: Type, count: int) -> int:
    """Returns the bytes that `count` elements take."""
    return -(-count * kind.bits // 8)


def decoded(kind: Type, data: Array, shape: tuple[int, ...]) -> Array:
    """Decodes elements from their bytes, little endian, in C order.

    data: (n,) uint8, may be longer than needed (padding). Packed types: the first element is in the
    lowest bits. Raises ElementsMissing when bytes are missing or the type has no elements here.
    """
    if not kind.dtype:
        raise ElementsMissing(f"elements of {kind.name} are not read")
    count = limits.count(shape)
    need = nbytes(kind, count)
    if data.size < need:
        raise ElementsMissing(
            f"{data.size} bytes are there of the {need} that {kind.name} {list(shape)} takes: "
            "the file was cut short"
        )
    data = np.ascontiguousarray(data[:need])
    if kind.name in _PACKED:
        small = unpacked(data.view(np.uint8), kind.name, kind.bits, count)
        return small.astype(dtypes.named(kind.dtype).numpy).reshape(shape)
    if kind.name == "complex32":
        return data.view("<f2").astype(np.float32).view(np.complex64).reshape(shape)
    # A memory map may begin at any address; numpy supports unaligned views.
    return data.view(dtypes.named(kind.dtype).numpy).reshape(shape)
