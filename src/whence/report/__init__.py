"""Writes results as text, CSV, JSON and HTML; computes nothing."""

from whence.report.answer import answer, headline, written_to
from whence.report.assertion import disparity
from whence.report.convert import converted
from whence.report.doctor import checkup
from whence.report.files import everything_json, summary, summary_data, table_csv
from whence.report.generation import generation_csv
from whence.report.github import github_annotations
from whence.report.junit import junit_xml
from whence.report.labels import labels_answer, labels_csv, labels_written_to
from whence.report.ladder import rungs
from whence.report.locate import location
from whence.report.markdown import markdown
from whence.report.operator_diff import tested_csv, tested_text, written
from whence.report.operators import operators
from whence.report.origin import origin_json, origin_text
from whence.report.plan import plan_json, plan_map, plan_text
from whence.report.repro import reproduction
from whence.report.tokens import tokens_csv, tokens_json, tokens_text
from whence.report.views import names as views
from whence.report.views import view_csv
from whence.report.weights import weights_map
from whence.report.xray import xray_summary

__all__ = [
    "answer", "checkup", "converted", "disparity", "everything_json", "generation_csv",
    "github_annotations", "headline", "junit_xml", "labels_answer", "labels_csv",
    "labels_written_to", "location", "markdown", "operators", "origin_json", "origin_text",
    "plan_json", "plan_map", "plan_text", "reproduction", "rungs", "summary", "summary_data",
    "table_csv", "tested_csv", "tested_text", "tokens_csv", "tokens_json", "tokens_text",
    "view_csv", "views", "weights_map", "written", "written_to", "xray_summary",
]  # fmt: skip
