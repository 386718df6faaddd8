"""Tables that are as wide as the terminal: columns of text give way first, then whole columns that are named as dispensable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

_LEAST = 16  # characters that a column which gives way keeps
HEAD, TAIL = "head", "tail"


def fitted(
    table: Sequence[Sequence[str]], width: int | None, *, gap: int = 2, give: Mapping[int, str] | None = None, drop: Sequence[int] = (),
    measure: Callable[[str], int] = len,
) -> tuple[list[list[str]], frozenset[int]]:  # fmt: skip
    """(rows, positions that were dropped), such that the columns take `width` characters at most; None: as wide as they are.

    give: columns that may be shortened, to what is kept of a cell: HEAD, or TAIL (of dotted names the end tells most). drop: columns
    that go, in this order, where that is not enough. measure: width of a text. A row that is still too wide is left so.
    """
    rows = [list(row) for row in table]
    if width is None or not rows:
        return rows, frozenset()
    widths = [max((measure(row[i]) for row in rows if i < len(row)), default=0) for i in range(max(map(len, rows)))]
    gone: set[int] = set()

    def excess() -> int:
        kept = [w for i, w in enumerate(widths) if i not in gone]
        return sum(kept) + gap * (len(kept) - 1) - width

    for at in (None, *drop):
        if at is not None:
            gone.add(at)
        while (over := excess()) > 0:
            widest = max((i for i in give or () if i not in gone and widths[i] > _LEAST), key=lambda i: widths[i], default=None)
            if widest is None:
                break
            others = sorted((widths[i] for i in give or () if i not in gone and i != widest), reverse=True)
            widths[widest] = max(_LEAST, widths[widest] - over, min(others[0] if others else 0, widths[widest] - 1))
        if excess() <= 0:
            break
    for row in rows:
        for i, keep in (give or {}).items():
            if i < len(row) and measure(row[i]) > widths[i]:
                row[i] = shortened(row[i], widths[i], keep, measure)
    return rows, frozenset(gone)


def shortened(text: str, width: int, keep: str = HEAD, measure: Callable[[str], int] = len) -> str:
    """Text of at most `width` characters, with an ellipsis where some were cut."""
    if measure(text) <= width:
        return text
    while text and measure(text) > width - 1:
        text = text[:-1] if keep == HEAD else text[1:]
    return text + "…" if keep == HEAD else "…" + text
