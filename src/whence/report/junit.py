"""A Comparison as JUnit XML: one test case for the answer, and one for every call or generated
prompt.

A compared call passes, fails, or cannot be told (`_cases`); calls that could not be compared are
skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from xml.etree import ElementTree

from whence.report.answer import answer, headline
from whence.report.tables import AT_LINE, clean
from whence.results import GUILTY, CallPair, Comparison, Confidence, Row, VerdictKind, severity

_OUTCOMES = {"same": "passed", "different": "failed", "undecided": "skipped"}


def junit_xml(result: Comparison) -> str:
    """The whole file. Characters that XML does not allow are removed from names and sentences."""
    suite = _Suite(sum(result.timing.values()))
    suite.case(
        "answer",
        f"{result.reference} against {result.target}",
        _OUTCOMES[result.status],
        result.status,
        headline(result),
        answer(result),
    )
    for row, outcome, why in _cases(result):
        name = row.name + (f" #{row.occurrence}" if row.occurrence else "")
        group = f"rank{row.rank}.step{row.step}"
        suite.case(group, f"{name} ({row.op_type})", outcome, row.verdict, why)
    for side, names in result.without_partner.items():
        for name in names:
            ambiguous = side == "ambiguous"
            why = "several calls fit it equally well" if ambiguous else f"only in the {side}"
            suite.case("unmatched", name, "skipped", "unmatched", f"no partner: {why}")
    for prompt in result.generation.prompts if result.generation else ():
        failing = "skipped" if prompt.outcome == "not compared" else "failed"
        compared = f"{prompt.outcome}; {prompt.compared} of {prompt.of} tokens compared"
        suite.case(
            "prompts",
            f"prompt {prompt.number} ({prompt.root}, step {prompt.step}, row {prompt.row})",
            "passed" if prompt.passes else failing,
            prompt.outcome,
            compared,
        )
    return suite.text()


class _Suite:
    """A test suite in XML, which counts its cases."""

    def __init__(self, seconds: float) -> None:
        self._root = ElementTree.Element("testsuite", name="whence", time=f"{seconds:.3f}")
        self._counts: Counter[str] = Counter()

    def case(
        self, group: str, name: str, outcome: str, kind: str, why: str, body: str = ""
    ) -> None:
        """Add a case. outcome: passed, failed or skipped."""
        self._counts[outcome] += 1
        element = ElementTree.SubElement(
            self._root, "testcase", classname=f"whence.{group}", name=clean(name), time="0"
        )
        if outcome != "passed":
            tag = "failure" if outcome == "failed" else "skipped"
            ElementTree.SubElement(element, tag, type=kind, message=clean(why)).text = body or None

    def text(self) -> str:
        """The whole file."""
        self._root.set("tests", str(self._counts.total()))
        self._root.set("failures", str(self._counts["failed"]))
        self._root.set("errors", "0")
        self._root.set("skipped", str(self._counts["skipped"]))
        ElementTree.indent(self._root)
        text = ElementTree.tostring(self._root, encoding="unicode")
        return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


_SURE = (Confidence.CERTAIN, Confidence.LIKELY, Confidence.NONE)
_UNTOLD = (VerdictKind.INCOMPARABLE, VerdictKind.UNDETERMINED, VerdictKind.NONDETERMINISTIC)
_MADE = ("output", "mutated")
_DOWNSTREAM = (VerdictKind.INHERITED, VerdictKind.AMPLIFIED)


def _cases(result: Comparison) -> Iterator[tuple[Row, str, str]]:
    """(a row of the call, outcome, sentence) for every compared call, in the order of the
    reference. Outcome: "passed", "failed" or "skipped" (not comparable, not judged, or only
    suspected). Calls without a paired tensor are left out.
    """
    called = {f.pair: f.source for f in result.findings if AT_LINE.search(f.source)}
    outcomes: dict[int, tuple[bool, str]] = {}
    # the worst verdict comes last and is kept
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
        yield row, outcome, why


def _unseen(pair: CallPair, rows: list[Row]) -> str:
    """Which output of a call could not be compared, and why; "" when all were. Empty tensors do not
    count: they have no elements that could differ.
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
