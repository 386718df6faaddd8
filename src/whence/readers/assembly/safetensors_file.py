"""The safetensors format: eight bytes with the length of a JSON header, the header ({name: dtype,
shape, data_offsets}), the elements.

Little endian. Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import orjson

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.encodings import limits
from whence.readers.encodings.archive import File, words
from whence.records import Lack

HEADER_BYTES = 100_000_000  # what the format allows
# F64 is float64; complex128 has no code of its own
_DTYPES = {d.safetensors: d for d in reversed(dtypes.DTYPES.values())}


def tensors_of(building: Building, file: File) -> Iterator[Named]:
    """Returns the tensors of a file, in the order of their elements. Raises UnreadableRun when its
    header cannot be read.
    """
    header, start = _header(file)
    promised = start + max(map(_end, header.values()), default=0)
    file.all_read(0, min(promised, file.size))
    for inner, entry in sorted(header.items(), key=lambda item: _begin(item[1])):
        try:
            shape = limits.extents(entry["shape"], inner)
            begin, end = limits.extents(entry["data_offsets"], inner)
            code = str(entry["dtype"])
        except (KeyError, TypeError, ValueError, UnreadableRun):
            building.lacks(
                Lack.DAMAGED,
                file.name,
                f"{inner} is not read: its entry in the header of {file.name} makes no sense",
            )
            continue
        kind = _DTYPES.get(code)
        if kind is None:
            yield Named(inner, code, shape, None, f"dtype {code} is not known to whence")
            continue
        yield Named(
            inner,
            kind.name,
            shape,
            partial(_load, file, kind, shape, start + begin, start + end, promised),
        )


def _load(
    file: File, kind: dtypes.DType, shape: tuple[int, ...], begin: int, end: int, promised: int
) -> Array:
    """Returns the elements. promised: size of the file in bytes according to its header."""
    nbytes = limits.count(shape) * kind.itemsize
    if nbytes != end - begin:
        raise ElementsMissing(
            f"{kind.name} {shape} needs {nbytes} bytes, its offsets hold {end - begin}"
        )
    if end > file.size:
        raise ElementsMissing(
            f"{file.name} is cut off: it has {file.size} bytes, its header names {promised}"
        )
    return words(file.part(begin, nbytes), kind.numpy).reshape(shape)


def _header(file: File) -> tuple[dict[str, Any], int]:
    """Returns (entries by name, start of the elements)."""
    length = int.from_bytes(file.head(8), "little")
    if not 2 <= length <= min(HEADER_BYTES, file.size - 8):
        raise UnreadableRun(
            f"{file.name} says that its header has {length} bytes; the file has {file.size}"
        )
    try:
        header = orjson.loads(bytes(file.part(8, length)))
    except orjson.JSONDecodeError as error:
        raise UnreadableRun(f"{file.name}: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise UnreadableRun(f"{file.name}: its header is not a JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _begin(entry: Any) -> int:
    return _offset(entry, 0)


def _end(entry: Any) -> int:
    return _offset(entry, 1)


def _offset(entry: Any, which: int) -> int:
    try:
        return int(entry["data_offsets"][which])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return 0
