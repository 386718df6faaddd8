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
    suite = ElementTree.Element(
        "testsuite", name="whence", time=f"{sum(result.timing.values()):.3f}"
    )
    counts: Counter[str] = Counter()

    def case(group: str, name: str, outcome: str, kind: str, why: str, body: str = "") -> None:
        counts[outcome] += 1
        made = ElementTree.SubElement(
            suite, "testcase", classname=f"whence.{group}", name=clean(name), time="0"
        )
        if outcome != "passed":
            tag = "failure" if outcome == "failed" else "skipped"
            ElementTree.SubElement(made, tag, type=kind, message=clean(why)).text = body or None

    told = answer(result)
    case(
        "answer",
        f"{result.reference} against {result.target}",
        _OUTCOMES[result.status],
        result.status,
        headline(result),
        told,
    )
    for call in cases(result):
        name = call.name + (f" #{call.occurrence}" if call.occurrence else "")
        case(
            f"rank{call.rank}.step{call.step}",
            f"{name} ({call.op_type})",
            call.outcome,
            call.verdict,
            call.why,
        )
    for side, names in result.without_partner.items():
        for name in names:
            why = f"only in the {side}" if side != "ambiguous" else "it may face several calls"
            case("unmatched", name, "skipped", "unmatched", f"no partner: {why}")
    for prompt in result.generation.prompts if result.generation else ():
        outcome = (
            "passed"
            if prompt.passes
            else "skipped"
            if prompt.outcome == "not compared"
            else "failed"
        )
        compared = f"{prompt.outcome}; {prompt.compared} of {prompt.of} tokens compared"
        case(
            "prompts",
            f"prompt {prompt.number} ({prompt.root}, step {prompt.step}, row {prompt.row})",
            outcome,
            prompt.outcome,
            compared,
        )
    suite.set("tests", str(counts.total()))
    suite.set("failures", str(counts["failed"]))
    suite.set("errors", "0")
    suite.set("skipped", str(counts["skipped"]))
    ElementTree.indent(suite)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        + ElementTree.tostring(suite, encoding="unicode")
        + "\n"
    )
