"""Wires the rooms: what code and the command line call. This room alone knows the order of the stages.

Importing it loads no framework and no stage; each function imports what it needs when it is called.
"""

from whence.readers.opening import open_run, open_to_show
from whence.workflows.capture.arrays import record, recording
from whence.workflows.capture.atb_layout import lay_out_atb
from whence.workflows.capture.capture import attach, begin_dump, capture, end_dump
from whence.workflows.capture.command import run_command
from whence.workflows.capture.compile import compile  # noqa: A004
from whence.workflows.capture.labels import attach_labels, include, label, new_id, task
from whence.workflows.compare import compare, face
from whence.workflows.compare_labels import compare_labels, labels_compared, run_labels, write_labels
from whence.workflows.convert import convert, formats
from whence.workflows.doctor import doctor, doctor_command
from whence.workflows.faults import fault_sites, planted
from whence.workflows.ladder.ladder import ladder, ladder_command
from whence.workflows.latest import keep_latest, latest
from whence.workflows.locate import locate
from whence.workflows.maintenance import recover, scrub, warmup
from whence.workflows.msit_report import cmp_report
from whence.workflows.operator_tests.generate import diff_results, generate_tests
from whence.workflows.operator_tests.operators import chosen_operators, signatures
from whence.workflows.page.write import page, plots, report_html
from whence.workflows.repro.finding import repro
from whence.workflows.saved import check_output, free_output, load_comparison, load_policy, views, write
from whence.workflows.tokens.tokens import first_difference, tokens
from whence.workflows.trace import trace
from whence.workflows.two_models import auto_diff
from whence.workflows.watch import watch
from whence.workflows.weights import map_weights

__all__ = [
    "attach", "attach_labels", "auto_diff", "begin_dump", "capture", "check_output", "chosen_operators", "cmp_report", "compare",
    "compare_labels", "compile", "convert", "diff_results", "doctor", "doctor_command", "end_dump", "face", "fault_sites",
    "first_difference", "formats", "free_output", "generate_tests", "include", "keep_latest", "label", "labels_compared", "ladder",
    "ladder_command", "latest", "lay_out_atb", "load_comparison", "load_policy", "locate", "map_weights", "new_id", "open_run",
    "open_to_show", "page", "planted", "plots", "record", "recording", "recover", "report_html", "repro", "run_command",
    "run_labels", "scrub", "signatures", "task", "tokens", "trace", "views", "warmup", "watch", "write", "write_labels",
]  # fmt: skip
