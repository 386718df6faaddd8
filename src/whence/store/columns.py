"""Columns of numbers as a safetensors file, written in parts, and a journal read in blocks: a run
of any length gets its index in little memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from whence import disk
from whence.dtypes import DTYPES
from whence.store.shards import Bytes, map_file, parse_header


class FileBlocks:
    """A regular file that is read in blocks, as slices of bytes. No block stays in memory, whereas
    pages of a mapped file would. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._fd = disk.system.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        self.size = os.fstat(self._fd).st_size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, block: slice) -> Bytes:
        start, stop, _ = block.indices(self.size)
        return np.frombuffer(os.pread(self._fd, max(0, stop - start), start), np.uint8)

    def __enter__(self) -> FileBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class Column(NamedTuple):
    """A column of a file that `save` writes: its dtype and shape, and its bytes in parts."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: Iterable[Bytes]


def whole_column(array: np.ndarray[Any, Any]) -> Column:
    """Returns an array as a column."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Column(array.dtype, array.shape, [raw])


def save(path: Path, columns: dict[str, Column], metadata: dict[str, str]) -> None:
    """Writes columns as a safetensors file, replacing `path` atomically. Raises OSError."""
    codes = {d.numpy: d.safetensors for d in DTYPES.values()}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    # so that each is aligned to its own width
    ordered = sorted(columns.items(), key=lambda item: -item[1].dtype.itemsize)
    for name, column in ordered:
        nbytes = math.prod(column.shape) * column.dtype.itemsize
        header[name] = {
            "dtype": codes[column.dtype],
            "shape": list(column.shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    text = orjson.dumps(header)
    text = text.ljust((len(text) + 8 + 63) // 64 * 64 - 8)
    with disk.whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, column in ordered:
            for part in column.parts:
                file.write(part.data)


def load(
    path: Path,
    schema: Mapping[str, tuple[str, str]],
    widths: Mapping[str, int],
    may_lack: Collection[str] = (),
) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """The columns of a file that `save` wrote, without a copy. schema: by name (dtype, the length
    it has). widths: extent of a second axis. Raises OSError; ValueError, KeyError for a file that
    contradicts itself.
    """
    data = map_file(path)
    tensors = {tensor.name: tensor for tensor in parse_header(data)}
    columns = {}
    for name, (dtype, _) in schema.items():
        if name in may_lack and name not in tensors:
            continue
        tensor = tensors[name]
        raw = data[tensor.offset : tensor.offset + tensor.nbytes]
        column = raw.view(dtype).reshape(-1, *([widths[name]] if name in widths else []))
        if column.shape != tensor.shape:
            raise ValueError(f"its column {name} has the shape {tensor.shape}")
        columns[name] = column
    return columns


def check_lengths(
    columns: Mapping[str, np.ndarray[Any, np.dtype[Any]]],
    schema: Mapping[str, tuple[str, str]],
    lengths: Mapping[str, int],
) -> None:
    """Raises ValueError where a column does not have the length of its schema: one of `lengths` by
    name, or one more ("calls+1"); any other length is free.
    """
    for name, column in columns.items():
        length_name, _, extra = schema[name][1].partition("+")
        if length_name in lengths and len(column) != lengths[length_name] + int(extra or 0):
            raise ValueError(f"its column {name} has {len(column)} entries")
