"""The status of a comparison: same, different or undecided (DESIGN section 5a)."""

from __future__ import annotations

from collections.abc import Sequence

from whence.results import Confidence, Coverage, Finding, Status, Verdict, VerdictKind


def decide(
    findings: Sequence[Finding],
    verdicts: Sequence[Verdict],
    coverage: Coverage,
    *,
    inputs_differ: bool,
    strict: bool = False,
    min_coverage: float = 0.9,
    partly: int = 0,
) -> tuple[str, str]:
    """(status, why) of a comparison.

    different: a finding that is likely or certain (with `strict`, also precision and suspects).
    undecided: no pairs, root outputs unmeasured, coverage below `min_coverage`, differing root
    inputs, or nothing better than suspects. Else same. partly: of how many tensors text shows a
    part; where that is why, it is said.
    """
    if any(f.confidence in (Confidence.CERTAIN, Confidence.LIKELY) for f in findings):
        return Status.DIFFERENT, ""
    if strict and (
        findings
        or any(
            v.verdict == VerdictKind.PRECISION or v.confidence == Confidence.SUSPECT
            for v in verdicts
        )
    ):
        return Status.DIFFERENT, "strict: precision losses and suspects count"
    if coverage.paired == 0:
        return Status.UNDECIDED, "no call of one run faces a call of the other"
    if inputs_differ:
        return Status.UNDECIDED, "the root inputs differ, so differing outputs prove nothing"
    if (
        partly
        and not findings
        and (not coverage.root_outputs_measured or coverage.share < min_coverage)
    ):
        were = "tensor was" if partly == 1 else "tensors were"
        return (
            Status.UNDECIDED,
            f"no fault in what was printed, but {partly} {were} printed in part: print all "
            "elements to know",
        )
    if not coverage.root_outputs_measured:
        return Status.UNDECIDED, "not every output of the root could be measured"
    if coverage.share < min_coverage:
        return (
            Status.UNDECIDED,
            f"only {coverage.measured} of {coverage.calls} calls could be measured "
            f"({coverage.share:.0%}, --min-coverage {min_coverage:.0%})",
        )
    if findings:
        return Status.UNDECIDED, "only suspects: beyond noise, but the evidence is weak"
    return _open_regions(verdicts)


def _open_regions(verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """Undecided where a region differs and could not be judged."""
    # None is infinite
    beyond = [
        v
        for v in verdicts
        if v.verdict == VerdictKind.UNDETERMINED and v.numbers.get("e_out", 0.0) != 0.0
    ]
    if not beyond:
        return Status.SAME, ""
    regions = "1 region differs" if len(beyond) == 1 else f"{len(beyond)} regions differ"
    why = f"{regions} and could not be judged; the first: {beyond[0].sentence}"
    return Status.UNDECIDED, why
