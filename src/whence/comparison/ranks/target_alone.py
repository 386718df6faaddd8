"""What ranks of the target alone part in: said before anything else, in words of ranks."""

from __future__ import annotations

import msgspec

from whence.comparison.ranks.report import report
from whence.records import Run
from whence.results import Comparison, RankFinding, RankVerdict, Status


def with_ranks(result: Comparison, reference: Run, target: Run) -> Comparison:
    """The answer with what the target's ranks part in and the reference's do not. Where the answer
    is that the runs differ, its first finding is named by what comes before it.
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
    """Findings of the target's ranks whose cause the reference's ranks do not have."""
    if len({call.rank for call in target.calls}) < 2:
        return ()
    found = report(target).findings
    if not found or len({call.rank for call in reference.calls}) < 2:
        return found
    known = {(f.check, f.cause) for f in report(reference).findings}
    return tuple(f for f in found if (f.check, f.cause) not in known)
