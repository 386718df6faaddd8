"""A Comparison as JUnit XML: a case for the answer, and one for every call or generated prompt.
What could not be compared is skipped.
"""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

from whence.report.answer import answer, headline
from whence.report.cases import cases
from whence.report.tables import clean
from whence.results import Comparison

_OUTCOMES = {"same": "passed", "different": "failed", "undecided": "skipped"}


def junit_xml(result: Comparison) -> str:
    """The whole file. Names and sentences are cleaned of everything that XML cannot hold."""
    suite = _Suite(sum(result.timing.values()))
    suite.case(
        "answer",
        f"{result.reference} against {result.target}",
        _OUTCOMES[result.status],
        result.status,
        headline(result),
        answer(result),
    )
    for call in cases(result):
        name = call.name + (f" #{call.occurrence}" if call.occurrence else "")
        suite.case(
            f"rank{call.rank}.step{call.step}",
            f"{name} ({call.op_type})",
            call.outcome,
            call.verdict,
            call.why,
        )
    for side, names in result.without_partner.items():
        for name in names:
            ambiguous = side == "ambiguous"
            why = "several calls fit it equally well" if ambiguous else f"only in the {side}"
            suite.case("unmatched", name, "skipped", "unmatched", f"no partner: {why}")
    for prompt in result.generation.prompts if result.generation else ():
        outcome = (
            "passed"
            if prompt.passes
            else "skipped"
            if prompt.outcome == "not compared"
            else "failed"
        )
        compared = f"{prompt.outcome}; {prompt.compared} of {prompt.of} tokens compared"
        suite.case(
            "prompts",
            f"prompt {prompt.number} ({prompt.root}, step {prompt.step}, row {prompt.row})",
            outcome,
            prompt.outcome,
            compared,
        )
    return suite.text()


class _Suite:
    """A test suite of XML, which counts its cases."""

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
