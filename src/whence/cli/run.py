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

from typing import Any

import click

from whence.cli import _answers, _help

_GROUPS = {
    "Files": "--output --force",
    "What is captured": "--include --exclude --class --max-depth --ids --no-children --slots "
    "--steps --every --ranks --level",
    "Long runs": "--when --when-file --for-steps --ring --ring-size --window",
    "What is kept": "--keep --max-bytes --no-inputs --weights --programs --gradients --samples "
    "--dedup "
    "--on-record --print",
    "Repeatable runs": "--seed --deterministic --force-tokens",
    "Experiments": "--patch --patch-from --inject --rung --disabled-optimizers",
    "Logits (--level logits)": "--logits-module --positions",
    "Compiled graphs (--level graph)": "--graph-mode --graph-buffers --graph-anyway --bare",
    "Labels": "--compare --library --library-runner --library-max --library-dump",
}
_RARE = (
    "--no-children --on-record --print --patch --patch-from --inject --rung --positions "
    "--disabled-optimizers "
    "--graph-buffers --graph-anyway --library-runner --library-max --library-dump"
)


def _a_file(ctx: click.Context, argument: click.Parameter, word: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(word, type="file")]


@click.command(
    "run",
    cls=_help.Grouped,
    help=__doc__,
    groups=_GROUPS,
    rare=_RARE,
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-o",
    "--output",
    "run_path",
    metavar="RUN",
    required=True,
    type=click.Path(),
    help="Folder for the run, or its URL in an object store (s3://bucket/run); it must not exist "
    "yet.",
)
@click.option("--force", is_flag=True, help="Replace RUN if it holds a run.")
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Only modules whose name matches (repeatable).",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Skip modules whose name matches (repeatable).",
)
@click.option(
    "--class",
    "classes",
    multiple=True,
    metavar="PATTERN",
    help="Only modules whose class name matches (repeatable).",
)
@click.option(
    "--max-depth",
    type=int,
    metavar="N",
    help="Only modules at most N levels deep; the model itself is level 0.",
)
@click.option(
    "--ids", metavar="3,7_1", help="Only calls with these tree numbers, and the calls inside them."
)
@click.option("--no-children", is_flag=True, help="With --ids: without the calls inside them.")
@click.option(
    "--slots",
    type=click.Choice(["both", "input", "output"]),
    default="both",
    show_default=True,
    help="Which tensors of each call.",
)
@click.option(
    "--steps",
    metavar="START:STOP",
    help="Only these steps, STOP excluded (0:1000, 5:, :3, ::100; 0-3,1000-1003).",
)
@click.option("--every", type=int, metavar="N", help="One of every N steps (besides --steps).")
@click.option(
    "--when",
    multiple=True,
    metavar="CONDITION",
    help="Record the next steps when this holds: nan, spike, 'loss > 10', 'norm > 100', signal "
    "(SIGUSR1), asked (whence trigger); repeatable.",
)
@click.option(
    "--when-file",
    metavar="FILE",
    default="",
    type=click.Path(),
    help="Record the next steps when this file appears or changes.",
)
@click.option(
    "--for-steps",
    type=int,
    metavar="K",
    help="How many steps are recorded each time.  [default: 3]",
)
@click.option(
    "--ring",
    type=int,
    metavar="K",
    help="Keep the last K steps in memory, and write them when a condition holds or the program "
    "fails.",
)
@click.option(
    "--ring-size", metavar="SIZE", help="Limit for what --ring keeps in memory.  [default: 1GB]"
)
@click.option(
    "--window",
    type=int,
    metavar="N",
    help="Begin a new folder in RUN every N steps, so that `whence compare --watch --discard` can "
    "delete what it has compared.",
)
@click.option("--ranks", metavar="0,3", help="Only these ranks (0,3 or 0-7).")
@click.option(
    "--keep",
    type=click.Choice(["full", "stats", "none"]),
    default="full",
    show_default=True,
    help="Keep elements and statistics, statistics only, or only the list of calls.",
)
@click.option(
    "--max-bytes",
    metavar="SIZE",
    help="Limit for the elements kept (20GB, 512MiB); statistics are always kept.  [default: 20GB, "
    "or a quarter of the free space]",
)
@click.option(
    "--on-record",
    metavar="MODULE:FUNCTION",
    default="",
    help="A function called with (op type, name, tensor); the numbers it returns are kept.",
)
@click.option(
    "--print",
    "print_pattern",
    is_flag=False,
    flag_value="*",
    metavar="[PATTERN]",
    help="Print one line per tensor while the command runs.",
)
@click.option(
    "--seed", type=int, metavar="N", help="Seed every framework before the program's own code runs."
)
@click.option(
    "--deterministic", is_flag=True, help="Switch every framework to deterministic kernels."
)
@click.option(
    "--no-inputs",
    multiple=True,
    metavar="NAME",
    help="Of this input, slot or module keep statistics only (repeatable).",
)
@click.option(
    "--programs/--no-programs",
    default=True,
    help="Record the operators of leaf modules, so that compare can replay them.  [default: on]",
)
@click.option(
    "--gradients/--no-gradients",
    default=True,
    help="Record backward passes, losses and steps of optimisers too.  [default: on]",
)
@click.option(
    "--weights",
    multiple=True,
    metavar="FILE",
    help="Checkpoint file: parameters found in it are referenced, not copied (repeatable).",
)
@click.option(
    "--patch",
    multiple=True,
    metavar="CALL",
    help="Replace the outputs of this call with those of --patch-from (NAME[@STEP][:SLOT]; "
    "repeatable).",
)
@click.option(
    "--patch-from",
    metavar="REF",
    default="",
    type=click.Path(),
    help="The run that --patch takes outputs from.",
)
@click.option(
    "--inject",
    metavar="FAULT@NAME",
    default="",
    help="Plant a fault (scale@layers.3.mlp) to see whether it is found.",
)
@click.option(
    "--level",
    type=click.Choice(["modules", "op", "graph", "logits", "io"]),
    default="modules",
    show_default=True,
    help="Record module calls; operators too (op); compiled graphs too (graph); only tokens and "
    "logits of each model call (logits); or only inputs and outputs of sessions of ONNX Runtime "
    "(io).",
)
@click.option(
    "--samples",
    type=click.IntRange(0),
    metavar="N",
    help="With --level op: keep elements of only N calls of each operator.",
)
@click.option(
    "--dedup",
    is_flag=True,
    help="With --level op: record one call per signature, and count the others.",
)
@click.option(
    "--graph-mode",
    type=click.Choice(["exact", "deep", "fx"]),
    default="exact",
    show_default=True,
    help="Record what the kernels leave (exact), what every node computes (deep), or the graph run "
    "node by node (fx).",
)
@click.option(
    "--graph-buffers",
    is_flag=True,
    help="Also keep buffers that no node of the graph names.",
)
@click.option(
    "--graph-anyway",
    is_flag=True,
    help="With --graph-mode deep: go on even where it changes the result.",
)
@click.option(
    "--bare/--no-bare",
    default=True,
    help="Run CMD once more without a capture, to see that being watched did not change what it "
    "computes.  [default: on]",
)
@click.option(
    "--logits-module",
    metavar="PATTERN",
    default="",
    help="The inner module whose output is the logits.",
)
@click.option(
    "--positions",
    type=click.Choice(["last", "all"]),
    default="last",
    show_default=True,
    help="Keep logits of the last token of each row, or of all tokens.",
)
@click.option(
    "--force-tokens",
    metavar="REF",
    default="",
    type=click.Path(),
    help="Generate with the tokens of this run instead of the program's own.",
)
@click.option(
    "--rung",
    metavar="RUNG",
    help="Compile only up to this stage of torch.compile (eager, aot_eager ...), or optimise to "
    "this level of ONNX Runtime (off, basic ... all). `whence ladder` tries them all.",
)
@click.option(
    "--disabled-optimizers",
    multiple=True,
    metavar="NAME",
    help="Have ONNX Runtime do without this optimiser (repeatable).",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Record labels only, and compare their two sides when CMD has ended; -o is then the "
    "comparison.",
)
@click.option(
    "--library",
    metavar="NAME|FILE",
    default="",
    help="Make this library save its tensors: acltransformer, atb, or a profile file.",
)
@click.option(
    "--library-runner",
    metavar="NAMES",
    default="",
    help="Only tensors of these operations of the library.  [default: all]",
)
@click.option(
    "--library-max",
    type=int,
    metavar="N",
    help="Only for so many tokens.  [default: as the profile says]",
)
@click.option(
    "--library-dump",
    metavar="DIR",
    default="",
    help="Where the library saves its tensors.  [default: as the profile says]",
)
@click.argument(
    "cmd",
    nargs=-1,
    type=click.UNPROCESSED,
    required=True,
    metavar="-- CMD ...",
    shell_complete=_a_file,
)
def command(run_path: str, cmd: tuple[str, ...], compare: bool, **values: Any) -> int:
    """Words -> `api.run_command`, or `api.run_labels` and a report."""
    from whence import api

    options = {name: value for name, value in values.items() if value is not None}
    if compare:
        return _compared(cmd, run_path, options)
    return api.run_command(cmd, run_path, **options)


def _compared(cmd: tuple[str, ...], folder: str, options: dict[str, Any]) -> int:
    import sys

    from whence import api
    from whence.cli.compare import CODES
    from whence.report.labels import labels_answer

    code, result = api.run_labels(cmd, folder, **options)
    if result is None:
        return code
    sys.stdout.write(labels_answer(result, folder))
    _answers.kept(result, folder)
    return code or CODES[result.status]
