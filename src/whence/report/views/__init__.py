"""Tables as other tools write them, one file a tool: its columns, in its order, in its number
format; whence's own columns behind them.

A view is two files of one name: `report/views/NAME.py` with `COLUMNS` (titles, and how a cell is
made of the index of the row and the row) and `comparison/views/NAME.py` with the tool's figures.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from pathlib import Path

from whence.report.cells import OWN, Columns, table
from whence.results import ViewRow

_FOLDER = Path(__file__).parent


@functools.cache
def names() -> tuple[str, ...]:
    """The names of the available views."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("[!_]*.py")))


def view_csv(view: str, rows: Iterable[ViewRow], *, judged: str = "") -> str:
    """The table of one view. judged: the tool's column that holds whence's own status instead."""
    columns: Columns = importlib.import_module(f"whence.report.views.{view}").COLUMNS
    own = {judged: OWN["whence_status"]} if judged else {}
    return table({**columns, **own, **OWN}, rows)
