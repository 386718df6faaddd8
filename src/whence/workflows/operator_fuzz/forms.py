"""The inputs of a kernel as a user declares them: "x: float32[rows, cols]"."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from whence import dtypes
from whence.errors import UsageError

_FORM = re.compile(r"\s*(\w+)\s*:\s*(\w+)\s*\[([^\]]*)\]\s*(?:<\s*(\w+))?\s*$")
_EXTENT = re.compile(r"(?:(\d+)\s*\*\s*)?([A-Za-z_]\w*)|(\d+)")
_EXAMPLE = (
    "written like 'x: float32[rows, cols]', 'w: float32[2*cols]' or 'index: int64[rows] < cols'"
)


@dataclass(frozen=True)
class Extent:
    """A size written as factor * size of a dimension; a fixed size has the name ""."""

    factor: int
    name: str = ""

    def of(self, sizes: Mapping[str, int]) -> int:
        """The extent for the given sizes of the dimensions."""
        return self.factor * sizes[self.name] if self.name else self.factor


@dataclass(frozen=True)
class Form:
    """A declared input or output tensor.

    below: for whole numbers, the dimension whose size bounds the values from above, "" for any.
    """

    name: str
    dtype: str
    extents: tuple[Extent, ...]
    below: str = ""

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape for the given sizes of the dimensions."""
        return tuple(extent.of(sizes) for extent in self.extents)

    @property
    def is_floating(self) -> bool:
        """Whether its dtype is a floating-point one, so that results round."""
        return dtypes.is_floating(self.dtype)


def form(text: str) -> Form:
    """Parse a declared form. Raises UsageError."""
    match = _FORM.match(text)
    if match is None:
        raise UsageError(f"cannot read the form {text!r}: it is {_EXAMPLE}")
    name, dtype, extents, below = match.groups()
    if dtype not in dtypes.DTYPES:
        raise UsageError(f"{name}: no dtype is called {dtype!r}; known: {', '.join(dtypes.DTYPES)}")
    return Form(name, dtype, tuple(_extents(extents, text)), below or "")


def _extents(text: str, whole: str) -> Iterator[Extent]:
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = _EXTENT.fullmatch(part)
        if match is None:
            raise UsageError(f"cannot read {part!r} in the form {whole!r}: it is {_EXAMPLE}")
        factor, name, fixed = match.groups()
        yield Extent(int(fixed)) if fixed else Extent(int(factor or 1), name)


def dimensions(forms: Sequence[Form]) -> tuple[str, ...]:
    """Names of dimensions in the order of their first appearance."""
    names = [e.name for f in forms for e in f.extents if e.name]
    names += [f.below for f in forms if f.below]
    return tuple(dict.fromkeys(names))


def elements(forms: Sequence[Form], sizes: Mapping[str, int]) -> int:
    """Number of elements of the largest tensor."""
    return max((math.prod(f.shape(sizes)) for f in forms), default=0)
