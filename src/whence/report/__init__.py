"""A Comparison -> text, csv, json; computes nothing."""

from whence.report.files import everything_json, summary, summary_data, table_csv
from whence.report.text import answer

__all__ = ["answer", "everything_json", "summary", "summary_data", "table_csv"]
