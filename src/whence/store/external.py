"""Finds parameters that are byte-equal to a tensor of the user's checkpoint; the run refers to them
instead of storing them again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import xxhash

from whence.dtypes import DTYPES
from whence.records import External
from whence.store.shards import Bytes, Tensor, map_file, parse_header

# GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3; little endian)
_GGUF_TYPES = {
    0: ("F32", 4), 1: ("F16", 2), 24: ("I8", 1), 25: ("I16", 2), 26: ("I32", 4), 27: ("I64", 8),
    28: ("F64", 8), 30: ("BF16", 2),
}  # fmt: skip
_GGUF_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_MAX_DIMS, _MAX_NESTING = 8, 4
_SAMPLE_BYTES = 64


class Candidates:
    """Tensors of safetensors and GGUF files (unquantised ones), by type and size. Reads the headers
    only.

    paths: files, or folders whose *.safetensors and *.gguf are used. skipped: files that could not
    be used, with the reason.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self.skipped: dict[str, str] = {}
        self._data: dict[str, Bytes] = {}
        self._tensors: dict[tuple[str, int], list[tuple[str, Tensor]]] = {}
        for path in paths:
            root = Path(path)
            files = (
                sorted([*root.glob("*.safetensors"), *root.glob("*.gguf")])
                if root.is_dir()
                else [root]
            )
            for file in files:
                self._add(file)

    def __len__(self) -> int:
        return sum(len(tensors) for tensors in self._tensors.values())

    def find(
        self, digest: bytes, dtype: str, nbytes: int, data: Bytes | None = None
    ) -> External | None:
        """Returns where `nbytes` of `dtype` with this xxh3_128 digest are stored, or None. data:
        the bytes, to rule out most candidates without hashing them.
        """
        if not digest or not nbytes:
            return None
        for file, tensor in self._tensors.get((DTYPES[dtype].safetensors, nbytes), ()):
            stored = self._data[file][tensor.offset : tensor.offset + nbytes]
            if (data is None or _alike(data.reshape(-1), stored)) and xxhash.xxh3_128_digest(
                stored.data
            ) == digest:
                return External(file, tensor.offset, nbytes)
        return None

    def _add(self, file: Path) -> None:
        name = str(file.resolve())
        if name in self._data:
            return
        try:
            data = map_file(name)
            tensors = parse_gguf(data) if data[:4].tobytes() == b"GGUF" else parse_header(data)
        except (OSError, ValueError) as error:
            self.skipped[str(file)] = str(error)
            return
        self._data[name] = data
        for tensor in tensors:
            self._tensors.setdefault((tensor.dtype, tensor.nbytes), []).append((name, tensor))


def parse_gguf(data: Bytes) -> list[Tensor]:
    """Returns unquantised tensors of a GGUF file given as bytes. The file is untrusted: raises
    ValueError for any offset outside it.
    """
    cursor = _Cursor(data)
    if cursor.take(4) != b"GGUF":
        raise ValueError("not a GGUF file")
    version = cursor.number("<I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}, known are 2 and 3")
    tensor_count, value_count = cursor.number("<Q"), cursor.number("<Q")
    alignment = 32
    for _ in range(value_count):
        key, kind = cursor.string(), cursor.number("<I")
        if key == b"general.alignment" and kind == _UINT32:
            alignment = cursor.number("<I")
        else:
            _skip_value(cursor, kind, 0)
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment}")
    relative = []
    for _ in range(tensor_count):
        name, dims = cursor.string(), cursor.number("<I")
        if dims > _MAX_DIMS:
            raise ValueError(f"a tensor of {dims} dimensions")
        extents = [cursor.number("<Q") for _ in range(dims)]
        kind, offset = cursor.number("<I"), cursor.number("<Q")
        if kind in _GGUF_TYPES:
            code, itemsize = _GGUF_TYPES[kind]
            nbytes = itemsize
            for extent in extents:
                nbytes *= extent
            # GGUF counts dimensions from the fastest one
            relative.append(
                Tensor(
                    name.decode("utf-8", "replace"), code, tuple(reversed(extents)), offset, nbytes
                )
            )
    start = (cursor.place + alignment - 1) // alignment * alignment
    tensors = [t._replace(offset=start + t.offset) for t in relative]
    for tensor in tensors:
        if tensor.offset + tensor.nbytes > data.size:
            raise ValueError(f"tensor {tensor.name!r} lies outside the file")
    return tensors


class _Cursor:
    def __init__(self, data: Bytes) -> None:
        self._data = data
        self.place = 0

    def take(self, nbytes: int) -> bytes:
        if nbytes > self._data.size - self.place:
            raise ValueError("the header leads outside the file")
        self.place += nbytes
        return self._data[self.place - nbytes : self.place].tobytes()

    def skip(self, nbytes: int) -> None:
        if nbytes > self._data.size - self.place:
            raise ValueError("the header leads outside the file")
        self.place += nbytes

    def number(self, code: str) -> int:
        value: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return value

    def string(self) -> bytes:
        return self.take(self.number("<Q"))


def _skip_value(cursor: _Cursor, kind: int, nesting: int) -> None:
    if kind in _GGUF_VALUE_BYTES:
        cursor.skip(_GGUF_VALUE_BYTES[kind])
    elif kind == _STRING:
        cursor.skip(cursor.number("<Q"))
    elif kind == _ARRAY and nesting < _MAX_NESTING:
        inner, count = cursor.number("<I"), cursor.number("<Q")
        if inner in _GGUF_VALUE_BYTES:
            cursor.skip(_GGUF_VALUE_BYTES[inner] * count)
        else:
            for _ in range(count):
                _skip_value(cursor, inner, nesting + 1)
    else:
        raise ValueError(f"a value of type {kind}")


def _alike(data: Bytes, stored: Bytes) -> bool:
    """Whether first, middle and last bytes agree."""
    middle = data.size // 2
    spans = (
        slice(_SAMPLE_BYTES),
        slice(middle, middle + _SAMPLE_BYTES),
        slice(-_SAMPLE_BYTES, None),
    )
    return all(bool((data[s] == stored[s]).all()) for s in spans)
