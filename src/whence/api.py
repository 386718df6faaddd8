"""The verbs of whence, one list: what code, the command line and other tools' names call.

Importing it loads no framework; each function imports what it needs when it is called.
"""

from typing import TYPE_CHECKING

from whence.lazy_names import lazily

if TYPE_CHECKING:
    from whence.readers.opening import open_run, open_to_show
    from whence.workflows.accept.accept import accept
    from whence.workflows.accept.accept import renew as renew_expectation
    from whence.workflows.accept.comparisons import accept_comparison
    from whence.workflows.capture.arrays import record, recording
    from whence.workflows.capture.atb_layout import lay_out_atb
    from whence.workflows.capture.bare import attach_bare
    from whence.workflows.capture.capture import attach, begin_dump, capture, end_dump
    from whence.workflows.capture.command import run_command
    from whence.workflows.capture.compile import compile, compile_backend  # noqa: A004
    from whence.workflows.capture.dump import Dump, determine, opened_dump
    from whence.workflows.capture.labels import (
        attach_labels,
        include,
        label,
        labels_are_taken,
        new_id,
        take_label,
        task,
    )
    from whence.workflows.check_operators import check_operators
    from whence.workflows.commits import commits
    from whence.workflows.compare import align_runs, compare
    from whence.workflows.compare_labels import (
        compare_labels,
        labels_compared,
        run_labels,
        write_labels,
    )
    from whence.workflows.convert import convert, formats
    from whence.workflows.diverge.diverge import diverge
    from whence.workflows.doctor import doctor, doctor_command
    from whence.workflows.export_check import export_check
    from whence.workflows.faults import fault_sites, planted
    from whence.workflows.ladder.ladder import ladder, ladder_command
    from whence.workflows.latest import keep_latest, latest
    from whence.workflows.layers import compare_layers
    from whence.workflows.locate.locate import locate
    from whence.workflows.maintenance import recover, scrub
    from whence.workflows.msit_report import cmp_report
    from whence.workflows.nans import nans
    from whence.workflows.operator_fuzz.fuzz import check_kernel, fuzz
    from whence.workflows.operator_fuzz.fuzz import parsed as parsed_arguments
    from whence.workflows.operator_tests.generate import diff_results, generate_tests
    from whence.workflows.operator_tests.operators import chosen_operators, signatures
    from whence.workflows.pack import is_packed, pack, packing_state, relocate, unpack
    from whence.workflows.page.write import page, page_beside, plots, report_html
    from whence.workflows.probe.narrow import narrow
    from whence.workflows.probe.probe import attach_probe, probe, probe_command
    from whence.workflows.query import comparison_tables, query, to_parquet
    from whence.workflows.ranges import ranges
    from whence.workflows.ranks import ranks
    from whence.workflows.recipe import recipe
    from whence.workflows.repeat.repeat import repeat_command
    from whence.workflows.repro.repro import repro
    from whence.workflows.rounding.ways import generators_now
    from whence.workflows.saved import (
        check_output,
        free_output,
        load_comparison,
        load_policy,
        views,
        write,
    )
    from whence.workflows.serving.prompts import read_prompts
    from whence.workflows.serving.serve_check import serve_check
    from whence.workflows.tokens.tokens import first_difference, tokens
    from whence.workflows.trace import trace
    from whence.workflows.trigger import trigger
    from whence.workflows.two_models import auto_diff, parity
    from whence.workflows.upgrade.upgrade import upgrade
    from whence.workflows.upload import upload
    from whence.workflows.viewers.graphs import annotate_onnx, model_explorer_data
    from whence.workflows.viewers.tensorboard import tensorboard
    from whence.workflows.watch import watch
    from whence.workflows.weights import map_weights
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "Dump",
    "accept",
    "accept_comparison",
    "align_runs",
    "annotate_onnx",
    "attach",
    "attach_bare",
    "attach_labels",
    "attach_probe",
    "auto_diff",
    "begin_dump",
    "capture",
    "check_kernel",
    "check_operators",
    "check_output",
    "chosen_operators",
    "cmp_report",
    "commits",
    "compare",
    "compare_labels",
    "compare_layers",
    "comparison_tables",
    "compile",
    "compile_backend",
    "convert",
    "determine",
    "diff_results",
    "diverge",
    "doctor",
    "doctor_command",
    "end_dump",
    "export_check",
    "fault_sites",
    "first_difference",
    "formats",
    "free_output",
    "fuzz",
    "generate_tests",
    "generators_now",
    "include",
    "is_packed",
    "keep_latest",
    "label",
    "labels_are_taken",
    "labels_compared",
    "ladder",
    "ladder_command",
    "latest",
    "lay_out_atb",
    "load_comparison",
    "load_policy",
    "locate",
    "map_weights",
    "model_explorer_data",
    "nans",
    "narrow",
    "new_id",
    "open_run",
    "open_to_show",
    "opened_dump",
    "pack",
    "packing_state",
    "page",
    "page_beside",
    "parity",
    "parsed_arguments",
    "planted",
    "plots",
    "probe",
    "probe_command",
    "query",
    "ranges",
    "ranks",
    "read_prompts",
    "recipe",
    "record",
    "recording",
    "recover",
    "relocate",
    "renew_expectation",
    "repeat_command",
    "report_html",
    "repro",
    "run_command",
    "run_labels",
    "scrub",
    "serve_check",
    "signatures",
    "take_label",
    "task",
    "tensorboard",
    "to_parquet",
    "tokens",
    "trace",
    "trigger",
    "unpack",
    "upgrade",
    "upload",
    "views",
    "watch",
    "write",
    "write_labels",
]
