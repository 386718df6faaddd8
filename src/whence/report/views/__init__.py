"""Tables as other tools write them, one file a tool: its columns, in its order, in its number
format; whence's own columns behind them.

A view is two files of one name: `report/views/NAME.py` with `COLUMNS` (titles, and how a cell is
made of the index of the row and the row) and `comparison/views/NAME.py` with the tool's figures.
"""

from __future__ import annotations

import csv
import functools
import importlib
import io
from collections.abc import Iterable
from pathlib import Path

from whence.report.cells import OWN, Columns, guarded
from whence.results import ViewRow

_FOLDER = Path(__file__).parent


@functools.cache
def names() -> tuple[str, ...]:
    """The views there are."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("[!_]*.py")))


def view_csv(view: str, rows: Iterable[ViewRow]) -> str:
    """The table of one view. What a spreadsheet would take for a formula is quoted."""
    columns: Columns = {**importlib.import_module(f"whence.report.views.{view}").COLUMNS, **OWN}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        [guarded(make(index, row)) for make in columns.values()] for index, row in enumerate(rows)
    )
    return out.getvalue()
