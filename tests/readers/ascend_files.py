"""Writes files of the Ascend tools, from the description of the formats alone: an oracle for the
readers.
"""

import struct
from pathlib import Path

import ml_dtypes
import numpy as np

ACL = {
    "float32": 0, "float16": 1, "int8": 2, "int32": 3, "uint8": 4, "int16": 6, "uint16": 7,
    "uint32": 8, "int64": 9, "uint64": 10, "float64": 11, "bool": 12, "complex64": 16,
    "complex128": 17, "bfloat16": 27,
}  # fmt: skip
GE = {
    "float32": 1, "float16": 2, "int8": 3, "uint8": 4, "int16": 5, "uint16": 6, "int32": 7,
    "int64": 8, "uint32": 9, "uint64": 10, "bool": 11, "float64": 12, "complex64": 16,
    "complex128": 17, "bfloat16": 27, "float8_e5m2": 34, "float8_e4m3fn": 35,
}  # fmt: skip
BF16 = np.dtype(ml_dtypes.bfloat16)


def atb(path: Path, array: np.ndarray, *, code: int | None = None) -> Path:
    """A tensor file of ATB with one object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = array.tobytes()
    dims = ",".join(map(str, array.shape))
    head = f"$Version=1.0\n$Object.Count=1\n$Object.Length={len(raw)}\nformat=2\ndtype={ACL[array.dtype.name] if code is None else code}\n"
    path.write_bytes(f"{head}dims={dims}\n$Object.data=0,{len(raw)}\n$End=1\n".encode() + raw)
    return path


def varint(value: int) -> bytes:
    out = b""
    while True:
        out, value = out + bytes([value & 0x7F | (0x80 if value > 0x7F else 0)]), value >> 7
        if not value:
            return out


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def shape(extents, packed=True) -> bytes:
    return (
        field(1, b"".join(map(varint, extents)))
        if packed
        else b"".join(field(1, n) for n in extents)
    )


def tensor(
    kind,
    array,
    *,
    layout=2,
    original=None,
    code=None,
    size=None,
    stored=None,
    packed=True,
    data=None,
    origin="",
) -> bytes:
    """An OpInput or OpOutput. array: as it lies on the device."""
    later = kind == "output"
    out = field(1, GE[array.dtype.name] if code is None else code) + field(2, layout)
    out += field(3, shape(array.shape if stored is None else stored, packed))
    if later and origin:
        out += field(4, field(1, origin.encode()))
    if data is not None:
        out += field(4 + later, data)
    out += field(5 + later, array.nbytes if size is None else size)
    return out + (field(6 + later, shape(original, packed)) if original is not None else b"")


def ge(path: Path, inputs=(), outputs=(), *, name="", extra=b"", tail=b"") -> Path:
    """A GE dump file. inputs, outputs: (message, payload). extra: further fields of the header;
    tail: payloads behind all.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    head = field(1, b"2.0") + field(2, 1706596912161941)
    head += b"".join(field(3, message) for message, _ in outputs) + b"".join(
        field(4, message) for message, _ in inputs
    )
    head += field(6, name.encode()) + extra
    path.write_bytes(
        struct.pack("<Q", len(head)) + head + b"".join(p for _, p in (*inputs, *outputs)) + tail
    )
    return path


def plain(kind: str, array: np.ndarray, **how) -> tuple[bytes, bytes]:
    """(message, payload) of a tensor that lies plain."""
    return tensor(kind, array, **how), array.tobytes()
