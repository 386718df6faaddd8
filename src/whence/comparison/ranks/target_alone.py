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
    found = found_in_target(reference, target)
    if not found:
        return result
    result = msgspec.structs.replace(result, ranks=found)
    words = found[0].sentence
    if found[0].verdict != RankVerdict.FAULT or result.status == Status.SAME:
        return result
    if not result.findings:
        headline = f"{words}; {result.headline}" if result.headline else words
        return msgspec.structs.replace(result, headline=headline)
    first, *others = result.findings
    if max(found[0].step, 0) > first.step:
        return result
    first = msgspec.structs.replace(first, sentence=f"{words}; {first.sentence}")
    return msgspec.structs.replace(result, findings=(first, *others))


def found_in_target(reference: Run, target: Run) -> tuple[RankFinding, ...]:
    """Findings between the target's ranks whose check and cause do not occur in the reference."""
    if len({call.rank for call in target.calls}) < 2:
        return ()
    found = report(target).findings
    if not found or len({call.rank for call in reference.calls}) < 2:
        return found
    known = {(f.check, f.cause) for f in report(reference).findings}
    return tuple(f for f in found if (f.check, f.cause) not in known)
