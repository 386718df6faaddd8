"""The status of a comparison: same, different or undecided (DESIGN section 5a)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from whence.records import Call, RunInfo
from whence.records.training import BACKWARD, OPTIMIZER
from whence.results import (
    Confidence,
    Coverage,
    Finding,
    Status,
    Undecided,
    Verdict,
    VerdictKind,
)


def _whole_model(_pair: int) -> Undecided:
    return Undecided("", "")


@dataclass(frozen=True, slots=True)
class Gaps:
    """What was not compared, in words, for an answer that has to say so.

    calls: of the reference and of the target. tensor: the first that could not be measured, with
    the reason, and `output` the first such output of a model; None where there is none. partly: of
    how many tensors text shows a part. about: a call by the index of its pair. one_sided: which of
    the two commands failed as the other did not, which training updated its parameters less, or
    which model only the target ran.
    """

    calls: tuple[int, int] = (0, 0)
    tensor: Undecided | None = None
    output: Undecided | None = None
    partly: int = 0
    about: Callable[[int], Undecided] = _whole_model
    one_sided: str = ""


class Decision(NamedTuple):
    """A status, why it is that, and what an undecided one is about where that is one call."""

    status: Status
    why: str = ""
    undecided: Undecided | None = None


def failed_alone(reference: RunInfo, target: RunInfo) -> str:
    """Which command failed where the other did not, in a sentence; "" where both ended alike."""
    codes = [info.settings.get("exit_code", 0) for info in (reference, target)]
    if all(codes) or not any(codes):
        return ""
    side, other = ("target", "reference") if codes[1] else ("reference", "target")
    return (
        f"no fault in what was captured, but the {side}'s command failed (exit code {sum(codes)}) "
        f"and the {other}'s did not: what it did not reach was not compared"
    )


def updated_less(reference: Sequence[Call], target: Sequence[Call]) -> str:
    """Which training updated its parameters after fewer of as many backward passes, in a sentence;
    "" where neither did.
    """
    sides = {"reference": _updates(reference), "target": _updates(target)}
    (side, (passes, fewer)), (_, (others, more)) = sorted(sides.items(), key=lambda s: len(s[1][1]))
    if passes != others or len(fewer) == len(more):
        return ""
    seen = fewer | _changes(reference if side == "reference" else target)
    # Where no optimiser shows, nothing shows the last update: no forward pass reads what it leaves.
    missing = sorted(more - seen)
    if not missing or (not fewer and seen and missing == [max(more)]):
        return ""
    return (
        f"the {side} updates its parameters after {len(seen)} of {passes} backward passes, the "
        f"other after {len(more)}: it does not in step {missing[0]}"
    )


def _updates(calls: Sequence[Call]) -> tuple[int, set[int]]:
    """The number of backward passes on the first rank, and the steps in which an optimiser ran."""
    outermost = [c for c in calls if c.parent == -1 and c.rank == calls[0].rank]
    steps = {c.step for c in outermost if c.phase == OPTIMIZER}
    return sum(c.phase == BACKWARD for c in outermost), steps


def _changes(calls: Sequence[Call]) -> set[int]:
    """The steps behind which a forward pass reads another parameter than the one before did."""
    read: dict[tuple[str, str, str], tuple[int, int]] = {}
    changed = set()
    for call in (c for c in calls if c.phase == "forward" and c.rank == calls[0].rank):
        for ref in call.slots("param"):
            step, record = read.get((call.root, call.scope, ref.slot), (call.step, ref.record))
            changed |= {step} if record != ref.record else set()
            read[call.root, call.scope, ref.slot] = call.step, ref.record
    return changed


def decide(
    findings: Sequence[Finding],
    verdicts: Sequence[Verdict],
    coverage: Coverage,
    gaps: Gaps,
    *,
    inputs_differ: bool,
    strict: bool = False,
    min_coverage: float = 0.9,
) -> Decision:
    """The status of a comparison, and why.

    different: a finding that is likely or certain (with `strict`, also precision and suspects).
    undecided: no pairs, root outputs unmeasured, coverage below `min_coverage`, differing root
    inputs, or nothing better than suspects. Else same.
    """
    if any(f.confidence in (Confidence.CERTAIN, Confidence.LIKELY) for f in findings):
        return Decision(Status.DIFFERENT)
    if strict and (
        findings
        or any(
            v.verdict == VerdictKind.PRECISION or v.confidence == Confidence.SUSPECT
            for v in verdicts
        )
    ):
        return Decision(Status.DIFFERENT, "strict: precision losses and suspects count")
    gap = _not_compared(
        coverage, gaps, min_coverage, inputs_differ=inputs_differ, is_silent=not findings
    )
    if gap is not None:
        return gap
    if findings:
        first = findings[0]
        return Decision(
            Status.UNDECIDED,
            f"{first.name or 'the model'} is beyond its limit for noise, but not by enough to be "
            "called a fault",
            _of_finding(first, len(findings) - 1),
        )
    return _open_regions(verdicts, gaps)


def _not_compared(
    coverage: Coverage, gaps: Gaps, min_coverage: float, *, inputs_differ: bool, is_silent: bool
) -> Decision | None:
    """Undecided where something was not compared and could hide a fault. is_silent: there is no
    finding.
    """

    def undecided(why: str, tensor: Undecided | None = None) -> Decision:
        return Decision(Status.UNDECIDED, why, tensor)

    too_few = coverage.share < min_coverage
    if coverage.paired == 0:
        return undecided(f"no call could be paired ({gaps.calls[0]} against {gaps.calls[1]})")
    if inputs_differ:
        return undecided("the inputs of the model differ, so outputs that differ prove nothing")
    if gaps.partly and is_silent and (too_few or not coverage.root_outputs_measured):
        were = "tensor was" if gaps.partly == 1 else "tensors were"
        return undecided(
            f"no fault in what was printed, but {gaps.partly} {were} printed in part: print all "
            "elements to know"
        )
    if not coverage.root_outputs_measured:
        if gaps.one_sided and is_silent:
            return undecided(gaps.one_sided, gaps.output)
        what = f": {_in_words(gaps.output)}" if gaps.output else ""
        return undecided(f"not every output of the model could be measured{what}", gaps.output)
    if too_few:
        what = f"; the first that could not: {_in_words(gaps.tensor)}" if gaps.tensor else ""
        return undecided(
            f"only {coverage.seen} of {coverage.calls} calls could be measured "
            f"({coverage.share:.0%}, --min-coverage {min_coverage:.0%}){what}",
            gaps.tensor,
        )
    return None


def _in_words(tensor: Undecided) -> str:
    return f"{tensor.place} ({tensor.why})" if tensor.why else tensor.place


def _of_finding(finding: Finding, others: int) -> Undecided:
    return Undecided(
        finding.name,
        finding.op_type,
        finding.slot,
        finding.step,
        finding.rank,
        finding.root,
        finding.source,
        finding.sentence,
        others,
        finding.pair,
    )


def _open_regions(verdicts: Sequence[Verdict], gaps: Gaps) -> Decision:
    """Undecided where a region differs and could not be judged."""
    # None is infinite
    beyond = [
        v
        for v in verdicts
        if v.verdict == VerdictKind.UNDETERMINED and v.numbers.get("e_out", 0.0) != 0.0
    ]
    if not beyond:
        return Decision(Status.UNDECIDED if gaps.one_sided else Status.SAME, gaps.one_sided)
    first = msgspec.structs.replace(
        gaps.about(beyond[0].pair),
        slot=beyond[0].slot,
        why=beyond[0].sentence,
        others=len(beyond) - 1,
        pair=beyond[0].pair,
    )
    return Decision(
        Status.UNDECIDED,
        f"{first.place} could not be judged: {first.why}"
        if len(beyond) == 1
        else f"{len(beyond)} regions could not be judged; the first is {first.place}: {first.why}",
        first,
    )
