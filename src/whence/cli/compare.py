"""Compare two runs: rounding or a bug, and in which operator.

\b
    whence compare runs/ref runs/tgt
    whence compare runs/ref runs/tgt -o cmp --format json

Exit code: 0 the same, 1 different (a likely or certain finding), 2 undecided, 3 an error: an input
cannot be read, or a file that was asked for cannot be written.

Without -o nothing is written, but the last comparison made in a folder is remembered, and `whence
report`, `trace`, `repro` and `locate` use it when they are given none.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whence.cli import _answers, _files, _progress
from whence.cli._answers import CODES
from whence.cli._options import (
    COUNT,
    HERE,
    PATH,
    REPLACE_COMPARISON,
    SHARE,
    STRICT,
    argument,
    option,
    seconds,
    verb,
)

if TYPE_CHECKING:
    from whence.results import Comparison

# read, not imported: help must stay light
_VIEWS = sorted(
    path.stem for path in (Path(__file__).parents[1] / "report" / "views").glob("[!_]*.py")
)


@verb(
    argument("reference", "REF"),
    argument("target", "TGT"),
    "Answer",
    *_answers.options("text"),
    STRICT,
    option("--bisect", "Exit codes for `git bisect run`: 0, 1, otherwise 125."),
    option(
        "--min-coverage SHARE",
        "Share of the calls that must be measured for the answer to be 'same'.",
        SHARE,
        default=0.9,
    ),
    option(
        "--partial",
        "Runs that end early, lack ranks or hold files that cannot be read may be the same in "
        "what is there.",
    ),
    option(
        "--ignore PATTERN ...",
        "Files that need not be read, by name within REF or TGT, as '*.npy' (repeatable).",
    ),
    option(
        "--shape NAME=SHAPE ...",
        "Shape and dtype of raw bytes (.bin, .raw, .dat), where neither a file beside them nor the "
        "other run tells, as logits=2x12x64:float32 (repeatable).",
    ),
    option(
        "--tier",
        "How many metrics per pair of tensors.",
        ("core", "full"),
        default="full",
        rare=True,
    ),
    option(
        "--policy FILE",
        "Declared differences: what may differ, and where (TOML or YAML; docs/policy.md).",
        PATH,
    ),
    option(
        "--occurrences",
        "List for every operator which of its executions is the first to differ.",
        rare=True,
    ),
    "Files",
    option(
        "-o, --output CMP",
        "Folder for summary.json, report.csv and report.json, or its URL in an object store.  "
        "[default: nothing is written]",
        PATH,
    ),
    REPLACE_COMPARISON,
    _answers.JUNIT,
    option(
        "--view NAME ...",
        f"Also write the table of another tool, as CMP/NAME.csv: {', '.join(_VIEWS)} (repeatable; "
        "docs/convert.md).",
    ),
    option("--html FILE", "Also write the HTML page of `whence report`.", HERE),
    "Pairing",
    option(
        "--map FILE",
        "Which calls and tensors correspond, where whence cannot tell (YAML; docs/alignment.md).",
        PATH,
        name="mapping",
    ),
    option(
        "--program FILE ...",
        "For logs: the program that ran (.pdmodel, .json); give it twice when TGT ran another.",
        PATH,
    ),
    option("--plan", "Print how calls are paired and why; compare nothing."),
    option(
        "--match",
        "How calls are paired: by all rules, by equal names, by similar names, or in order.",
        ("auto", "exact", "names", "order"),
        default="auto",
    ),
    "Replay",
    option("--no-replay", "Do not re-run recorded operators: judge from the stored tensors alone."),
    option(
        "--sample",
        "Replay every call, or of many steps only a few and what stands out.",
        ("auto", "all"),
        default="auto",
        rare=True,
    ),
    option(
        "--budget TIME", "Limit for the time spent on replay: 90, 60s, 5m, 1h.", seconds, rare=True
    ),
    option(
        "--allow NAMESPACE:: ...",
        "Also replay the vendor operators of this namespace (repeatable).",
    ),
    option(
        "--model MODULE:FACTORY",
        "A function that returns REF's model, to replay calls that were not recorded; it is "
        "imported and run.",
    ),
    "More runs",
    option(
        "--again RUN ...",
        "Another run of REF on the same inputs: what differs between the two is not a fault "
        "(repeatable).",
        PATH,
    ),
    option("--third RUN", "REF in higher precision: shows which of the two is closer to it.", PATH),
    option(
        "--layers DIR",
        "Of logits: run both programs again up to the first token that is off, into DIR, and "
        "compare every layer.",
        HERE,
    ),
    option(
        "--watch",
        "Compare while the runs are still being written, until both have ended or a fault is "
        "certain.",
    ),
    "Many cores",
    option(
        "--engine",
        "Measure and replay in this process, in processes of this machine, or on a Ray cluster "
        "(docs/large-runs.md).",
        ("local", "processes", "ray"),
        default="local",
    ),
    option(
        "--workers N",
        "How many processes, or workers of Ray.  [default: one a core]",
        COUNT,
        rare=True,
    ),
    option(
        "--address ADDR",
        "Of a running Ray cluster (auto, HOST:PORT, ray://HOST:PORT).  [default: Ray here]",
        rare=True,
    ),
)
def command(
    reference: str,
    target: str,
    output: str | None,
    force: bool,
    form: str,
    annotations: bool,
    junit: str | None,
    html: str | None,
    bisect: bool,
    plan: bool,
    no_replay: bool,
    watch: bool,
    layers: str | None,
    **how: Any,
) -> int:
    """Words -> `api.compare` -> report -> exit code. how: what it takes as it is."""
    from whence import api
    from whence.report.answer import headline
    from whence.report.tables import clean

    _answers.check(form, annotations, junit, force)
    if plan:
        return _plan(reference, target, form, mapping=how["mapping"], match=how["match"])
    if unknown := [name for name in how["view"] if name not in _VIEWS]:
        raise click.UsageError(
            f"--view {unknown[0]}: there is no such view; choose one of {', '.join(_VIEWS)}"
        )
    if how["view"] and output is None:
        raise click.UsageError("--view writes CMP/NAME.csv; name the folder with -o CMP")
    if output is not None:
        api.check_output(output, force)
    _files.check(html, force)
    is_local = how["engine"] == "local"
    how |= {"replay": not no_replay, "program": how["program"] or None}
    if watch and not (is_local and layers is None):
        raise click.UsageError("--watch compares in this process; leave --engine and --layers out")
    if watch:
        result = _watched(reference, target, output, **how)
    else:
        with _progress.shown() as line:
            result = api.compare(reference, target, progress=line.count, **how)
            if layers is not None:
                click.echo(clean(headline(result)), err=True)
                result = api.compare_layers(result, output=layers, tell=line.say)
    _answers.put(
        _answers.said(result, form, annotations, occurrences=how["occurrences"], output=output)
    )
    _answers.all_of(
        lambda: _write(result, output, form),
        lambda: _answers.junit(result, junit),
        lambda: _write_page(result, output, html, force),
    )
    _answers.kept(result, output)
    code = CODES[result.status]
    return 125 if bisect and code == 2 else code


def _plan(reference: str, target: str, form: str, **how: Any) -> int:
    from whence import api
    from whence.report.plan import plan_json, plan_text

    if form not in ("text", "json"):
        raise click.UsageError(f"--plan prints text or json, not {form}")
    aligned = api.align_runs(reference, target, **how)
    text_of = plan_json if form == "json" else plan_text
    sys.stdout.write(text_of(aligned.plan, aligned.reference, aligned.target))
    return 0


def _write(result: Comparison, output: str | None, form: str) -> None:
    from whence import api
    from whence.report.answer import written_to

    if output is not None:
        api.write(result, output)
        click.echo(written_to(result, output), err=form != "text")


def _write_page(result: Comparison, output: str | None, html: str | None, force: bool) -> None:
    from whence import api

    if html is not None:
        is_there = output is not None and (Path(output) / "report.json").is_file()
        api.report_html(output if is_there and output is not None else result, html, force=force)


def _watched(reference: str, target: str, output: str | None, **how: Any) -> Comparison:
    """The last of the comparisons. Those before it are a line on stderr each; each lies in `output`
    until the next one does.
    """
    from whence import api
    from whence.errors import WhenceError
    from whence.report.answer import headline
    from whence.report.tables import clean

    previous = None
    with _progress.shown() as line:
        for result in api.watch(reference, target, tell=line.say, **how):
            if previous is not None:
                click.echo(f"{_so_far(previous)}: {clean(headline(previous))}", err=True)
            if output is not None:
                # said behind the last answer, where it still is so
                with contextlib.suppress(WhenceError):
                    api.write(result, output)
            previous = result
    assert previous is not None  # it ends with an answer or not at all
    return previous


def _so_far(result: Comparison) -> str:
    """Of which steps a look of a watch speaks, and its status."""
    from whence.report.tables import count

    number = len({(row.rank, row.step) for row in result.rows})
    return f"after {count(number, 'step')}: {result.status}"
