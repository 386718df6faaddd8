"""Labels as a table with the columns of the `aclcmp` report, one row per label or pair of labels."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from whence.report.plain import cell
from whence.report.text import answer
from whence.results import Comparison

COLUMNS = ("data_id", "pta_data_path", "pta_dtype", "pta_shape", "acl_data_path", "acl_dtype", "acl_shape", "cmp_flag",
           "cosine_similarity", "max_relative_error", "mean_relative_error", "relative_euclidean_distance", "cmp_fail_reason")  # fmt: skip
"""pta: the reference, acl: the target, as that tool calls them."""


def labels_answer(result: Comparison, output: str) -> str:
    """The answer as text, with the table of labels among the files of `output`."""
    return answer(result, output=output).rstrip("\n") + ", cmp_report.csv (a row for every label)\n"


def labels_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as text. rows: by column; what is absent or None is an empty cell. Shapes as [2, 3], dtypes as torch.float32."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_cell(column, row.get(column)) for column in COLUMNS])
    return out.getvalue()


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column.endswith("_shape"):
        return str(list(value))
    if column.endswith("_dtype"):
        return cell(f"torch.{value}" if value else "")
    return repr(value) if isinstance(value, (bool, float)) else cell(str(value))
