"""Differences between ranks that only the target has; the answer states them first."""

from __future__ import annotations

import msgspec

from whence.comparison.ranks.report import report
from whence.records import Run
from whence.results import Comparison, RankFinding, RankVerdict, Status


def with_ranks(result: Comparison, reference: Run, target: Run) -> Comparison:
    """The answer with the findings between ranks that only the target has. If the answer is not
    `same` and the first of them comes before its first finding, the finding's sentence states it.
    """
    rank_findings = found_in_target(reference, target)
    if not rank_findings:
        return result
    result = msgspec.structs.replace(result, ranks=rank_findings)
    words = rank_findings[0].sentence
    if rank_findings[0].verdict != RankVerdict.FAULT or result.status == Status.SAME:
        return result
    if not result.findings:
        headline = f"{words}; {result.headline}" if result.headline else words
        return msgspec.structs.replace(result, headline=headline)
    first, *others = result.findings
    if max(rank_findings[0].step, 0) > first.step:
        return result
    first = msgspec.structs.replace(first, sentence=f"{words}; {first.sentence}")
    return msgspec.structs.replace(result, findings=(first, *others))


def found_in_target(reference: Run, target: Run) -> tuple[RankFinding, ...]:
    """Findings between the target's ranks whose check and cause do not occur in the reference."""
    if len({call.rank for call in target.calls}) < 2:
        return ()
    of_target = report(target).findings
    if not of_target or len({call.rank for call in reference.calls}) < 2:
        return of_target
    known = {(f.check, f.cause) for f in report(reference).findings}
    return tuple(f for f in of_target if (f.check, f.cause) not in known)
