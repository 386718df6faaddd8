"""The parts from which answers are built and which look the same everywhere: fields, tables and
lines.

A layout yields all its parts, whatever a run contains, including empty ones. This module drops the
empty parts and removes control characters that a terminal would obey.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from whence.report.tables import clean, columns, count, folded

P = ParamSpec("P")
T = TypeVar("T")
LEFT = 19
"""Column at which the texts of fields begin."""


@dataclass(frozen=True)
class Table:
    """Rows with aligned columns. right: positions of columns that are aligned right."""

    rows: Iterable[Sequence[str]]
    right: Sequence[int] = ()
    indent: str = ""


Field = tuple[str, str | Iterable[str] | None]
"""A title and its text, or several texts of which the first stands beside the title. Without a text
there is no line.
"""
Part = Field | Table | str
Document = Iterable[Part]


def text(document: Document, width: int | None = None) -> str:
    """A document as text for a terminal. width: of lines, which are broken between words."""
    lines = "".join(f"{line}\n" for part in document for line in _lines(part))
    return folded(lines, width, LEFT)


def _lines(part: Part) -> Iterator[str]:
    if isinstance(part, str):
        yield clean(part)
    elif isinstance(part, Table):
        yield from (part.indent + line for line in columns(part.rows, part.right))
    else:
        title, texts = part
        for line in filter(None, [texts] if isinstance(texts, str) else texts or ()):
            blank = " " * (len(title) >= LEFT)
            yield clean(f"{title:<{LEFT}}{blank}{line}").rstrip()
            title = ""


def answering(layout: Callable[P, Document]) -> Callable[P, str]:
    """Turns a layout into a function that returns the text."""

    @functools.wraps(layout)
    def said(*args: P.args, **kwargs: P.kwargs) -> str:
        return text(layout(*args, **kwargs))

    return said


def few(
    items: Sequence[T], most: int, say: Callable[[T], str] = str, noun: str = "", where: str = ""
) -> Iterator[str]:
    """The first items, and how many more there are. noun: for one item. where: where the others are
    listed.
    """
    yield from map(say, items[:most])
    if more := max(len(items) - most, 0):
        yield f"and {count(more, noun) if noun else f'{count(more)} more'}{where}"
