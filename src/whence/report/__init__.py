"""A Comparison -> text, csv, json; computes nothing."""

from whence.report.doctoring import checkup
from whence.report.files import everything_json, summary, summary_data, table_csv
from whence.report.generation import tokens_csv
from whence.report.locating import location
from whence.report.planning import plan_json, plan_map, plan_text
from whence.report.text import answer

__all__ = [
    "answer", "checkup", "everything_json", "location", "plan_json", "plan_map", "plan_text", "summary", "summary_data", "table_csv",
    "tokens_csv",
]  # fmt: skip
