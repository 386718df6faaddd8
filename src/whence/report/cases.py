"""What a comparison says of each call that was compared: passes, fails, or cannot be told."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from whence.report.tables import AT_LINE
from whence.results import GUILTY, CallPair, Comparison, Confidence, Row, VerdictKind, severity

_SURE = (Confidence.CERTAIN, Confidence.LIKELY, Confidence.NONE)
_UNTOLD = (VerdictKind.INCOMPARABLE, VerdictKind.UNDETERMINED, VerdictKind.NONDETERMINISTIC)
_MADE = ("output", "mutated")
_DOWNSTREAM = (VerdictKind.INHERITED, VerdictKind.AMPLIFIED)


class Case(msgspec.Struct, frozen=True):
    """One compared call. outcome: "passed", "failed", or "skipped" (not comparable, not judged, or
    only suspected). why: in a sentence.
    """

    name: str
    op_type: str
    step: int
    rank: int
    occurrence: int
    verdict: str
    outcome: str
    why: str


def cases(result: Comparison) -> Iterator[Case]:
    """Every compared call in the order of the reference; calls of which no tensor is paired are
    left out.
    """
    called = {f.pair: f.source for f in result.findings if AT_LINE.search(f.source)}
    outcomes: dict[int, tuple[bool, str]] = {}
    # the worst is said last, and stays
    for verdict in sorted(result.verdicts, key=lambda v: severity(v.verdict)):
        line = verdict.source or called.get(verdict.pair, "")
        outcomes[verdict.pair] = (
            verdict.confidence in _SURE,
            f"{verdict.sentence}; called at {line}" if line else verdict.sentence,
        )
    rows_of: dict[int, list[Row]] = {}
    for row in result.rows:
        rows_of.setdefault(row.pair, []).append(row)
    for pair, rows in rows_of.items():
        row = rows[0]
        sure, sentence = outcomes.get(pair, (True, ""))
        outcome, why = "passed", sentence
        if row.verdict in GUILTY:
            outcome, why = (
                ("failed", sentence) if sure else ("skipped", f"only a suspicion: {sentence}")
            )
        elif row.verdict in _UNTOLD:
            outcome = "skipped"
            why = (
                sentence
                or next((r.measured.why for r in rows if r.measured.why), "")
                or row.verdict
            )
        elif lost := _unseen(result.plan.pairs[pair], rows):
            outcome, why = "skipped", lost
        elif row.verdict in _DOWNSTREAM and result.inputs_differ:
            outcome, why = "skipped", "the inputs of the models differ, so this proves nothing"
        yield Case(
            row.name, row.op_type, row.step, row.rank, row.occurrence, row.verdict, outcome, why
        )


def _unseen(pair: CallPair, rows: list[Row]) -> str:
    """Which output of a call could not be compared, and why; "" when all were. An empty tensor
    holds nothing that could differ.
    """
    for slot in pair.only_reference:
        if slot.startswith(_MADE):
            return f"{slot} has no partner"
    for row in rows:
        if (
            row.reference_slot.startswith(_MADE)
            and row.measured.tier == "none"
            and 0 not in row.reference_shape
        ):
            return f"{row.reference_slot}: {row.measured.why}"
    return ""
