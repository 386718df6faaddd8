"""All records of a tensor file of ATB and acltransformer (`outTensor0.bin`), of which `atb_file` reads the last.

Lines `key=value` up to `$End`, then the elements, little endian, in C order; written in append mode. Without `$Object` lines it is one
record, to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.parts import ascend_types, limits

_HEAD_BYTES = 1 << 20
_LINES = 1000


class AtbRecord(NamedTuple):
    """One tensor. dtype: whence's name, or what the file says where it has none. why: the reason where there are no elements."""

    attributes: dict[str, str]
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    why: str

    def array(self) -> Array:
        """The elements, mapped from the file. Raises ElementsMissing."""
        if self.why:
            raise ElementsMissing(self.why)
        kind = dtypes.named(self.dtype).numpy
        if not self.nbytes:
            return np.zeros(self.shape, kind)
        data = np.memmap(self.path, np.uint8, "r", self.offset, self.nbytes)
        return np.frombuffer(data, kind).reshape(self.shape)


def records(path: Path) -> list[AtbRecord]:
    """All tensors of a file, in the order in which they were written. Raises UnreadableRun when it does not begin as one, OSError."""
    return list(_records(path))


def _records(path: Path) -> Iterator[AtbRecord]:
    size, at = path.stat().st_size, 0
    with path.open("rb") as file:
        while at < size or not at:
            file.seek(at)
            try:
                attributes, begins = _head(file.read(_HEAD_BYTES), str(path))
            except UnreadableRun:
                if at:
                    return  # a record that was torn when its program ended
                raise
            begins += at
            found = _record(attributes, path, begins, size)
            yield found
            at = begins + found.nbytes
            if found.why.startswith("cut short"):
                return


def _head(data: bytes, path: str) -> tuple[dict[str, str], int]:
    """(attributes, where the elements begin)."""
    attributes: dict[str, str] = {}
    at = 0
    for _ in range(_LINES):
        end = data.find(b"\n", at)
        line = data[at:end].decode("utf-8", "surrogateescape")
        if end < 0 or "=" not in line:
            break
        key, _, value = line.partition("=")
        at = end + 1
        if key == "$End":
            return attributes, at
        attributes[key] = value
    raise UnreadableRun(f"{path} is not a tensor file of ATB: no lines key=value that end with $End=1")


def _record(attributes: dict[str, str], path: Path, begins: int, size: int) -> AtbRecord:
    def number(text: str, default: int) -> int:
        try:
            return int(text)
        except ValueError:
            return default

    code = number(attributes.get("dtype", ""), -1)
    dtype = attributes.get("whence.dtype") or ascend_types.acl(code).name
    try:
        shape = limits.extents([int(n) for n in attributes.get("dims", "").split(",") if n.strip()], str(path))
    except (ValueError, UnreadableRun):
        why = attributes.get("whence.why") or f"{attributes['dims'][:60]} is not a shape"
        return AtbRecord(attributes, dtype, (), path, begins, 0, why)
    stated = number(attributes["$Object.Length"], 0) if "$Object.Length" in attributes else size - begins
    stated = max(stated, 0)
    why = attributes.get("whence.why", "")
    if why or dtype not in dtypes.DTYPES:
        return AtbRecord(attributes, dtype, shape, path, begins, stated, why or f"elements of {dtype} are not read")
    need = limits.count(shape) * dtypes.named(dtype).itemsize
    if "data" in attributes and not stated:
        why = f"refers to {attributes['data'][:80]}, where the same elements were saved before"
    elif attributes.get("$Object.Count") == "0":
        why = "only described: the file holds no elements"
    elif need > stated:
        why = f"{stated} bytes are said to be there, {dtype} {list(shape)} takes {need}"
    elif begins + need > size:
        why = f"cut short: {size - begins} of {need} bytes"
    return AtbRecord(attributes, dtype, shape, path, begins, need if not why and "$Object.Length" not in attributes else stated, why)
