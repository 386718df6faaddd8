"""Elements as bytes, and as files of numpy and torch."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from whence import dtypes
from whence.dtypes import Array

_PIECE_BYTES = 16 << 20
_ALIGN = 64  # of elements in a file of torch.save, which can then be mapped
_ZIP64_BYTES = 1 << 31
_STORAGES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16",
    "int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte",
    "bool": "Bool", "complex64": "ComplexFloat", "complex128": "ComplexDouble",
}  # fmt: skip


def has_numpy_type(array: Array) -> bool:
    """Has numpy itself a type for these elements? Not for bfloat16 and float8, which ml_dtypes
    adds.
    """
    return array.dtype.isbuiltin == 1


def pieces(array: Array) -> Iterator[memoryview]:
    """The bytes of a contiguous array, some MB at a time."""
    data = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


def write_numpy(file: IO[bytes], array: Array) -> None:
    """As numpy.save does; elements of which numpy has no type as raw bytes of their size ("|V2",
    "|V1"), as it does with ml_dtypes' own.
    """
    descr = (
        np.lib.format.dtype_to_descr(array.dtype)
        if has_numpy_type(array)
        else f"|V{array.dtype.itemsize}"
    )
    np.lib.format.write_array_header_1_0(
        file, {"descr": descr, "fortran_order": False, "shape": array.shape}
    )
    for piece in pieces(array):
        file.write(piece)


def write_torch(path: Path, array: Array) -> None:
    """As torch.save writes a plain tensor on the CPU: `torch.load` reads it, `weights_only` and
    mapped too.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), _pickle(array))
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), b"little")
        entry = zipfile.ZipInfo("archive/data/0")
        entry.file_size = array.nbytes
        is_large = array.nbytes > _ZIP64_BYTES
        assert archive.fp is not None
        start = archive.fp.tell() + 30 + len(entry.filename) + 4 + (20 if is_large else 0)
        padding = -start % _ALIGN
        entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        with archive.open(entry, "w", force_zip64=is_large) as file:
            for piece in pieces(array):
                file.write(piece)
        archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")


def _pickle(array: Array) -> bytes:
    """What rebuilds the tensor from its storage, in the words of torch's own pickles."""
    name = dtypes.of(array).name
    typed = name in _STORAGES
    storage = f"ctorch\n{_STORAGES[name]}Storage\n" if typed else "ctorch.storage\nUntypedStorage\n"
    size = array.size if typed else array.nbytes
    shape, strides = (
        b"(" + b"".join(map(_whole, extents)) + b"t"
        for extents in (array.shape, _strides(array.shape))
    )
    return b"".join(
        (
            b"\x80\x02",
            f"ctorch._utils\n_rebuild_tensor_v{2 if typed else 3}\n".encode(),
            b"((",
            _text("storage"),
            storage.encode(),
            _text("0"),
            _text("cpu"),
            _whole(size),
            b"tQ",
            _whole(0),
            shape,
            strides,
            b"\x89ccollections\nOrderedDict\n)R",
            b"" if typed else f"ctorch\n{name}\n".encode(),
            b"tR.",
        )
    )


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Of a contiguous tensor, in elements."""
    strides, step = list[int](), 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return strides[::-1]


def _text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def _whole(number: int) -> bytes:
    data = number.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
