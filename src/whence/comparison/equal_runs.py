"""The answer about two runs that say the same in every line and every hash: read off the columns of
one index, with nothing decoded for a call but the few fields that could make it a special one.

It is what the stages of a comparison find of such runs. What they would look at more closely
(marks, errors, ranks, operators, a policy) is left to them.
"""

from __future__ import annotations

import msgspec

from whence import extras
from whence.align.environment import differences, settings_of
from whence.comparison.answer.runs import capture_notes, versions
from whence.comparison.call_columns import CallColumns, of_columns
from whence.comparison.options import CompareOptions
from whence.comparison.replays.sampling import Sampling
from whence.comparison.verdicts.status import Gaps, decide, failed_alone
from whence.records import Run
from whence.records.views import CachedRun
from whence.results import (
    Comparison,
    Coverage,
    Evidence,
    Plan,
    VerdictKind,
)
from whence.store import StoredRun, say_the_same


def answer(reference: Run, target: Run, options: CompareOptions) -> Comparison | None:
    """The comparison of two runs that are equal; None where they are not, or where the answer about
    them takes more than this.
    """
    runs = of_columns(reference, target, options)
    if runs is None or _has_more_to_tell(runs[0], options) or not say_the_same(*runs):
        return None
    calls = CallColumns(runs[0])
    return _answer(*runs, options, calls) if calls.are_plain() else None


def _has_more_to_tell(run: StoredRun, options: CompareOptions) -> bool:
    """Is an answer about this run more than about its calls: about logits alone, about a program
    beside it, or that nothing can be replayed here?
    """
    return (
        run.info.options.get("level") == "logits"
        or any(settings.get("program") for settings in settings_of(run).values())
        or (options.replay and bool(run.programs) and not extras.is_here("torch"))
    )


def _answer(
    reference: StoredRun, target: StoredRun, options: CompareOptions, calls: CallColumns
) -> Comparison:
    number = len(reference.calls)
    replayed = number - calls.labels if options.replay else 0
    coverage = Coverage(number, number, number, replayed, calls.programs, True)
    status, why, _ = decide(
        (), (), coverage, Gaps(one_sided=failed_alone(reference.info, target.info)),
        inputs_differ=False, strict=options.strict,
        min_coverage=options.min_coverage,
    )  # fmt: skip
    sampling = Sampling(calls.steps(), everything=options.sample == "all", budget=None)
    result = Comparison(
        status=status,
        evidence=Evidence.TWO_DUMPS,
        reference=reference.path,
        target=target.path,
        findings=(),
        first_difference=None,
        counts={VerdictKind.IDENTICAL: calls.with_verdict()},
        coverage=coverage,
        unmatched=0,
        incomparable=0,
        inputs_differ=(),
        versions=versions(reference),
        plan=Plan(calls.pairs()),
        rows=calls.rows(),
        verdicts=calls.verdicts(),
        headline=why,
        notes=(
            *sampling.notes(calls.labels),
            *capture_notes("reference", reference, ()),
            *capture_notes("target", target, ()),
        ),
        environment=tuple(differences(reference, target)),
    )
    if not calls.may_hold_tokens():
        return result
    from whence.comparison.answer import generation

    read = CachedRun(reference)
    generated, unknown = generation.generated(read, CachedRun(target), result, read.calls)
    return msgspec.structs.replace(result, generation=generated, notes=(*result.notes, *unknown))
