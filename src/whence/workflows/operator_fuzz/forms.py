"""What a kernel takes, as a user writes it: "x: float32[rows, cols]"."""

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
    """factor * size of a dimension; of a fixed one the name is ""."""

    factor: int
    name: str = ""

    def of(self, sizes: Mapping[str, int]) -> int:
        """The extent where dimensions have these sizes."""
        return self.factor * sizes[self.name] if self.name else self.factor


@dataclass(frozen=True)
class Form:
    """A tensor that is taken or given. below: of whole numbers, the dimension whose size they are
    below, "" for any.
    """

    name: str
    dtype: str
    extents: tuple[Extent, ...]
    below: str = ""

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape where dimensions have these sizes."""
        return tuple(extent.of(sizes) for extent in self.extents)

    @property
    def is_floating(self) -> bool:
        """Does its dtype round?"""
        return dtypes.is_floating(self.dtype)


def form(text: str) -> Form:
    """A form as it is written. Raises UsageError."""
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
    """Names of dimensions in the order in which they are first met."""
    names = [e.name for f in forms for e in f.extents if e.name]
    names += [f.below for f in forms if f.below]
    return tuple(dict.fromkeys(names))


def elements(forms: Sequence[Form], sizes: Mapping[str, int]) -> int:
    """Elements of the largest tensor."""
    return max((math.prod(f.shape(sizes)) for f in forms), default=0)
