"""A Comparison -> text, csv, json; computes nothing."""

from whence.report.doctoring import checkup
from whence.report.files import everything_json, summary, summary_data, table_csv
from whence.report.generation import generation_csv
from whence.report.labels import labels_answer, labels_csv
from whence.report.laddering import rungs
from whence.report.locating import location
from whence.report.planning import plan_json, plan_map, plan_text
from whence.report.text import answer
from whence.report.tokens import tokens_csv, tokens_json, tokens_text
from whence.report.views import names as views
from whence.report.views import view_csv

__all__ = [
    "answer", "checkup", "everything_json", "generation_csv", "labels_answer", "labels_csv", "location", "plan_json", "plan_map",
    "plan_text", "rungs", "summary", "summary_data", "table_csv", "tokens_csv", "tokens_json", "tokens_text", "view_csv", "views",
]  # fmt: skip
