"""The table of results: one row a test."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = (
    "name",
    "op_name",
    "dtype",
    "shape",
    "min-val",
    "max-val",
    "max",
    *(f"1e-{k}" for k in range(1, 9)),
    "ulp",
    "nan_mismatch",
    "inf_mismatch",
    "local_error",
    "status",
    "time",
    "reason",
    "device",
    "numel",
    "calls",
)


def start_table(path: str) -> None:
    """A new csv with the column names only."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(_line(COLUMNS), encoding="utf-8")


def append(path: str, cells: Mapping[str, Any]) -> None:
    """Add a row, in one write: several processes may add to one file, and what crashes later loses
    nothing.
    """
    with Path(path).open("a", encoding="utf-8", newline="") as file:
        file.write(_line([_cell(cells.get(column, "")) for column in COLUMNS]))


def _line(cells: Sequence[Any]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def _cell(value: Any) -> str:
    text = str(value)
    text = (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    )
    try:
        float(text)
    except ValueError:
        # else a spreadsheet takes it for a formula
        return "'" + text if text[:1] in ("=", "+", "-", "@") else text
    return text
