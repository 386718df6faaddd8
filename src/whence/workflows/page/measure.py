"""Measures what a page shows of a comparison (`whence.results.page`): the calls in order, and
tensors of the most telling ones looked at closely.

The calls come from the comparison alone; where the runs still lie where they were, what only they
know is added: the tree, sources, facts of both sides, elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from whence import align
from whence.comparison.programs import programs
from whence.errors import WhenceError
from whence.records import Run
from whence.records.marks import OBSERVER
from whence.results import Comparison
from whence.results.page import Page, PageDetail, PageSide
from whence.workflows.page.calls import page_calls
from whence.workflows.page.details import page_details
from whence.workflows.page.limit import limited
from whence.workflows.page.places import page_places
from whence.workflows.page.unpaired import page_unpaired
from whence.workflows.page.vocabulary import vocabulary
from whence.workflows.reopen import reopened, runs_of

DETAILS = 40
_ALWAYS = ("started", "capture ended")  # differ between any two runs
_LONGEST = 200  # characters of a setting


def page_of(
    compared: Comparison,
    *,
    folder: str = "",
    details: int = DETAILS,
    runs: tuple[Run, Run] | None = None,
    tokenizer: Path | None = None,
    tell: Callable[[int, int, str], None] = lambda *_: None,
) -> Page:
    """The page of a comparison. details: calls whose tensors are looked at: findings, what
    introduces, their neighbours, then the rest.

    folder: where the comparison lies. runs: both, where they are open already; else they are
    opened. tokenizer: a tokenizer.json, or its folder. Reads elements of these only. A run that is
    gone or was changed is no error: `missing` says so.
    """
    missing: list[str] = []
    aligned: align.Aligned | None = None
    try:
        runs = runs or runs_of(compared, folder)
        if any(programs.is_program(run) for run in runs):
            missing.append(
                "programs were compared before anything was computed: there is no tensor to show"
            )
        # else tokens alone were compared
        elif compared.generation is None or not compared.generation.logits_only:
            aligned, _ = reopened(compared, runs=runs)
        if aligned is not None and not _is_of(aligned, compared):
            aligned, runs = None, None
            missing.append(
                "the runs are not those that were compared (they were changed since): the tree, "
                "sources and elements are left out"
            )
    except (WhenceError, OSError) as error:
        missing.append(
            "the runs could not be read again, so the tree, sources and elements are left out: "
            f"{error}"
        )
    calls = page_calls(compared, aligned)
    tensors: tuple[PageDetail, ...] = ()
    if aligned is not None and details and calls:
        tensors = page_details(compared, aligned, calls, details, tell)
    texts = vocabulary(compared, runs, tokenizer)
    reference, target = [_facts(run) for run in runs] if runs is not None else [{}, {}]
    whole = Page(
        compared,
        _side(compared.reference, reference, target),
        _side(compared.target, target, reference),
        calls,
        tensors,
        tuple(missing),
        folder,
        places=page_places(compared, aligned) if aligned is not None else (),
        unpaired=page_unpaired(compared, aligned, calls) if aligned is not None else (),
        vocabulary=texts,
    )
    return limited(whole)


def _side(path: str, facts: Mapping[str, str], other_side: Mapping[str, str]) -> PageSide:
    """A run with its facts, and names of those that differ from the other side's."""
    differing = (
        name
        for name in {**facts, **other_side}
        if name not in _ALWAYS and facts.get(name) != other_side.get(name)
    )
    return PageSide(path, tuple(facts.items()), tuple(differing) if other_side else ())


def _is_of(aligned: align.Aligned, compared: Comparison) -> bool:
    """Is this the plan of the comparison?"""
    named = {row.pair: row.name for row in compared.rows}
    if len(aligned.plan.pairs) != len(compared.plan.pairs):
        return False
    for index, (pair, then) in enumerate(zip(aligned.plan.pairs, compared.plan.pairs)):
        call = aligned.reference.calls[pair.reference]
        if (pair.reference, pair.target) != (then.reference, then.target) or named.get(
            index, call.scope or call.root
        ) != (call.scope or call.root):
            return False
    return True


def _facts(run: Run) -> dict[str, str]:
    """How a run came about, by name, as text."""
    info = run.info
    out = {
        "kind": info.kind if info.kind != "whence" else "",
        "command": " ".join(info.command),
        "host": info.host,
        "started": info.started,
        "commit": info.git,
        "seed": "" if info.seed is None else str(info.seed),
        "devices": ", ".join(info.devices),
        **info.versions,
        "capture ended": run.ended,
    }
    for root, settings in align.settings_of(run).items():
        for name, value in settings.items():
            if (
                isinstance(value, (str, int, float, bool, list, dict))
                and len(str(value)) < _LONGEST
            ):
                out[f"{root}: {name}"] = (
                    ", ".join(map(str, value)) if isinstance(value, (list, dict)) else str(value)
                )
    for number, note in enumerate(n for n in run.notes if n.kind == "observer"):
        if number < 3:
            out[f"observer effect {number + 1}" if number else "observer effect"] = (
                note.text.removeprefix(OBSERVER)
            )
    return {k: v for k, v in out.items() if v}
