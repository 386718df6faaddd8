"""How Paddle prints a tensor: where its text begins and ends, what it says of itself, its elements.

`Tensor(shape=[2], dtype=float32, place=Place(cpu), stop_gradient=True,\\n       [1.50000000, 2.
])`; precision, threshold and notation are the user's (`paddle.set_printoptions`) and are read off
the digits. Layout as printed by Paddle 2.4 to 3.3.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.encodings import limits

HEADER = re.compile(
    rb"Tensor\(shape=\[([\d, ]{0,1500})\], dtype=(?:paddle\.|VarType\.)?(\w{1,40}), place=(?:Custom)?Place\(([^)\n]{0,60})\), "  # noqa: E501
    rb"stop_gradient=(?:True|False),[ \t]*\r?\n?"
)
GLOG = re.compile(rb"[IWEF](?:\d{4}|\d{8}) \d\d:\d\d:\d\d\.\d+ +\d+ [^\s\]]+:\d+\] ?")
_END = re.compile(rb"\)(?=[ \t]*(?:\r?\n|\Z)|[IWEF](?:\d{4}|\d{8}) \d\d:)")
_LINE = re.compile(
    rb"(?:\x1b\[[\d;]{0,10}m)*[IWEF](?:\d{4}|\d{8}) \d\d:\d\d:\d\d\.\d+ +\d+ [^\n]*(?:\n|\Z)"
)
_BLOCK = re.compile(rb"(===>:[^\n]*\n)[^\n]*(?:\n|\Z)")
_FRACTION = re.compile(rb"\.(\d+)")
_POWER = re.compile(rb"\.(\d+)e([-+]\d+)")
_ANSI = re.compile(rb"\x1b\[[\d;]{0,10}m")
_BLANK = bytes.maketrans(b"[](),\r\n\t", b"        ")
LONGEST_ROW = 1 << 14  # characters of a row of numbers that a kernel logs
_EDGES = 1 << 20  # of a summarised axis that may be shown at either end
_ENDS = 8  # places that may be the end of one print and are not: ends of log lines within


class Printed(NamedTuple):
    """A printed tensor, as described by its text.

    shape: of the printed elements. whole: of the tensor, () when all are printed. quantum: step of
    the last digit, 0 when the text is exact for this dtype. start, end: bytes of the elements'
    text. why: the reason if there are no elements, "".
    """

    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    quantum: float
    device: str
    start: int
    end: int
    clean: bool
    why: str


def read(text: Any, header: re.Match[bytes], limit: int) -> Printed:
    """Reads the print that begins with a header; its elements end before `limit`. Linear in the
    text; converts no number.
    """
    dtype, start = header[2].decode(), header.end()
    printed = Printed(
        dtype, (), (), 0.0, header[3].decode("utf-8", "replace"), start, start, False, ""
    )
    try:
        shape = limits.extents(
            [int(n) for n in header[1].split(b",") if n.strip()][: limits.RANK + 1], "its print"
        )
    except (UnreadableRun, ValueError) as error:
        return printed._replace(why=str(error))
    printed = printed._replace(shape=shape)
    count, end, first_end = limits.count(shape), start, -1
    is_complex = dtype in ("complex64", "complex128")
    for _ in range(_ENDS):
        match = _END.search(text, end, limit)
        if match is None:
            break
        end = match.end()
        first_end = end if first_end < 0 else first_end
        body, clean = text[start : end - 1], True
        if GLOG.search(body):
            body, clean = without_log(body), False
        if is_complex or _is_sparse(body):
            break
        values, dots = _values(body)
        if values == count if not dots else values <= count:
            complete = _with_elements(printed, body, values, dots)
            if complete is not None:
                return complete._replace(end=end, clean=clean)
    if first_end < 0:
        return printed._replace(end=limit, why="the print breaks off")
    body = text[start : end - 1]
    if _is_sparse(body):
        return printed._replace(end=end, why="a sparse tensor; its print is not read")
    if is_complex:
        values, dots = _values(body)
        complete = _with_elements(printed, body, values, dots)
        if complete is not None and (dots or values == count):
            return complete._replace(end=end)
    values, dots = _values(without_log(text[start : first_end - 1]))
    why = (
        f"its print has {values} elements{' and dots' if dots else ''} where shape "
        f"{list(shape)} needs {count}"
    )
    return printed._replace(end=first_end, why=why)


def _is_sparse(body: bytes) -> bool:
    return body.lstrip()[:7] in (b"indices", b"crows=[")


def _with_elements(printed: Printed, body: bytes, values: int, dots: int) -> Printed | None:
    """Returns the print with the shape of the elements it shows; None where its dots omit more or
    less than a summary does.
    """
    shape = printed.shape
    visible = _visible_shape(shape, values) if dots else shape
    if visible is None:
        return None
    return printed._replace(
        shape=visible, whole=shape if dots else (), quantum=_quantum(body, printed.dtype)
    )


def elements(text: bytes, printed: Printed) -> Array:
    """Returns the elements of a print, in its dtype and shape. text: returns its bytes. Raises
    ElementsMissing.
    """
    body = text[: -1 if text.endswith(b")") else None] if printed.clean else without_log(text[:-1])
    kind = dtypes.named(printed.dtype)
    count = limits.count(printed.shape)
    if not count:
        return np.empty(printed.shape, kind.numpy)
    if printed.clean and kind.kind in ("float", "int", "uint") and b"..." not in body:
        plain = body.translate(_BLANK).replace(b"inf.", b"inf")
        values = _fast(plain, np.int64 if kind.kind != "float" else np.float64)
        if values is not None and values.size == count:
            return _cast(values, kind, printed.shape)
    fields = [field for field in _fields(body) if field != b"..."]
    if len(fields) != count:
        raise ElementsMissing(
            f"its print has {len(fields)} elements where shape {list(printed.shape)} needs {count}"
        )
    return _cast(_slow(fields, kind.kind), kind, printed.shape)


def numbers(text: bytes) -> tuple[Array, float] | None:
    """Returns (values, step of the last of 8 significant digits) of a row such as `0.125, -3, nan,
    `; None for any other row.

    values: float64, or int64 when none has a fraction.
    """
    fields = [field.strip() for field in text.split(b",")]
    if not text.strip() or (fields and fields[-1] == b"" and len(fields) == 1):
        return None
    fields = fields[:-1] if fields[-1] == b"" else fields
    try:
        if all(re.fullmatch(rb"-?\d{1,18}", field) for field in fields):
            return np.array([int(field) for field in fields], np.int64), 0.0
        values = np.array(
            [float(field) for field in fields if _NUMBER.fullmatch(field)], np.float64
        )
    except ValueError:
        return None
    if values.size != len(fields):
        return None
    top = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    return values, float(10.0 ** (np.floor(np.log10(top)) - 7)) if top else 0.0


_NUMBER = re.compile(rb"[-+]?(?:\d{1,40}\.?\d{0,60}(?:e[-+]?\d{1,4})?|inf|nan)")


def without_log(body: bytes) -> bytes:
    """Returns a print without the lines that a logger wrote into it."""
    body = _ANSI.sub(b"", body)

    body = _LINE.sub(lambda line: b"===>:\n" if b"===>:" in line[0] else b"", body)
    return _BLOCK.sub(b"", body)


def _values(body: bytes) -> tuple[int, int]:
    """Returns (numbers, rows of dots) in the text of nested lists."""
    dots = body.count(b"...")
    if b"," not in body:
        return (1 if body.translate(_BLANK).strip() and not dots else 0), dots
    if not body.translate(None, b"[], \r\n\t"):
        return 0, 0  # [[], []]
    return body.count(b",") + 1 - dots, dots


def _visible_shape(shape: tuple[int, ...], values: int) -> tuple[int, ...] | None:
    """Returns the shape of the elements in a summary that shows `values` of them: axes longer than
    twice the edge keep both edges. None if no edge fits.
    """
    low, high = 1, max(min(max(shape, default=0), _EDGES), 1)
    while low < high:
        edge = (low + high) // 2
        if limits.count(tuple(min(n, 2 * edge) for n in shape)) < values:
            low = edge + 1
        else:
            high = edge
    visible = tuple(min(n, 2 * low) for n in shape)
    return visible if limits.count(visible) == values and values else None


def _quantum(body: bytes, dtype: str) -> float:
    """Returns the step of the last digit, the largest where it differs by element; 0 where the
    dtype's numbers are further apart.
    """
    element_type = dtypes.DTYPES.get(dtype)
    if element_type is None or not element_type.is_floating:
        return 0.0
    if b"e" in body:
        powers = [(len(match[1]), int(match[2][:6])) for match in _POWER.finditer(body)]
        return max(
            (10.0 ** max(min(power - digits, 300), -320) for digits, power in powers), default=0.0
        )
    fraction = _FRACTION.search(body)
    if fraction is None:
        return 0.0  # whole numbers are printed to the last digit
    step = float(10.0 ** -min(len(fraction[1]), 300))
    return 0.0 if dtype in _FINEST and step < _FINEST[dtype] else step


# smallest distance between two numbers of the dtype
_FINEST = {"float16": 2.0**-24, "float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}


def _fast(text: bytes, kind: type) -> Array | None:
    import warnings

    with warnings.catch_warnings():
        # numpy's way to say that it stopped at something
        warnings.simplefilter("error", DeprecationWarning)
        try:
            return np.fromstring(text, dtype=kind, sep=" ")
        except (DeprecationWarning, ValueError, OverflowError):
            return None


def _fields(body: bytes) -> list[bytes]:
    """Returns the last word of each text between commas: words before it are a line number or the
    mark of a diff.
    """
    fields = []
    for field in body.replace(b"[", b" ").replace(b"]", b" ").split(b","):
        words = field.split()
        if words:
            fields.append(words[-1])
    return fields


def _slow(fields: list[bytes], kind: str) -> Array:
    try:
        if kind == "bool":
            return np.array([_BOOL[field] for field in fields], np.bool_)
        if kind == "complex":
            return np.array(
                [complex(field.strip(b"()").decode()) for field in fields], np.complex128
            )
        if kind in ("int", "uint"):
            return np.array([int(field) for field in fields if len(field) <= 21], np.int64)
        return np.array([float(field) for field in fields], np.float64)
    except (KeyError, ValueError, OverflowError) as error:
        raise ElementsMissing(f"its print holds what is not a number: {str(error)[:80]}") from error


_BOOL = {b"True": True, b"False": False, b"1": True, b"0": False}


def _cast(values: Array, kind: dtypes.DType, shape: tuple[int, ...]) -> Array:
    if values.size != limits.count(shape):
        raise ElementsMissing(
            f"its print has {values.size} elements where shape {list(shape)} needs "
            f"{limits.count(shape)}"
        )
    if (
        kind.kind in ("int", "uint")
        and kind.bits < 64
        and not np.array_equal(values.astype(kind.numpy), values)
    ):
        raise ElementsMissing(f"its print holds numbers that {kind.name} has not")
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(kind.numpy).reshape(shape)
