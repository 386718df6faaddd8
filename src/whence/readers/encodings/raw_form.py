"""Finds the dtype and shape of raw bytes: in words of a user, names of files, and JSON that people
write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whence import dtypes
from whence.errors import UnreadableRun, UsageError
from whence.readers.encodings import limits

_SHAPES = ("shape", "dims", "dimensions", "size", "sizes")
_DTYPES = ("dtype", "data_type", "type", "datatype")
_SHORT = {
    "f64": "float64", "f32": "float32", "fp32": "float32", "float": "float32", "f16": "float16",
    "fp16": "float16", "half": "float16", "bf16": "bfloat16", "double": "float64", "i64": "int64",
    "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8", "int": "int32", "long": "int64",
}  # fmt: skip
SUFFIXES = frozenset((".bin", ".raw", ".dat", *(f".{word}" for word in (*_SHORT, *dtypes.DTYPES))))
"""Endings of names of files that hold elements and nothing else."""
_OF_NAME = re.compile(r"(?<![a-zA-Z0-9])(\d{1,9}(?:x\d{1,9})+)(?![a-zA-Z0-9])")
_EXTENT = re.compile(r"(?<![\w.])\d{1,18}(?![\w.])")
_WORD = re.compile(r"[a-zA-Z]+\d*(?:_e\dm\d(?:fn)?)?")
_COUNTED = re.compile(r"(\d{1,12}): [-+.\deEnaif]{1,40}\n?$")


@dataclass(frozen=True, slots=True)
class Form:
    """The dtype and shape of raw bytes. start: bytes in front of the elements."""

    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def text(self) -> str:
        """The form that `read` accepts."""
        return f"{'x'.join(map(str, self.shape)) or '1'}:{self.dtype}"


def read(text: str) -> Form:
    """Parses "2x12x64:float32". Raises UsageError."""
    shape, _, word = text.partition(":")
    dtype = _dtype(word or "float32")
    if not dtype or not re.fullmatch(r"\d{1,18}(x\d{1,18})*", shape):
        raise UsageError(f"{text!r} is not a shape and dtype such as 2x12x64:float32")
    return Form(dtype, tuple(map(int, shape.split("x"))))


def of_text(text: str, size: int) -> Form | None:
    """Returns the form in the name of a file such as x_2x12x64_float32, for `size` bytes; None
    without one.
    """
    match = _OF_NAME.search(text)
    if match is None:
        return None
    shape = tuple(map(int, match[1].split("x")))
    dtype = next(
        filter(None, map(_dtype, _WORD.findall(text[: match.start()] + text[match.end() :]))), ""
    )
    return _sized(shape, dtype, size)


def of_value(value: Any, size: int) -> Form | None:
    """Returns the form that a describing file states: {"shape": [2, 3], "dtype": "float32"}, [2,
    3], "2x3:float32", "2 3 float32", or the lines "0: 1.5" of the elements as text.
    """
    if isinstance(value, dict):
        shape = next((_shape(value[key]) for key in _SHAPES if key in value), None)
        word = next((value[key] for key in _DTYPES if isinstance(value.get(key), str)), "")
        return _sized(shape, _dtype(word), size) if shape is not None else None
    if isinstance(value, str) and (counted := _COUNTED.search(value[-80:])):
        return _sized((int(counted[1]) + 1,), "float32", size)
    shape = _shape(value)
    words = _WORD.findall(value) if isinstance(value, str) else ()
    dtype = next(filter(None, map(_dtype, words)), "")
    return _sized(shape, dtype, size) if shape else None


def of_header(head: bytes, size: int) -> Form | None:
    """Returns the form that a file of `size` bytes states in front of its elements, in a line of
    words or in integers with the number of axes before the extents, if its size is just that; None
    without one. head: the first bytes of the file.
    """
    line, end, _ = head.partition(b"\n")
    if end and (words := line.decode("latin-1")).isascii() and words.isprintable():
        dtype = next(filter(None, map(_dtype, _WORD.findall(words))), "")
        extents = [int(n) for n in _EXTENT.findall(words.replace("x", " "))]
        return _behind(len(line) + 1, size, dtype, [extents[n:] for n in range(len(extents))])
    for width in (4, 8):
        numbers = np.frombuffer(head[: len(head) // width * width], f"<u{width}").tolist()
        for place, count in enumerate(numbers[:_BEFORE_EXTENTS]):
            for between in (0, 1) if 0 < count <= limits.RANK else ():  # perhaps a code of a dtype
                first, last = place + 1 + between, place + 1 + between + count
                form = _behind(last * width, size, "", [numbers[first:last]])
                if form is not None and len(form.shape) == count:
                    return form
    return None


_BEFORE_EXTENTS = 3
"""Most integers of a header up to the number of axes: a mark, a dtype, that number."""


def _behind(start: int, size: int, dtype: str, shapes: Sequence[list[int]]) -> Form | None:
    """Returns the first of the shapes that fills what is behind the header."""
    for shape in map(tuple, shapes):
        form = _sized(shape, dtype, size - start) if 0 < limits.count(shape) <= size else None
        if form and limits.count(shape) * dtypes.named(form.dtype).itemsize == size - start:
            return Form(form.dtype, shape, start)
    return None


def like(shape: tuple[int, ...], dtype: str, size: int) -> Form | None:
    """Returns the form of `size` bytes that hold a tensor of the other run's shape; floats may have
    another width.
    """
    if size == limits.count(shape) * dtypes.named(dtype).itemsize:
        return Form(dtype, shape)
    is_floating = dtypes.named(dtype).is_floating
    return _sized(shape, "", size) if is_floating and size % 4 == 0 else None


def _sized(shape: tuple[int, ...], dtype: str, size: int) -> Form | None:
    """Returns the form with the given dtype; without one, with the float dtype whose width fits the
    size.
    """
    count = limits.count(shape)
    if dtype or not count:
        return Form(dtype or "float32", shape)
    width = {4: "float32", 8: "float64"}.get(size // count if size % count == 0 else 0)
    return Form(width, shape) if width else None


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, str):
        head = re.sub(r"[(\[\])]", " ", value.partition(":")[0])
        value = [int(n) for n in _EXTENT.findall(head.replace("x", " "))]
    try:
        return limits.extents(value, "a description") or None
    except UnreadableRun:
        return None


def _dtype(word: str) -> str:
    """Returns whence's name of a type, "" for an unknown word."""
    plain = word.lower().rpartition(".")[2]
    plain = _SHORT.get(plain, plain)
    if plain in dtypes.DTYPES:
        return plain
    try:
        return dtypes.of(np.empty(0, np.dtype(word))).name if word[:1] in "<>=|" and word else ""
    except (TypeError, KeyError, ValueError):
        return ""


Forms = Mapping[str, Form]
"""Pattern of names of files or tensors -> form."""
