"""Writes the rows of an SQL query's answer as an aligned table, as CSV or as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from whence.report.tables import cell, clean, csv_text

Rows = Iterable[list[tuple[Any, ...]]]
_WIDEST = 60


def aligned(columns: Sequence[str], batches: Rows) -> Iterator[str]:
    """Lines of a table, as wide as its first rows need. Cells that are cut end in three dots."""
    widths: list[int] = []
    right: list[bool] = []
    count = 0
    for batch in batches:
        texts = [[_text(value) for value in row] for row in batch]
        if not widths:
            right = [
                all(isinstance(row[k], int | float | None) for row in batch)
                for k in range(len(columns))
            ]
            cells = zip(*([list(columns), *texts]), strict=True)
            widths = [min(_WIDEST, max(map(len, column))) for column in cells]
            yield _line(columns, widths, right)
        for text in texts:
            yield _line(text, widths, right)
        count += len(batch)
    if not count:
        yield "  ".join(map(clean, columns))
    yield f"({count} {'row' if count == 1 else 'rows'})"


def _line(texts: Sequence[str], widths: list[int], right: list[bool]) -> str:
    cells = []
    for text, width, is_right in zip(texts, widths, right, strict=True):
        short = clean(text)
        short = short if len(short) <= width else f"{short[: width - 3]}..."
        cells.append(short.rjust(width) if is_right else short.ljust(width))
    return "  ".join(cells).rstrip()


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return " ".join(f"{k}={_text(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return "x".join(map(_text, value))
    return str(value)


def as_csv(columns: Sequence[str], batches: Rows) -> Iterator[str]:
    """CSV in parts. A text that a spreadsheet would read as a formula is quoted."""
    yield csv_text([map(cell, columns)])
    for batch in batches:
        yield csv_text(
            [v if isinstance(v, int | float) else cell(_text(v)) for v in row] for row in batch
        )


def as_json(columns: Sequence[str], batches: Rows) -> Iterator[str]:
    """A JSON list of objects, in parts; values that JSON cannot hold become null or text."""
    yield "["
    first = True
    for batch in batches:
        for row in batch:
            text = msgspec.json.encode(
                {name: _plain(value) for name, value in zip(columns, row, strict=True)},
                enc_hook=str,
            ).decode()
            yield ("\n" if first else ",\n") + text
            first = False
    yield "\n]\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
