"""How far a run moved from the one before it, in one line: for a pull request."""

from __future__ import annotations

from whence.records.slots import is_output
from whence.report import effect
from whence.report.tables import clean
from whence.results import Comparison, Row, Status, VerdictKind

_WHOLE_CALL = -1
"""`Verdict.stretch` of a leaf."""


def drift(result: Comparison) -> str:
    """What became of the numbers: none, rounding and where it begins, a fault, or not known."""
    if result.status == Status.UNDECIDED:
        return "not known, whence cannot tell"
    if result.status == Status.DIFFERENT:
        if not result.findings:
            return "more than rounding"
        return f"a fault in {clean(result.findings[0].name) or 'the model'}"
    first = _first(result)
    if first is None:
        return "none, bitwise identical"
    what = "as declared" if first.verdict == VerdictKind.DECLARED else "rounding"
    begins = f"{what}, from {clean(first.name) or 'the model'}{_ulps(first)} on"
    return f"{begins}; {effect.words(result.effect)}" if result.effect is not None else begins


def _first(result: Comparison) -> Row | None:
    """The first output that differs, in the order of execution: of a leaf, where one does."""
    if set(result.counts) <= {VerdictKind.IDENTICAL}:
        return None
    leaves = {verdict.pair for verdict in result.verdicts if verdict.stretch == _WHOLE_CALL}
    differing = [
        row for row in result.rows if not row.measured.identical and is_output(row.reference_slot)
    ]
    of_leaves = (row for row in differing if row.pair in leaves)
    return next(of_leaves, differing[0] if differing else None)


def _ulps(row: Row) -> str:
    """By how many units in the last place the worst element is off, where that was measured."""
    ulps = row.measured.values.get("ulp_max")
    return f" ({ulps:.0f} ulp)" if ulps else ""
