"""One tensor file of ATB (acltransformer): lines of text up to `$End=1`, then the elements.

    $Version=1.0 / $Object.Count=1 / $Object.Length=96 / format=2 / dtype=0 / dims=2,3,4 / $Object.data=0,96 / $End=1

Variants: without `$Version` (elements to the end of the file), a description without elements,
statistics, and a reference (`data=2_1_outtensor0.bin`) to the file of another operator. The writer
appends: of several tensors in a file the last one counts, unless one asks for all.
"""  # noqa: E501

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.ascend import dtypes, layouts
from whence.readers.encodings import limits
from whence.readers.encodings.archive import bytes_of
from whence.records import Statistics

_END = b"$End=1\n"
_HEADER_BYTES = 1 << 16
_RECORDS = 1000  # in one file, to find its last
_FIGURES = ("max", "min", "mean", "l2norm")


class Stored(NamedTuple):
    """The content of one tensor header.

    start, nbytes: of the elements. data: the file that holds them instead, "" for this one. why:
    the reason if there are no elements. records: number of tensors in the file. attributes: all of
    its header.
    """

    type: dtypes.Type
    dims: tuple[int, ...]
    layout: layouts.Layout
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
    """Whether these first bytes start such a file."""
    if head.startswith(b"$Version="):
        return True
    header = _lines(head)
    return header is not None and {"dtype", "dims"} <= header[0].keys()


def read(path: Path) -> Stored:
    """Returns the last tensor of a file. Raises UnreadableRun that says what is wrong with it."""
    size, count = path.stat().st_size, 0
    for head in itertools.islice(_heads(path, size), _RECORDS):  # noqa: B007 - the last one is meant
        count += 1
    return _stored(path, size, *head, count)


def tensors(path: Path) -> list[Stored]:
    """Returns all tensors of a file, in the order in which they were written; a truncated one has
    `why`. Raises UnreadableRun when the file does not begin like an ATB file, OSError.
    """
    size = path.stat().st_size
    out: list[Stored] = []
    for attributes, start, nbytes in _heads(path, size):
        try:
            stored = _stored(path, size, attributes, start, nbytes, 1)
        except UnreadableRun as error:
            kind, nowhere = dtypes.acl(-1), layouts.logical(2, (), ())
            stored = Stored(
                kind,
                (),
                nowhere,
                start,
                0,
                "",
                attributes.get("whence.why") or str(error),
                None,
                1,
                attributes,
            )
        out.append(stored)
    return out


def _heads(path: Path, size: int) -> Iterator[tuple[dict[str, str], int, int]]:
    """Returns (attributes, start of the elements, their bytes) of every tensor of a file; at least
    one.
    """
    place = count = 0
    with path.open("rb") as file:
        while place < size:
            file.seek(place)
            head = file.read(_HEADER_BYTES)
            if count and not head.startswith((b"$Version=", b"format=", b"dtype=")):
                return
            lines = _lines(head)
            if lines is None:
                if count:
                    return  # torn when its program ended
                problem = f"no lines key=value that end with $End=1 in its first {len(head)} bytes"
                raise UnreadableRun(f"{path.name} is not a tensor file of ATB: {problem}")
            attributes, length = lines
            start = place + length
            declared = attributes.get("$Object.Length")
            nbytes = _number(declared, path) if declared is not None else size - start
            if "max" in attributes or "data" in attributes:
                nbytes = _number(declared, path) if declared is not None else 0
            yield attributes, start, nbytes
            count += 1
            place = start + max(nbytes, 0)
    if not count:
        raise UnreadableRun(f"{path.name} is not a tensor file of ATB: it is empty")


def elements(path: Path, stored: Stored) -> Array:
    """Returns the tensor, memory-mapped where it is stored as is. Raises ElementsMissing with the
    reason when there are none.
    """
    if stored.why:
        raise ElementsMissing(stored.why)
    size = path.stat().st_size
    nbytes = max(min(stored.nbytes, size - stored.start), 0)
    data = bytes_of(path, stored.start, nbytes)
    return stored.layout.apply(dtypes.decoded(stored.type, data, stored.dims))


def _lines(head: bytes) -> tuple[dict[str, str], int] | None:
    """Returns (attributes, bytes of the header), each line split at its first `=`; None when the
    header does not end here.
    """
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


def _stored(
    path: Path, size: int, attributes: dict[str, str], start: int, nbytes: int, records: int
) -> Stored:
    dtype_name = attributes.get("whence.dtype")  # of a label, where the code has no word for it
    kind = (
        dtypes.named(dtype_name)
        if dtype_name
        else dtypes.acl(_number(attributes.get("dtype", "-1"), path))
    )
    dims = limits.extents(
        [_number(d, path) for d in attributes.get("dims", "").split(",") if d.strip()], path.name
    )
    layout = layouts.logical(_number(attributes.get("format", "2"), path), dims, ())
    offset, _, length = attributes.get("$Object.data", "").partition(",")
    if length:  # relative to where the elements begin
        start, nbytes = (
            start + _number(offset, path),
            min(_number(length, path), max(nbytes - _number(offset, path), 0)),
        )
    need = dtypes.nbytes(kind, limits.count(dims))
    available = max(min(nbytes, size - start), 0)
    statistics = _statistics(attributes, limits.count(dims))
    why = attributes.get("whence.why", "")
    if why:
        pass
    elif not kind.dtype:
        why = f"elements of {kind.name} are not read"
    elif attributes.get("data"):
        pass
    elif statistics is not None:
        why = "the dump holds its statistics only"
    elif not available and need:
        why = "the dump holds its description only"
    elif available < need:
        why = f"{path.name} has {available} of {need} bytes: the file was cut short"
    return Stored(
        kind,
        dims,
        layout,
        start,
        nbytes,
        attributes.get("data", ""),
        why,
        statistics,
        records,
        attributes,
    )


def _statistics(attributes: dict[str, str], count: int) -> Statistics | None:
    """Returns the statistics that a file states; it does not count NaN and zeros."""
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
