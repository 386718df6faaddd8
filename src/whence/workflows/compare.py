"""Compare two runs and keep the answer: a Comparison in memory, and its files in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from whence.errors import OutputExists, UsageError
from whence.workflows.saved import check_output, load_policy, views, write

if TYPE_CHECKING:
    from torch.nn import Module

    from whence.align import Aligned
    from whence.judge.policy import Policy
    from whence.records import Run
    from whence.results import Comparison


def compare(
    reference: str | os.PathLike[str] | Run | Mapping[str, Any],
    target: str | os.PathLike[str] | Run | Mapping[str, Any],
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    replay: bool = True,
    strict: bool = False,
    min_coverage: float = 0.9,
    tier: str = "full",
    allow: tuple[str, ...] = (),
    again: Sequence[str | os.PathLike[str] | Run] = (),
    third: str | os.PathLike[str] | Run | None = None,
    policy: str | os.PathLike[str] | Policy | None = None,
    mapping: str | os.PathLike[str] | None = None,
    program: str | os.PathLike[str] | Run | Sequence[str | os.PathLike[str] | Run] | None = None,
    model: str | Module | Callable[[], Module] | None = None,
    match: str = "auto",
    sample: str = "auto",
    budget: float | None = None,
    view: str | Sequence[str] = (),
    occurrences: bool = False,
    html: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Comparison:
    """Compare two runs (folders, opened runs, {name: array}): do they still compute the same, and
    if not, from which operator on?

    output: a folder to write `summary.json`, `report.csv`, `report.json` (and `generation.csv` of
    what was generated) into; None writes nothing. replay: run the recorded programs of the
    reference on the target's inputs. strict: precision losses and suspects count as different.
    min_coverage: share of the reference's calls that must be measured for `same`. tier: "core" or
    "full" figures per pair. again: further runs of the reference, same program and inputs; what
    they differ by joins the noise budget. third: the reference in higher precision; both runs are
    measured against it, and it is the yardstick where nothing can be replayed. policy: declared
    differences (docs/policy.md), a file or what `load_policy` made of it. mapping: a YAML file that
    says which calls are paired (docs/alignment.md). program: of two logs without data flow, the
    program that was run (.pdmodel, PIR .json; docs/formats.md); two when the target's is another
    one. It says what each tensor was made of, and what the two programs differ in. model: the
    reference's model, used where no program of a call is usable: a `torch.nn.Module`, a function
    that makes it, or "module:factory", which is imported (and so runs). Weights come from the run;
    it is never written. match: how calls find their partners. "auto": by names, then order, data
    flow and content; "exact": equal names only; "names": also those that differ in spelling;
    "order": line by line, refused at the first line that disagrees. sample: "auto" replays the
    first, middle and last of more than 16 steps and what stands out in the others, "all" every
    call. budget: seconds of wall time for replaying; what is left is judged from two dumps. view:
    names of tables as other tools write them (docs/views.md): in `Comparison.views`, and as
    `<view>.csv` in the folder. occurrences: count the executions of each operator
    (`Comparison.occurrences`), also of runs of modules; those of operators have it. html: also
    write the comparison as one page (`report_html`); a page that is there is replaced if `force`.
    Raises UnreadableRun, UsageError, OutputExists.
    """
    from whence.align import MATCHES, load_map
    from whence.comparison.options import CompareOptions
    from whence.comparison.pipeline import compare_runs
    from whence.comparison.prepare import partial_prints
    from whence.comparison.programs import program_flow, programs
    from whence.comparison.replays import user_model
    from whence.readers.opening import open_run
    from whence.workflows.capture import arrays

    if tier not in ("core", "full"):
        raise UsageError(f"tier {tier!r}: core or full")
    if match not in MATCHES:
        raise UsageError(f"match {match!r}: {', '.join(MATCHES[:-1])} or {MATCHES[-1]}")
    if sample not in ("auto", "all"):
        raise UsageError(f"sample {sample!r}: auto or all")
    if budget is not None and not budget >= 0:
        raise UsageError(f"budget {budget}: seconds, 0 or more")
    shown = (view,) if isinstance(view, str) else tuple(dict.fromkeys(view))
    if unknown := [name for name in shown if name not in views()]:
        raise UsageError(f"view {unknown[0]!r}: {', '.join(views())}")
    if not 0.0 <= min_coverage <= 1.0:
        raise UsageError(f"min_coverage {min_coverage}: a share between 0 and 1")
    if model is not None and not replay:
        raise UsageError(
            "model (--model) is for replay, which is switched off: leave one of them out"
        )
    _check_again(reference, again)
    declared = load_policy(policy) if isinstance(policy, (str, os.PathLike)) else policy
    folder = Path(output) if output is not None else None
    if folder is not None:
        check_output(folder, force)
    if html is not None and Path(html).exists() and not force:
        raise OutputExists(f"{os.fspath(html)} exists; --force replaces it, or choose another page")

    def opened(
        run: str | os.PathLike[str] | Run | Mapping[str, Any], words: str = "<arrays>"
    ) -> Run:
        if isinstance(run, Mapping):
            return arrays.in_memory(run, words)
        return open_run(os.fspath(run)) if isinstance(run, (str, os.PathLike)) else run

    left, right, finer = (
        opened(reference, "<reference arrays>"),
        opened(target, "<target arrays>"),
        opened(third) if third is not None else None,
    )
    runs = left, right
    left, right, given = programs.apply_programs(
        left, right, programs.open_programs(program, opened)
    )
    left, right = partial_prints.alike(*program_flow.with_agreeing_inputs(left, right))
    options = CompareOptions(
        replay=replay,
        strict=strict,
        min_coverage=min_coverage,
        tier=tier,
        allow=allow,
        policy=declared,
        match=match,
        chart=load_map(mapping) if mapping is not None else None,
        sample=sample,
        budget=budget,
        model=user_model.read(model) if model is not None else None,
        views=shown,
        progress=progress,
        occurrences=occurrences,
    )
    if programs.is_program(left) or programs.is_program(right):
        result = programs.compare(left, right)
    else:
        result = programs.with_differences(
            compare_runs(left, right, options, again=[opened(run) for run in again], third=finer),
            given,
            left,
            right,
        )
    asked = {
        "mapping": mapping,
        "match": match if match != "auto" else None,
        "allow": list(allow),
        "policy": policy,
        "model": model,
    }
    given_by_name = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in asked.items()}
    result = msgspec.structs.replace(
        result, asked={k: v for k, v in given_by_name.items() if v and isinstance(v, (str, list))}
    )
    if folder is not None:
        write(result, folder)
    if html is not None:
        from whence.workflows.page.write import report_html

        report_html(folder if folder is not None else result, html, force=force, runs=runs)
    return result


def face(
    reference: str | os.PathLike[str] | Run,
    target: str | os.PathLike[str] | Run,
    *,
    mapping: str | os.PathLike[str] | None = None,
    match: str = "auto",
) -> Aligned:
    """Bring two runs face to face without comparing them: the plan, and the runs it speaks of.

    mapping, match: as `compare` takes them. Raises UnreadableRun, UsageError.
    """
    from whence import align
    from whence.comparison.verdicts.sparse_target.inner_tensors import inside
    from whence.readers.figures import with_figures
    from whence.readers.opening import open_run

    opened = (
        open_run(os.fspath(run)) if isinstance(run, (str, os.PathLike)) else run
        for run in (reference, target)
    )
    left, right = map(with_figures, opened)
    return align.align(
        left,
        right,
        match=match,
        user_map=align.load_map(mapping) if mapping is not None else None,
        inside=inside,
    )


def _check_again(
    reference: str | os.PathLike[str] | Run | Mapping[str, Any],
    again: Sequence[str | os.PathLike[str] | Run],
) -> None:
    paths = (str, os.PathLike)
    if isinstance(again, paths):
        raise UsageError(f"again takes a list of runs: again=[{os.fspath(again)!r}]")
    for run in again:
        if run is reference or (
            isinstance(run, paths)
            and isinstance(reference, paths)
            and Path(run).resolve() == Path(reference).resolve()
        ):
            raise UsageError(
                "again: that is the reference itself, which tells nothing about repetition; "
                "capture the program once more"
            )
