"""Labels as a table with exactly the columns of the `aclcmp` report: one row per pair of labels, or
per label without a partner.
"""

from __future__ import annotations

from collections.abc import Iterable

from whence.report.answer import answer, written_to
from whence.report.cells import either, table
from whence.report.views.aclcmp import COLUMNS
from whence.results import Comparison, ViewRow

FILE = "cmp_report.csv"


def labels_answer(result: Comparison, output: str) -> str:
    """The answer as text, with the table of labels among the files of `output`."""
    return answer(result.in_folder(output)) + labels_written_to(result, output) + "\n"


def labels_written_to(result: Comparison, output: str) -> str:
    """The line that says where the files of a comparison of labels lie."""
    return f"{written_to(result, output)}, {FILE} (a row for every label)"


def labels_csv(rows: Iterable[ViewRow]) -> str:
    """The table as CSV text; data_id is the name under which the label is shown."""
    return table({**COLUMNS, "data_id": either(lambda side: side.name)}, rows)
