"""Run a command and capture what its models compute.

\b
    whence run -o runs/ref -- python infer.py
    whence run -o runs/ref -- bash run.sh
    whence run --compare -o cmp --library atb -- python both.py

Nothing is edited. Every Python process that CMD starts and that imports torch, paddle or
onnxruntime is captured, and CMD keeps its input, output, terminal, working directory and signals.

Exit code: that of CMD; 3 when CMD ends with 0 and nothing was captured, with the reason. When
nothing was captured, no folder is left.

PATTERN matches the dotted module name, as a shell pattern ('layers.3.*') or as re:REGEX. Tree
numbers (3, 7_1) are those of `whence show RUN --tree`.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from whence.cli import _answers
from whence.cli._answers import CODES
from whence.cli._options import PATH, argument, given, option, verb


def _a_file(ctx: click.Context, argument: click.Parameter, word: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(word, type="file")]


@verb(
    argument("cmd", "-- CMD ...", click.UNPROCESSED, nargs=-1, shell_complete=_a_file),
    "Files",
    option(
        "-o, --output RUN",
        "Folder for the run, or its URL in an object store (s3://bucket/run); it must not exist "
        "yet.",
        PATH,
        name="run_path",
        required=True,
    ),
    option("--force", "Replace RUN if it holds a run."),
    "What is captured",
    option("--include PATTERN ...", "Only modules whose name matches (repeatable)."),
    option("--exclude PATTERN ...", "Skip modules whose name matches (repeatable)."),
    option(
        "--class PATTERN ...", "Only modules whose class name matches (repeatable).", name="classes"
    ),
    option(
        "--max-depth N", "Only modules at most N levels deep; the model itself is level 0.", int
    ),
    option("--ids 3,7_1", "Only calls with these tree numbers, and the calls inside them."),
    option("--no-children", "With --ids: without the calls inside them.", rare=True),
    option("--slots", "Which tensors of each call.", ("both", "input", "output"), default="both"),
    option(
        "--steps START:STOP",
        "Only these steps, STOP excluded (0:1000, 5:, :3, ::100; 0-3,1000-1003).",
    ),
    option("--every N", "One of every N steps (besides --steps).", int),
    option("--ranks 0,3", "Only these ranks (0,3 or 0-7)."),
    option(
        "--level",
        "Record module calls; operators too (op); compiled graphs too (graph); only tokens and "
        "logits of each model call (logits); or only inputs and outputs of sessions of ONNX "
        "Runtime (io).",
        ("modules", "op", "graph", "logits", "io"),
        default="modules",
    ),
    "Long runs",
    option(
        "--when CONDITION ...",
        "Record the next steps when this holds: nan, spike, 'loss > 10', 'norm > 100', asked "
        "(whence trigger); repeatable.",
    ),
    option("--for-steps K", "How many steps are recorded each time.  [default: 3]", int),
    option(
        "--ring K",
        "Keep the last K steps in memory, and write them when a condition holds or the program "
        "fails.",
        int,
    ),
    option("--ring-size SIZE", "Limit for what --ring keeps in memory.  [default: 1GB]"),
    "What is kept",
    option(
        "--keep",
        "Keep elements and statistics, statistics only, or only the list of calls.",
        ("full", "stats", "none"),
        default="full",
    ),
    option(
        "--max-bytes SIZE",
        "Limit for the elements kept (20GB, 512MiB); statistics are always kept.  [default: 20GB, "
        "or a quarter of the free space]",
    ),
    option(
        "--on-record MODULE:FUNCTION",
        "A function called with (op type, name, tensor); the numbers it returns are kept.",
        rare=True,
    ),
    option(
        "--print [PATTERN]",
        "Print one line per tensor while the command runs.",
        name="print_pattern",
        is_flag=False,
        flag_value="*",
        rare=True,
    ),
    option(
        "--no-inputs NAME ...", "Of this input, slot or module keep statistics only (repeatable)."
    ),
    option(
        "--programs/--no-programs",
        "Record the operators of leaf modules, so that compare can replay them.  [default: on]",
        default=True,
    ),
    option(
        "--gradients/--no-gradients",
        "Record backward passes, losses and steps of optimisers too.  [default: on]",
        default=True,
    ),
    option(
        "--weights FILE ...",
        "Checkpoint file: parameters found in it are referenced, not copied (repeatable).",
    ),
    option(
        "--samples N",
        "With --level op: keep elements of only N calls of each operator.",
        click.IntRange(0),
    ),
    option("--dedup", "With --level op: record one call per signature, and count the others."),
    "Repeatable runs",
    option("--seed N", "Seed every framework before the program's own code runs.", int),
    option("--deterministic", "Switch every framework to deterministic kernels."),
    option(
        "--force-tokens REF",
        "Generate with the tokens of this run instead of the program's own.",
        PATH,
    ),
    "Experiments",
    option(
        "--patch CALL ...",
        "Replace the outputs of this call with those of --patch-from (NAME[@STEP][:SLOT]; "
        "repeatable).",
        rare=True,
    ),
    option("--patch-from REF", "The run that --patch takes outputs from.", PATH, rare=True),
    option(
        "--recompute",
        "With --patch: the call returns what REF's program and parameters make of its inputs here "
        "(a quantised layer in float), not what REF recorded.",
    ),
    option(
        "--inject FAULT@NAME",
        "Plant a fault (scale@layers.3.mlp) to see whether it is found.",
        rare=True,
    ),
    option(
        "--rung RUNG",
        "Compile only up to this stage of torch.compile (eager, aot_eager ...), or optimise to "
        "this level of ONNX Runtime (off, basic ... all). `whence ladder` tries them all.",
        rare=True,
    ),
    option(
        "--disabled-optimizers NAME ...",
        "Have ONNX Runtime do without this optimiser (repeatable).",
        rare=True,
    ),
    "Logits (--level logits)",
    option("--logits-module PATTERN", "The inner module whose output is the logits."),
    option(
        "--positions",
        "Keep logits of the last token of each row, or of all tokens.",
        ("last", "all"),
        default="last",
        rare=True,
    ),
    "Compiled graphs (--level graph)",
    option(
        "--graph-mode",
        "Record what the kernels leave (exact), what every node computes (deep), or the graph run "
        "node by node (fx).",
        ("exact", "deep", "fx"),
        default="exact",
    ),
    option("--graph-buffers", "Also keep buffers that no node of the graph names.", rare=True),
    option(
        "--graph-anyway",
        "With --graph-mode deep: go on even where it changes the result.",
        rare=True,
    ),
    option(
        "--bare/--no-bare",
        "Run CMD once more without a capture, to see that being watched did not change what it "
        "computes.  [default: on]",
        default=True,
    ),
    "Labels",
    option(
        "--compare",
        "Record labels only, and compare their two sides when CMD has ended; -o is then the "
        "comparison.",
    ),
    option(
        "--library NAME|FILE",
        "Make this library save its tensors: acltransformer, atb, or a profile file.",
    ),
    option(
        "--library-runner NAMES",
        "Only tensors of these operations of the library.  [default: all]",
        rare=True,
    ),
    option(
        "--library-max N",
        "Only for so many tokens.  [default: as the profile says]",
        int,
        rare=True,
    ),
    option(
        "--library-dump DIR",
        "Where the library saves its tensors.  [default: as the profile says]",
        rare=True,
    ),
    context_settings={"allow_interspersed_args": False},
)
def command(run_path: str, cmd: tuple[str, ...], compare: bool, **options: Any) -> int:
    """Words -> `api.run_command`, or `api.run_labels` and a report."""
    from whence import api

    if not compare:
        return api.run_command(cmd, run_path, **given(options))
    from whence.report.labels import labels_answer

    code, result = api.run_labels(cmd, run_path, **given(options))
    if result is None:
        return code
    sys.stdout.write(labels_answer(result, run_path))
    _answers.kept(result, run_path)
    return code or CODES[result.status]
