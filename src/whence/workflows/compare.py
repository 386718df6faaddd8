"""Compare two runs and keep the answer: a Comparison in memory, and its files in a folder."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from whence.errors import UsageError
from whence.records import Run
from whence.workflows.saved import AnyPath, AnyRun, as_run, check_output, load_policy, views, write

if TYPE_CHECKING:
    from torch.nn import Module

    from whence.align import Aligned, Map
    from whence.comparison.options import CompareOptions
    from whence.comparison.replays.user_model import Models
    from whence.judge.policy import Policy
    from whence.results import Comparison


def compare(
    reference: AnyRun | Mapping[str, Any],
    target: AnyRun | Mapping[str, Any],
    *,
    output: AnyPath | None = None,
    force: bool = False,
    replay: bool = True,
    strict: bool = False,
    min_coverage: float = 0.9,
    tier: str = "full",
    allow: tuple[str, ...] = (),
    again: Sequence[AnyRun] = (),
    third: AnyRun | None = None,
    policy: AnyPath | Policy | None = None,
    mapping: AnyPath | None = None,
    program: AnyRun | Sequence[AnyRun] | None = None,
    model: str | Module | Callable[[], Module] | None = None,
    match: str = "auto",
    sample: str = "auto",
    budget: float | None = None,
    view: str | Sequence[str] = (),
    occurrences: bool = False,
    html: AnyPath | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    partial: bool = False,
    ignore: Sequence[str] = (),
    shape: Sequence[str] = (),
) -> Comparison:
    """Compare two runs (folders, opened runs, {name: array}): do they still compute the same, and
    if not, from which operator on?

    output: a folder to write `summary.json`, `report.csv`, `report.json` (and `generation.csv` if
    tokens were generated) into; None writes nothing. replay: run the recorded programs of the
    reference on the target's inputs. strict: precision losses and suspects count as different.
    min_coverage: share of the reference's calls that must be measured for `same`. tier: "core" or
    "full" figures per pair. again: further runs of the reference, same program and inputs; what
    they differ by is added to the noise budget. third: the reference in higher precision; both runs
    are measured against it, and it is the yardstick where nothing can be replayed. policy: declared
    differences (docs/policy.md), a file or what `load_policy` made of it. mapping: a YAML file that
    says which calls are paired (docs/alignment.md). program: of two logs without data flow, the
    program that was run (.pdmodel, PIR .json; docs/formats.md); two if the target ran another one.
    It shows what each tensor was computed from, and where the two programs differ. model: the
    reference's model, used where no program of a call is usable: a `torch.nn.Module`, a function
    that makes it, or "module:factory", which is imported (and so runs). Weights come from the run;
    it is never written. match: how calls are paired. "auto": by names, then order, data flow and
    content; "exact": equal names only; "names": also those that differ in spelling; "order": line
    by line, refused at the first line that disagrees. sample: "auto" replays the first, middle and
    last of more than 16 steps and what stands out in the others, "all" every call. budget: seconds
    of wall time for replaying; what is left is judged from two dumps. view: names of tables as
    other tools write them (docs/convert.md): in `Comparison.views`, and as `<view>.csv` in the
    folder. occurrences: count the executions of each operator (`Comparison.occurrences`), also of
    runs of modules; those of operators have it. html: also write the comparison as one page
    (`report_html`); a page that is there is replaced if `force`. progress: called with (done, of,
    what); without one a notebook shows a line while it takes long. engine: where tensors that
    differ are measured and calls are replayed: "local" in this process, "processes" in processes of
    this machine, "ray" on a cluster (docs/large-runs.md); the answer is the same. workers: how many
    of them, default one a core. address: of a running Ray cluster; None starts Ray on this machine.
    partial: runs that ended early, lack ranks, are still being written or hold
    files that cannot be read may be `same` in what is there. ignore: patterns of file names,
    relative to a run, that need not be read for it. shape: NAME=2x12x64:float32, of files of raw
    bytes. Raises UnreadableRun, UsageError, OutputExists; MissingDependency without Ray.
    """
    arguments = dict(locals())
    from whence.comparison import equal_runs
    from whence.comparison.answer.runs import ended
    from whence.comparison.options import CompareOptions
    from whence.engines import create
    from whence.report.own_files import check_replaceable
    from whence.workflows import notebook_progress
    from whence.workflows.raw_shapes import with_shapes

    view_names = (view,) if isinstance(view, str) else tuple(dict.fromkeys(view))
    _check(arguments, view_names)
    if model is not None and not replay:
        raise UsageError(
            "model (--model) is for replay, which is switched off: leave one of them out"
        )
    _check_again(reference, again)
    declared = load_policy(policy) if isinstance(policy, (str, os.PathLike)) else policy
    place = os.fspath(output) if output is not None else None
    workers_engine = create(engine, workers=workers, address=address)
    if place is not None:
        check_output(place, force)
    if html is not None:
        check_replaceable(html, force)
    (reference, target), arguments["shape"] = with_shapes((reference, target), shape)
    runs = _both_opened(reference, target)
    third_run = _opened(third) if third is not None else None
    with (
        notebook_progress.counting(progress) as count,
        closing(workers_engine) if workers_engine is not None else nullcontext(),
    ):
        values = {n: arguments[n] for n in CompareOptions.__slots__ if n in arguments} | {
            "policy": declared,
            "chart": _map(mapping) if mapping is not None else None,
            "model": _model(model) if model is not None else None,
            "views": view_names,
            "progress": count,
            "engine": workers_engine,
            "ignore": tuple(ignore),
        }
        options = CompareOptions(**values)
        alone = not again and third is None and program is None
        result = equal_runs.answer(*runs, options) if alone else None
        if result is not None:
            result = ended(result, *runs, options)
        else:
            result = _by_stages(runs, options, program, list(map(_opened, again)), third_run)
        result = msgspec.structs.replace(
            result, asked=_plain({n: arguments[n] for n in _REMEMBERED})
        )
        if place is not None:
            write(result, place)
    if html is not None:
        from whence.workflows.page.write import report_html

        report_html(place if place is not None else result, html, force=force, runs=runs)
    return result


def _by_stages(
    runs: tuple[Run, Run],
    options: CompareOptions,
    program: Any,
    again: Sequence[Run],
    third: Run | None,
) -> Comparison:
    from whence.comparison.onnx_files import answer as onnx_files
    from whence.comparison.pipeline import compare_runs
    from whence.comparison.prepare import partial_prints
    from whence.comparison.programs import program_flow, programs

    a, b, program_files = programs.apply_programs(*runs, programs.open_programs(program, _opened))
    a, b = partial_prints.alike(*program_flow.with_agreeing_inputs(a, b))
    if onnx_files.can_compare(a, b):
        return onnx_files.compare(a, b)
    if programs.is_program(a) or programs.is_program(b):
        return programs.compare(a, b)
    result = compare_runs(a, b, options, again=again, third=third)
    return programs.with_differences(result, program_files, a, b)


def _map(path: str | os.PathLike[str]) -> Map:
    from whence.align import load_map

    return load_map(path)


def _model(model: str | Module | Callable[[], Module]) -> Models:
    from whence.comparison.replays import user_model

    return user_model.read(model)


_REMEMBERED = ("mapping", "match", "allow", "policy", "model", "shape")
"""Arguments for `reopen`, which compares the two runs again: `Comparison.asked`."""


def _check(arguments: Mapping[str, Any], view_names: Sequence[str]) -> None:
    from whence.align import MATCHES

    choices = {"tier": ("core", "full"), "match": MATCHES, "sample": ("auto", "all")}
    for name, words in choices.items():
        if arguments[name] not in words:
            raise UsageError(f"{name} {arguments[name]!r}: {', '.join(words[:-1])} or {words[-1]}")
    if arguments["budget"] is not None and not arguments["budget"] >= 0:
        raise UsageError(f"budget {arguments['budget']}: seconds, 0 or more")
    if unknown := [name for name in view_names if name not in views()]:
        raise UsageError(f"view {unknown[0]!r}: {', '.join(views())}")
    if not 0.0 <= arguments["min_coverage"] <= 1.0:
        raise UsageError(f"min_coverage {arguments['min_coverage']}: a share between 0 and 1")


def _both_opened(reference: Any, target: Any) -> tuple[Run, Run]:
    """Open both runs; two runs in object stores are opened in parallel."""
    from whence import store

    works = (
        functools.partial(_opened, reference, "<reference arrays>"),
        functools.partial(_opened, target, "<target arrays>"),
    )
    if not any(isinstance(run, str) and store.is_url(run) for run in (reference, target)):
        return works[0](), works[1]()
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as threads:
        first, second = [threads.submit(work) for work in works]
        return first.result(), second.result()


def _opened(run: AnyRun | Mapping[str, Any], words: str = "<arrays>") -> Run:
    if not isinstance(run, Mapping):
        return as_run(run)
    from whence.workflows.capture import arrays

    return arrays.in_memory(run, words)


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that were given and can be stored; paths as text."""
    texts = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in arguments.items()
        if value and value != "auto"
    }
    return {
        name: value if isinstance(value, str) else list(value)
        for name, value in texts.items()
        if isinstance(value, (str, tuple, list))
    }


def align_runs(
    reference: AnyRun,
    target: AnyRun,
    *,
    mapping: AnyPath | None = None,
    match: str = "auto",
) -> Aligned:
    """Pair two runs without comparing them: gives the plan, and the runs as they were aligned.

    mapping, match: as `compare` takes them. Raises UnreadableRun, UsageError.
    """
    from whence import align
    from whence.comparison.context import prepare
    from whence.comparison.options import CompareOptions

    chart = align.load_map(mapping) if mapping is not None else None
    options = CompareOptions(match=match, chart=chart)
    return prepare(as_run(reference), as_run(target), options).aligned


def _check_again(
    reference: AnyRun | Mapping[str, Any],
    further: Sequence[AnyRun],
) -> None:
    paths = (str, os.PathLike)
    if isinstance(further, paths):
        raise UsageError(f"again takes a list of runs: again=[{os.fspath(further)!r}]")
    for run in further:
        if run is reference or (
            isinstance(run, paths)
            and isinstance(reference, paths)
            and Path(run).resolve() == Path(reference).resolve()
        ):
            raise UsageError(
                "again: that is the reference itself, which shows nothing about repetition; "
                "capture the program once more"
            )
