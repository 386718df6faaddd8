"""Tensors as torch prints them: nested brackets of numbers, with dots where elements were left
out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import UnreadableRun
from whence.readers.encodings import limits

_TOKEN = re.compile(
    r"[\[\]]|\.\.\.|[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)j?|True|False|[A-Za-z_]\w*=?"
)
_DIGITS = re.compile(r"\d+(?:\.(\d*))?(?:[eE]([-+]?\d+))?")


@dataclass(frozen=True, slots=True)
class Printed:
    """What a print shows. array: of these elements only. quantum: step of the last digit of the
    largest. is_part: were some left out?
    """

    array: Array
    quantum: float
    is_part: bool


def parse(text: str, dtype: str) -> Printed:
    """Read a print of a tensor of this dtype. Raises UnreadableRun when it is none, or ragged."""
    numbers, shape, is_part = _tokens(text)
    kind = dtypes.named(dtype)
    if kind.kind == "complex":
        raise UnreadableRun("complex numbers are not read from prints")
    if kind.kind == "bool":
        return Printed(
            np.array([token == "True" for token in numbers], np.bool_).reshape(shape), 0.0, is_part
        )
    if kind.kind in ("int", "uint"):
        return Printed(
            np.array([int(token) for token in numbers], kind.numpy).reshape(shape), 0.0, is_part
        )
    values = np.array([float(token) for token in numbers], np.float64)
    with np.errstate(over="ignore"):
        return Printed(
            values.astype(kind.numpy).reshape(shape), max(map(step, numbers), default=0.0), is_part
        )


def _tokens(text: str) -> tuple[list[str], tuple[int, ...], bool]:
    """(numbers as printed, shape, were some left out?)."""
    numbers: list[str] = []
    counts: dict[int, set[int]] = defaultdict(set)  # lengths of the rows at each depth
    open_: list[int] = []
    is_part = False
    for match in _TOKEN.finditer(text, text.find("(") + 1):
        token = match[0]
        if token == "[":
            if len(open_) == limits.RANK:
                raise UnreadableRun("brackets are nested too deeply")
            open_.append(0)
        elif token == "]":
            if not open_:
                raise UnreadableRun("a bracket is closed that was not opened")
            counts[len(open_) - 1].add(open_.pop())
            if not open_:
                break
            open_[-1] += 1
        elif token == "...":
            is_part = True
        elif token[0].isalpha() and token not in ("nan", "inf", "True", "False"):
            break
        else:
            numbers.append(token)
            if not open_:
                break
            open_[-1] += 1
    if open_ or any(len(lengths) != 1 for lengths in counts.values()):
        raise UnreadableRun("rows of the print have different lengths")
    shape = tuple(counts[depth].pop() for depth in range(len(counts)))
    if limits.count(shape) != len(numbers):
        raise UnreadableRun(f"{len(numbers)} numbers do not fill {shape}")
    return numbers, shape, is_part


def step(number: str) -> float:
    """The step of the last digit of a printed number: 1e-5 for 1.2345e-01; 0 for whole numbers,
    which torch prints as they are.
    """
    match = _DIGITS.search(number)
    if match is None or not match[1]:
        return 0.0
    return float(10.0 ** min(max(int(match[2] or 0) - len(match[1]), -300), 300))
