"""What an answer says, in parts that are shown alike: fields, tables and lines.

A layout yields the parts, of whatever a run holds, and leaves out nothing that is empty: what has
nothing to say is dropped here, and what a terminal would obey is made harmless here.
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
"""Column in which the texts of fields begin."""


@dataclass(frozen=True)
class Table:
    """Rows with straight columns. right: positions of columns that align right."""

    rows: Iterable[Sequence[str]]
    right: Sequence[int] = ()
    indent: str = ""


Field = tuple[str, str | Iterable[str] | None]
"""A title and its text, or texts of which the first has the title. Without a text no line."""
Part = Field | Table | str
Document = Iterable[Part]


def text(document: Document, width: int | None = None) -> str:
    """A document on a terminal. width: at which lines are broken between words."""
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
    """A layout as a function that gives the text."""

    @functools.wraps(layout)
    def said(*args: P.args, **kwargs: P.kwargs) -> str:
        return text(layout(*args, **kwargs))

    return said


def few(
    items: Sequence[T], most: int, say: Callable[[T], str] = str, noun: str = "", where: str = ""
) -> Iterator[str]:
    """The first items, and how many more there are. noun: of them; where: the others are."""
    yield from map(say, items[:most])
    if more := max(len(items) - most, 0):
        yield f"and {count(more, noun) if noun else f'{count(more)} more'}{where}"
