"""Reads the .npy format, in files and inside other formats: the header first, then the elements in
place. Pickles are never loaded.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.encodings import limits
from whence.readers.encodings.archive import Bytes, all_read, words

MAGIC = b"\x93NUMPY"
HEAD_BYTES = 10_012  # numpy reads headers of at most 10 000 bytes itself
# numpy's names of the types of ml_dtypes; of the 8-bit ones only e5m2 has a name of its own.
_UNNAMED = {"V2": ml_dtypes.bfloat16, "f1": ml_dtypes.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Header:
    """A .npy header. dtype: whence's name, or numpy's with `why` when elements cannot be read.
    start: of the elements, in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    word: np.dtype[np.generic] | None = None
    fortran: bool = False
    why: str = ""

    @property
    def holds_objects(self) -> bool:
        """Whether a pickle follows the header."""
        return self.dtype.lstrip("<>=|")[:1] == "O"


def header(head: bytes, label: str) -> Header:
    """Reads a header. head: the first 10 012 bytes, fewer where there are fewer. Raises
    UnreadableRun.
    """
    if head[:6] != MAGIC or len(head) < 12:
        raise UnreadableRun(f"{label} is no .npy file")
    wide = head[6] > 1
    length, start = (
        (int.from_bytes(head[8:12], "little"), 12)
        if wide
        else (int.from_bytes(head[8:10], "little"), 10)
    )
    if head[6] not in (1, 2, 3) or start + length > len(head):
        raise UnreadableRun(
            f"{label}: a .npy header of version {head[6]} with {length} bytes cannot be read"
        )
    try:
        descr, fortran, shape = _fields(head[start : start + length])
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise UnreadableRun(f"{label}: its .npy header cannot be read") from error
    extents = limits.extents(shape, label)
    word, why = _word(descr)
    name = dtypes.of(np.empty(0, word)).name if word is not None else str(descr)[:40]
    return Header(name, extents, start + length, word, bool(fortran), why)


@functools.lru_cache(maxsize=1024)
def _fields(text: bytes) -> tuple[object, object, object]:
    """Returns descr, fortran_order and shape; cached, since the files of a folder share a few
    headers.
    """
    # Python 2 wrote (3L, 4L).
    fields = ast.literal_eval(re.sub(r"(\d)L\b", r"\1", text.decode("latin1")).strip())
    return fields["descr"], fields["fortran_order"], fields["shape"]


def array(header: Header, data: Bytes, label: str) -> Array:
    """Returns the array. data: the bytes of its file, or of its part of one. Raises ElementsMissing
    when there are too few, UnreadableRun when there are more.
    """
    if header.word is None:
        raise ElementsMissing(f"{label} {header.why}")
    nbytes = limits.count(header.shape) * header.word.itemsize
    if header.start + nbytes > data.size:
        raise ElementsMissing(
            f"{label}: {header.dtype} {header.shape} needs {nbytes} bytes, "
            f"{max(data.size - header.start, 0)} are there"
        )
    all_read(data[header.start + nbytes :], label)
    if not nbytes:
        return np.empty(header.shape, dtypes.named(header.dtype).numpy)
    flat = words(data[header.start : header.start + nbytes], header.word)
    return flat.reshape(header.shape, order="F" if header.fortran else "C").astype(
        dtypes.named(header.dtype).numpy, copy=False
    )


def bits(header: Header, data: Bytes, label: str) -> Array:
    """Returns the array, or its elements as integers where numpy has no name for their
    8-bit type.
    """
    if header.word is None and header.dtype.endswith("V1"):
        header = replace(header, dtype="uint8", word=np.dtype(np.uint8))
    return array(header, data, label)


def _word(descr: object) -> tuple[np.dtype[np.generic] | None, str]:
    """Returns (dtype of the stored elements, why they cannot be read or "")."""
    if not isinstance(descr, str):
        return None, "is a structured array; save each field by itself"
    kind = descr.lstrip("<>=|")
    if kind in _UNNAMED:
        return np.dtype(_UNNAMED[kind]), ""
    if kind[:1] == "O":
        return None, "holds pickled objects, and no tensor in them"
    if kind == "V1":
        return None, "has an 8-bit type that numpy does not name (float8, int4); save it as float32"
    try:
        word = np.dtype(descr)
        dtypes.of(np.empty(0, word))
    except (TypeError, KeyError, ValueError):
        return None, f"holds {descr[:40]!r}, no type of numbers that is known"
    return word, ""
