"""Plain text that is safe to print: names from a run are untrusted, numbers and sizes are short,
columns are aligned.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whence import display

AT_LINE = re.compile(r":\d+$")
"""The end of a source that is a place in a file."""


def from_here(source: str, root: Path | None = None) -> str:
    """A place in a file, relative to the working folder, or to `root`, if it lies below."""
    file, _, line = source.rpartition(":")
    path, folder = Path(file), (root or Path.cwd()).resolve()
    return (
        f"{path.relative_to(folder).as_posix()}:{line}"
        if path.is_absolute() and path.is_relative_to(folder)
        else source
    )


def called_at(source: str) -> str:
    """`from_here` for a source that is a place in a file; "" for others."""
    return from_here(source) if AT_LINE.search(source) else ""


def where(call: Any) -> str:
    """The step and rank of a call, or of an item about one."""
    phase = getattr(call, "phase", "forward")
    return f"step {call.step}, rank {call.rank}" + (f", {phase}" if phase != "forward" else "")


def spaced(*parts: str) -> str:
    """The non-empty parts of a line, separated by spaces."""
    return "   ".join(filter(None, parts))


def clean(text: object) -> str:
    r"""Text without anything that a terminal would obey: control characters, escapes and direction
    marks are shown as \x1b, \u202e.
    """
    plain = str(text)
    return (
        plain
        if plain.isprintable()
        else "".join(
            c if c.isprintable() else " " if c == "\xa0" else ascii(c)[1:-1] for c in plain
        )
    )


def cell(text: object) -> str:
    """Clean text for a spreadsheet: what it would read as a formula is quoted. For names only;
    numbers need no quoting.
    """
    plain = clean(text)
    return "'" + plain if plain[:1] in ("=", "+", "-", "@") else plain


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV, each with its line end."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def number(value: float | None) -> str:
    """A number with six significant digits; "-" for one that is not defined."""
    return "-" if value is None else f"{value:.6g}"


def count(value: int, noun: str = "", plural: str = "") -> str:
    """ "1 204", or with a noun "1 step", "1 204 calls"."""
    grouped = f"{value:,}".replace(",", " ")
    return f"{grouped} {noun if value == 1 else plural or noun + 's'}" if noun else grouped


def ago(seconds: float) -> str:
    """ "just now", "3 minutes ago"."""
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return f"{count(int(seconds // size), unit)} ago"
    return "just now"


def listed(names: Sequence[str], limit: int) -> str:
    """Names, cleaned: "a, b and 3 more"."""
    return clean(display.listed(names, limit))


def size(nbytes: float) -> str:
    """Bytes in decimal units with three digits: "0 B", "412 MB", "1.25 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def shape(extents: Sequence[int]) -> str:
    """ "[2, 3]"; "[]" for a single number."""
    return "[" + ", ".join(str(e) for e in extents) + "]"


def folded(text: str, width: int | None, indent: int) -> str:
    """Text whose longer lines are broken between words, so that none is wider than `width`. None:
    unchanged.

    Continuation lines start at `indent` where the line's right column does, and are otherwise
    indented by two characters.
    """
    if width is None:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        inner = " " * (indent if line[indent - 1 : indent] == " " and width > 2 * indent else 2)
        broken = (
            line
            if len(line) <= width
            else textwrap.fill(
                line,
                width,
                subsequent_indent=inner,
                break_long_words=False,
                break_on_hyphens=False,
                expand_tabs=False,
            )
        )
        lines.append(broken)
    return "\n".join(lines)


def columns(
    rows: Iterable[Sequence[str]],
    right: Sequence[int] = (),
    gap: str = "  ",
    *,
    width: int | None = None,
    give: Mapping[int, str] | None = None,
    drop: Sequence[int] = (),
    measure: Callable[[str], int] = len,
) -> Iterator[str]:
    """Rows as lines with aligned columns, cleaned. right: positions of columns that are aligned
    right.

    width, give, drop, measure: as for `fitted`; without a width nothing is cut.
    """
    cells = [[clean(text) for text in row] for row in rows]
    table, dropped = fitted(cells, width, gap=len(gap), give=give, drop=drop, measure=measure)
    widths = _widths(table, measure)
    for row in table:
        padded = []
        for i, text in enumerate(row):
            blanks = " " * (widths[i] - measure(text))
            padded += [blanks + text if i in right else text + blanks] * (i not in dropped)
        yield gap.join(padded).rstrip()


def _widths(rows: Sequence[Sequence[str]], measure: Callable[[str], int]) -> list[int]:
    return [max(map(measure, column)) for column in itertools.zip_longest(*rows, fillvalue="")]


_LEAST = 16  # characters kept in a column that is shortened

HEAD, TAIL = "head", "tail"


def fitted(
    table: Sequence[Sequence[str]],
    width: int | None,
    *,
    gap: int = 2,
    give: Mapping[int, str] | None = None,
    drop: Sequence[int] = (),
    measure: Callable[[str], int] = len,
) -> tuple[list[list[str]], frozenset[int]]:
    """(rows, positions of dropped columns), so that the columns take at most `width` characters;
    None: unchanged.

    give: columns that may be shortened, and which part of a cell is kept: HEAD, or TAIL (the end of
    a dotted name tells most). drop: columns that are dropped, in this order, where shortening is
    not enough. measure: gives the width of a text. A row that is still too wide stays so.
    """
    rows = [list(row) for row in table]
    if width is None or not rows:
        return rows, frozenset()
    widths = _widths(rows, measure)
    dropped: set[int] = set()

    def excess() -> int:
        visible = [w for i, w in enumerate(widths) if i not in dropped]
        return sum(visible) + gap * (len(visible) - 1) - width

    for column in (None, *drop):
        if column is not None:
            dropped.add(column)
        while (over := excess()) > 0:
            widest = max(
                (i for i in give or () if i not in dropped and widths[i] > _LEAST),
                key=lambda i: widths[i],
                default=None,
            )
            if widest is None:
                break
            others = sorted(
                (widths[i] for i in give or () if i not in dropped and i != widest), reverse=True
            )
            widths[widest] = max(
                _LEAST, widths[widest] - over, min(others[0] if others else 0, widths[widest] - 1)
            )
        if excess() <= 0:
            break
    for row in rows:
        for i, keep in (give or {}).items():
            if i < len(row) and measure(row[i]) > widths[i]:
                row[i] = shortened(row[i], widths[i], keep, measure)
    return rows, frozenset(dropped)


def shortened(text: str, width: int, keep: str = HEAD, measure: Callable[[str], int] = len) -> str:
    """Text of at most `width` characters, with an ellipsis where it was cut."""
    if measure(text) <= width:
        return text
    while text and measure(text) > width - 1:
        text = text[:-1] if keep == HEAD else text[1:]
    return text + "…" if keep == HEAD else "…" + text
