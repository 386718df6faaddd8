"""Columns of numbers as a safetensors file, written in parts, and a journal read in blocks: a run
of any length gets its index in little memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from whence import disk
from whence.dtypes import DTYPES
from whence.store.shards import Bytes


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
