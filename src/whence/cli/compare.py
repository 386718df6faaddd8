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
import gc
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whence.cli import _answers, _files, _help, _options, _progress

if TYPE_CHECKING:
    from whence.results import Comparison

CODES = {"same": 0, "different": 1, "undecided": 2}
# read, not imported: help must stay light
_VIEWS = sorted(
    path.stem for path in (Path(__file__).parents[1] / "report" / "views").glob("[!_]*.py")
)


def _seconds(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no time; write 90, 60s, 5m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


_GROUPS = {
    "Answer": "--format --annotations --bisect --strict --policy --min-coverage --partial "
    "--ignore --tier "
    "--occurrences",
    "Files": "--output --force --html --junit --view",
    "Pairing": "--plan --match --map --program",
    "Replay": "--no-replay --model --sample --budget --allow",
    "More runs": "--again --third --watch --stop --discard",
    "Many cores": "--engine --workers --address --resume",
}
_RARE = "--tier --occurrences --sample --budget --workers --address"


@click.command("compare", cls=_help.Grouped, help=__doc__, groups=_GROUPS, rare=_RARE)
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="TGT", type=click.Path())
@click.option(
    "-o",
    "--output",
    metavar="CMP",
    type=click.Path(),
    help="Folder for summary.json, report.csv and report.json, or its URL in an object store.  "
    "[default: nothing is written]",
)
@_options.REPLACE_COMPARISON
@_answers.options("text")
@click.option(
    "--no-replay",
    is_flag=True,
    help="Do not re-run recorded operators: judge from the stored tensors alone.",
)
@_options.STRICT
@click.option(
    "--bisect", is_flag=True, help="Exit codes for `git bisect run`: 0, 1, otherwise 125."
)
@click.option(
    "--min-coverage",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    default=0.9,
    show_default=True,
    help="Share of the calls that must be measured for the answer to be 'same'.",
)
@click.option(
    "--partial",
    is_flag=True,
    help="Runs that end early, lack ranks or hold files that cannot be read may be the same in "
    "what is there.",
)
@click.option(
    "--ignore",
    metavar="PATTERN",
    multiple=True,
    help="Files that need not be read, by name within REF or TGT, as '*.npy' (repeatable).",
)
@click.option(
    "--tier",
    type=click.Choice(["core", "full"]),
    default="full",
    show_default=True,
    help="How many metrics per pair of tensors.",
)
@click.option(
    "--map",
    "chart",
    metavar="FILE",
    type=click.Path(),
    help="Which calls and tensors correspond, where whence cannot tell (YAML; docs/alignment.md).",
)
@click.option(
    "--program",
    multiple=True,
    metavar="FILE",
    type=click.Path(),
    help="For logs: the program that ran (.pdmodel, .json); give it twice when TGT ran another.",
)
@click.option("--plan", is_flag=True, help="Print how calls are paired and why; compare nothing.")
@click.option(
    "--policy",
    metavar="FILE",
    type=click.Path(),
    help="Declared differences: what may differ, and where (TOML or YAML; docs/policy.md).",
)
@click.option(
    "--match",
    type=click.Choice(["auto", "exact", "names", "order"]),
    default="auto",
    show_default=True,
    help="How calls are paired: by all rules, by equal names, by similar names, or in order.",
)
@click.option(
    "--sample",
    type=click.Choice(["auto", "all"]),
    default="auto",
    show_default=True,
    help="Replay every call, or of many steps only a few and what stands out.",
)
@click.option(
    "--budget",
    metavar="TIME",
    callback=_seconds,
    help="Limit for the time spent on replay: 90, 60s, 5m, 1h.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="NAMESPACE::",
    help="Also replay the vendor operators of this namespace (repeatable).",
)
@click.option(
    "--again",
    multiple=True,
    metavar="RUN",
    type=click.Path(),
    help="Another run of REF on the same inputs: what differs between the two is no fault "
    "(repeatable).",
)
@click.option(
    "--third",
    metavar="RUN",
    type=click.Path(),
    help="REF in higher precision: shows which of the two is closer to it.",
)
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help="A function that returns REF's model, to replay calls that were not recorded; it is "
    "imported and run.",
)
@click.option(
    "--view",
    multiple=True,
    metavar="NAME",
    help=f"Also write the table of another tool, as CMP/NAME.csv: {', '.join(_VIEWS)} (repeatable; "
    "docs/convert.md).",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "processes", "ray"]),
    default="local",
    show_default=True,
    help="Measure and replay in this process, in processes of this machine, or on a Ray cluster "
    "(docs/large-runs.md).",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many processes, or workers of Ray.  [default: one a core]",
)
@click.option(
    "--address",
    metavar="ADDR",
    help="Of a running Ray cluster (auto, HOST:PORT, ray://HOST:PORT).  [default: Ray here]",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with what workers finished in -o CMP before the same comparison was stopped.",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Compare while the runs are still being written, until both have ended or a fault is "
    "certain.",
)
@click.option(
    "--stop",
    is_flag=True,
    help="With --watch: at a certain fault, end the programs of yours that write the runs on this "
    "host.",
)
@click.option(
    "--discard",
    is_flag=True,
    help="With --watch, of runs captured by `whence run --window`: delete each window of both runs "
    "once it is compared, but for the first two that are not the same.",
)
@click.option(
    "--html",
    metavar="FILE",
    type=_options.HERE,
    help="Also write the HTML page of `whence report`.",
)
@click.option(
    "--occurrences",
    is_flag=True,
    help="List for every operator which of its executions is the first to differ.",
)
def command(
    reference: str, target: str, output: str | None, force: bool, form: str, **values: Any
) -> int:
    """Words -> `api.compare` -> report -> exit code."""
    from whence import api

    _answers.check(form, values["annotations"], values["junit"], force)
    if values["plan"]:
        return _plan(reference, target, form, mapping=values["chart"], match=values["match"])
    # Results are many and hold no cycles; scanning them again and again costs a third of the time.
    gc.set_threshold(200_000, 50, 100)
    if unknown := [name for name in values["view"] if name not in _VIEWS]:
        raise click.UsageError(
            f"--view {unknown[0]}: there is no such view; choose one of {', '.join(_VIEWS)}"
        )
    if values["view"] and output is None:
        raise click.UsageError("--view writes CMP/NAME.csv; name the folder with -o CMP")
    if output is not None:
        api.check_output(output, force, resume=values["resume"])
    _files.check(values["html"], force)
    how = {name: values[name] for name in _PASSED_ON}
    how |= {"replay": not values["no_replay"], "mapping": values["chart"]}
    how["program"] = values["program"] or None
    if values["stop"] and not values["watch"]:
        raise click.UsageError("--stop ends programs that are watched; add --watch")
    if values["discard"] and not values["watch"]:
        raise click.UsageError("--discard deletes what a watch has compared; add --watch")
    if values["watch"]:
        if values["engine"] != "local":
            raise click.UsageError("--watch compares in this process; leave --engine out")
        result = _watched(reference, target, output, how, values)
    else:
        how |= {name: values[name] for name in ("engine", "workers", "address", "resume")}
        result = _compared(reference, target, output, how)
    text = _answers.said(
        result, form, values["annotations"], occurrences=values["occurrences"], output=output
    )
    _answers.put(text)
    _answers.all_of(
        lambda: _write(result, output, form, is_written=values["engine"] != "local"),
        lambda: _answers.junit(result, values["junit"]),
        lambda: _write_page(result, output, values["html"], force),
    )
    _answers.kept(result, output)
    code = CODES[result.status]
    return 125 if values["bisect"] and code == 2 else code


_PASSED_ON = (
    *("strict", "min_coverage", "tier", "allow", "policy", "again", "match"),
    *("third", "sample", "budget", "model", "view", "occurrences", "partial", "ignore"),
)
"""Options that `api.compare` takes as they are."""


def _plan(reference: str, target: str, form: str, **how: Any) -> int:
    from whence import api
    from whence.report.plan import plan_json, plan_text

    if form not in ("text", "json"):
        raise click.UsageError(f"--plan prints text or json, not {form}")
    aligned = api.align_runs(reference, target, **how)
    text_of = plan_json if form == "json" else plan_text
    sys.stdout.write(text_of(aligned.plan, aligned.reference, aligned.target))
    return 0


def _write(result: Comparison, output: str | None, form: str, *, is_written: bool) -> None:
    from whence import api
    from whence.report.answer import written_to

    if output is not None:
        if not is_written:
            api.write(result, output)
        click.echo(written_to(result, output), err=form != "text")


def _write_page(result: Comparison, output: str | None, html: str | None, force: bool) -> None:
    from whence import api

    if html is not None:
        is_there = output is not None and (Path(output) / "report.json").is_file()
        api.report_html(output if is_there and output is not None else result, html, force=force)


def _compared(reference: str, target: str, output: str | None, how: dict[str, Any]) -> Comparison:
    from whence import api

    if how["engine"] != "local":  # what workers finish is kept there until the answer is
        how = {**how, "output": output, "force": True}
    with _progress.shown() as count:
        return api.compare(reference, target, progress=count, **how)


def _watched(
    reference: str,
    target: str,
    output: str | None,
    how: dict[str, Any],
    values: dict[str, Any],
) -> Comparison:
    """The last of the comparisons. Those before it are a line on stderr each; each lies in `output`
    until the next one does.
    """
    from whence import api
    from whence.errors import WhenceError
    from whence.report.answer import headline
    from whence.report.tables import clean

    say, close = _progress.teller()
    previous = None

    def tell_stopped(sentence: str) -> None:
        close()
        click.echo(f"whence: {clean(sentence)}", err=True)

    stop = tell_stopped if values["stop"] else False
    options = {**how, "stop": stop, "discard": values["discard"]}
    try:
        for result in api.watch(reference, target, tell=say, **options):
            if previous is not None:
                click.echo(f"{_so_far(previous)}: {clean(headline(previous))}", err=True)
            if output is not None:
                # said behind the last answer, where it still is so
                with contextlib.suppress(WhenceError):
                    api.write(result, output)
            previous = result
    finally:
        close()
    assert previous is not None  # it ends with an answer or not at all
    return previous


def _so_far(result: Comparison) -> str:
    """Of which steps a look of a watch speaks, and its status."""
    from whence.report.tables import count
    from whence.report.windows import steps

    if result.windows:
        return f"{steps(result.windows[-1:])}: {result.windows[-1].status}; all so far"
    number = len({(row.rank, row.step) for row in result.rows})
    return f"after {count(number, 'step')}: {result.status}"
