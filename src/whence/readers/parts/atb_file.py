"""One tensor file of ATB (acltransformer): lines of text up to `$End=1`, then the elements.

    $Version=1.0 / $Object.Count=1 / $Object.Length=96 / format=2 / dtype=0 / dims=2,3,4 / $Object.data=0,96 / $End=1

Variants: without `$Version` (elements to the end of the file), a description without elements, statistics, and a reference
(`data=2_1_outtensor0.bin`) to the file of another operator. The writer appends: of several records in a file the last one counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from whence.dtypes import Array
from whence.errors import UnreadableRun
from whence.readers.parts import ascend_layouts, ascend_types, limits
from whence.records import Statistics

_END = b"$End=1\n"
_HEADER_BYTES = 1 << 16
_RECORDS = 1000  # in one file
_FIGURES = ("max", "min", "mean", "l2norm")


class Stored(NamedTuple):
    """What a file says. start, nbytes: of the elements. data: the file they are in instead, "" for this one. why: there are no
    elements, and the reason. records: in the file; attributes: all of its header.
    """

    type: ascend_types.Type
    dims: tuple[int, ...]
    layout: ascend_layouts.Layout
    start: int
    nbytes: int
    data: str
    why: str
    statistics: Statistics | None
    records: int
    attributes: dict[str, str]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape


def recognised(head: bytes) -> bool:
    """Do these first bytes start such a file?"""
    if head.startswith(b"$Version="):
        return True
    found = _lines(head)
    return found is not None and {"dtype", "dims"} <= found[0].keys()


def read(path: Path) -> Stored:
    """The last header of a file. Raises UnreadableRun saying what is wrong with it."""
    size = path.stat().st_size
    place, count = 0, 0
    found: tuple[dict[str, str], int, int] | None = None
    with path.open("rb") as file:
        while place < size and count < _RECORDS:
            file.seek(place)
            head = file.read(_HEADER_BYTES)
            if count and not head.startswith((b"$Version=", b"format=", b"dtype=")):
                break
            lines = _lines(head)
            if lines is None:
                if count:
                    break
                raise UnreadableRun(f"{path.name} has no $End=1 within its first {len(head)} bytes")
            attributes, length = lines
            start = place + length
            said = attributes.get("$Object.Length")
            nbytes = _number(said, path) if said is not None else size - start
            if "max" in attributes or "data" in attributes:
                nbytes = _number(said, path) if said is not None else 0
            found, count = (attributes, start, nbytes), count + 1
            place = start + nbytes
    if found is None:
        raise UnreadableRun(f"{path.name} is empty")
    return _stored(path, size, *found, count)


def elements(path: Path, stored: Stored) -> Array:
    """The tensor, memory-mapped where it lies plain. Raises ElementsMissing when bytes are missing."""
    size = path.stat().st_size
    nbytes = max(min(stored.nbytes, size - stored.start), 0)
    data: Array = np.memmap(path, np.uint8, "r", stored.start, (nbytes,)) if nbytes else np.empty(0, np.uint8)
    return stored.layout.apply(ascend_types.decoded(stored.type, data, stored.dims))


def _lines(head: bytes) -> tuple[dict[str, str], int] | None:
    """(attributes, bytes of the header), split at the first `=` of every line; None when it does not end here."""
    out: dict[str, str] = {}
    place = 0
    while True:
        end = head.find(b"\n", place)
        if end < 0 or b"=" not in head[place:end]:
            return None
        line = head[place : end + 1]
        place = end + 1
        if line == _END:
            return out, place
        name, _, value = line[:-1].decode("utf-8", "backslashreplace").partition("=")
        out[name] = value


def _stored(path: Path, size: int, attributes: dict[str, str], start: int, nbytes: int, records: int) -> Stored:
    kind = ascend_types.acl(_number(attributes.get("dtype", "-1"), path))
    dims = limits.extents([_number(d, path) for d in attributes.get("dims", "").split(",") if d.strip()], path.name)
    layout = ascend_layouts.logical(_number(attributes.get("format", "2"), path), dims, ())
    offset, _, length = attributes.get("$Object.data", "").partition(",")
    if length:  # relative to where the elements begin
        start, nbytes = start + _number(offset, path), min(_number(length, path), max(nbytes - _number(offset, path), 0))
    need = ascend_types.nbytes(kind, limits.count(dims))
    there = max(min(nbytes, size - start), 0)
    statistics = _statistics(attributes, limits.count(dims))
    why = ""
    if not kind.dtype:
        why = f"elements of {kind.name} are not read"
    elif attributes.get("data"):
        pass
    elif statistics is not None:
        why = "the dump holds its statistics only"
    elif not there and need:
        why = "the dump holds its description only"
    elif there < need:
        why = f"{path.name} has {there} of {need} bytes: the file was cut short"
    return Stored(kind, dims, layout, start, nbytes, attributes.get("data", ""), why, statistics, records, attributes)


def _statistics(attributes: dict[str, str], count: int) -> Statistics | None:
    """What a file of figures says; NaN and zeros were not counted."""
    if not all(name in attributes for name in _FIGURES):
        return None
    try:
        high, low, mean, norm = (float(attributes[name]) for name in _FIGURES)
    except ValueError:
        return None
    return Statistics(count, low, high, mean, None, norm, 0, 0, 0)


def _number(text: str, path: Path) -> int:
    text = text.strip()
    if len(text) > 20 or not text.removeprefix("-").isdecimal():
        raise UnreadableRun(f"{path.name}: {text[:40]!r} is not a number")
    return int(text)
