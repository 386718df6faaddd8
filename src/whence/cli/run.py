"""Capture what a command computes, without editing it.

\b
    whence run -o runs/ref -- python infer.py
    whence run -o runs/ref -- bash run.sh
    whence run --compare -o cmp --library atb -- python both.py

Every Python that CMD starts and that imports torch or paddle is captured, children included. CMD
keeps its input, output, terminal, working directory and signals, and its exit code is returned;
when it ends with 0 and nothing was captured, 3 and the reason.

PATTERN is shell style on the dotted module name ('layers.3.*'), or re: and a regular expression.
Tree numbers (3, 7_1) are those of `whence show RUN --tree`.
"""

from __future__ import annotations

from typing import Any

import click


@click.command("run", help=__doc__, context_settings={"allow_interspersed_args": False})
@click.option(
    "-o",
    "--output",
    "run_path",
    metavar="RUN",
    required=True,
    help="Folder of the run; must not exist.",
)
@click.option("--force", is_flag=True, help="Replace RUN when it is a run.")
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
    help="Not modules whose name matches (repeatable).",
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
    help="Only modules nested up to N deep; the model itself is 0.",
)
@click.option(
    "--ids", metavar="3,7_1", help="Only the calls with these tree numbers, and what they call."
)
@click.option("--no-children", is_flag=True, help="With --ids: without what they call.")
@click.option(
    "--slots",
    type=click.Choice(["both", "input", "output"]),
    default="both",
    show_default=True,
    help="Which tensors of a call.",
)
@click.option(
    "--steps", metavar="START:STOP", help="Only these steps, STOP excluded (0:1000, 5:, :3)."
)
@click.option("--ranks", metavar="0,3", help="Only these ranks (0,3 or 0-7).")
@click.option(
    "--keep",
    type=click.Choice(["full", "stats", "none"]),
    default="full",
    show_default=True,
    help="Elements and statistics, statistics only, or the calls only.",
)
@click.option(
    "--max-bytes",
    metavar="SIZE",
    help="Most bytes of elements (20GB, 512MiB); statistics always. [default: 20GB or 1/4 of "
    "free space]",
)
@click.option(
    "--on-record",
    metavar="MODULE:FUNCTION",
    default="",
    help="Called with (op type, name, tensor); numbers it returns are kept.",
)
@click.option(
    "--print",
    "print_pattern",
    is_flag=False,
    flag_value="*",
    metavar="[PATTERN]",
    help="Print a line per tensor while running.",
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
    help="Keep statistics only of this input, slot or module (repeatable).",
)
@click.option(
    "--programs/--no-programs",
    default=True,
    help="Record what leaf modules ran, so that compare can replay it.  [default: on]",
)
@click.option(
    "--weights",
    multiple=True,
    metavar="FILE",
    help="Checkpoint that parameters may be referenced from (repeatable).",
)
@click.option(
    "--patch",
    multiple=True,
    metavar="CALL",
    help="Replace what this call returns by --patch-from's (NAME[@STEP][:SLOT]; repeatable).",
)
@click.option(
    "--patch-from", metavar="REF", default="", help="The run that --patch takes outputs from."
)
@click.option(
    "--inject",
    metavar="FAULT@NAME",
    default="",
    help="Plant a fault (scale@layers.3.mlp), to see it found.",
)
@click.option(
    "--level",
    type=click.Choice(["modules", "op", "graph", "logits"]),
    default="modules",
    show_default=True,
    help="Every module call, every operator or compiled graph too, or of every model call its "
    "tokens and logits alone.",
)
@click.option(
    "--samples",
    type=click.IntRange(0),
    metavar="N",
    help="With --level op: keep the elements of N calls of each operator only.",
)
@click.option(
    "--dedup",
    is_flag=True,
    help="With --level op: write one call of each signature, and count all.",
)
@click.option(
    "--graph-mode",
    type=click.Choice(["exact", "deep", "fx"]),
    default="exact",
    show_default=True,
    help="With --level graph: what kernels leave, what every node computes, or the graph run "
    "node by node.",
)
@click.option(
    "--graph-buffers",
    is_flag=True,
    help="With --level graph: keep buffers too that no node of the graph names.",
)
@click.option(
    "--graph-anyway", is_flag=True, help="With --graph-mode deep: also where it changes the result."
)
@click.option(
    "--logits-module",
    metavar="PATTERN",
    default="",
    help="With --level logits: the module inside that makes the logits.",
)
@click.option(
    "--positions",
    type=click.Choice(["last", "all"]),
    default="last",
    show_default=True,
    help="With --level logits: of the last token of each row, or of all.",
)
@click.option(
    "--force-tokens",
    metavar="REF",
    default="",
    help="Go on with the tokens of this run, not with the program's own.",
)
@click.option(
    "--rung",
    type=click.Choice(
        ["eager", "dynamo", "aot_eager", "aot_eager_decomp_partition", "inductor", "rounded"]
    ),
    help="Compile only so far: torch.compile gets another backend (`whence ladder` runs all).",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Take labels only, and compare their two sides when CMD has ended; -o is the comparison.",
)
@click.option(
    "--library",
    metavar="NAME|FILE",
    default="",
    help="Have this library save its tensors: acltransformer, atb, or a profile.",
)
@click.option(
    "--library-runner",
    metavar="NAMES",
    default="",
    help="Only of these operations of the library.  [default: all]",
)
@click.option(
    "--library-max",
    type=int,
    metavar="N",
    help="Of so many tokens.  [default: as the profile says]",
)
@click.option(
    "--library-dump",
    metavar="DIR",
    default="",
    help="Where the library puts its tensors.  [default: as the profile says]",
)
@click.argument("cmd", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- CMD ...")
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
    return code or CODES[result.status]
