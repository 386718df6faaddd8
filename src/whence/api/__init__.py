"""Wires the rooms: what code and the command line call. This room alone knows the order of the stages.

Importing it loads no framework and no stage; each function imports what it needs when it is called.
"""

from whence.api.atb_layout import lay_out_atb
from whence.api.capturing import attach, begin_dump, capture, end_dump
from whence.api.converting import convert, formats
from whence.api.differing import auto_diff
from whence.api.doctoring import doctor, doctor_command
from whence.api.faults import fault_sites, planted
from whence.api.generated import first_difference, tokens
from whence.api.graphs import compile  # noqa: A004
from whence.api.labelling import attach_labels, include, label, new_id, task
from whence.api.labels import record, recording
from whence.api.laddering import ladder, ladder_command
from whence.api.latest import keep_latest, latest
from whence.api.levelled import cmp_report
from whence.api.operators import chosen_operators, signatures
from whence.api.pages import page, plots, report_html
from whence.api.patching import locate
from whence.api.reproducing import repro
from whence.api.results import check_output, compare, face, free_output, load_comparison, load_policy, views, write
from whence.api.runs import open_run, open_to_show, recover, run_command, scrub, warmup
from whence.api.sided import compare_labels, labels_compared, run_labels, write_labels
from whence.api.testing import diff_results, generate_tests
from whence.api.traces import trace
from whence.api.watching import watch
from whence.api.weights import map_weights

__all__ = [
    "attach", "attach_labels", "auto_diff", "begin_dump", "capture", "check_output", "chosen_operators", "cmp_report", "compare",
    "compare_labels", "compile", "convert", "diff_results", "doctor", "doctor_command", "end_dump", "face", "fault_sites",
    "first_difference", "formats", "free_output", "generate_tests", "include", "keep_latest", "label", "labels_compared", "ladder",
    "ladder_command", "latest", "lay_out_atb", "load_comparison", "load_policy", "locate", "map_weights", "new_id", "open_run",
    "open_to_show", "page", "planted", "plots", "record", "recording", "recover", "report_html", "repro", "run_command",
    "run_labels", "scrub", "signatures", "task", "tokens", "trace", "views", "warmup", "watch", "write", "write_labels",
]  # fmt: skip
