"""The answer in a few sentences, in the order in which they are asked for."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from whence.report.answer import CAUSES, same_words
from whence.report.evidence import basis, chance, visible
from whence.report.generation import UNSEEN_IN_LOGITS
from whence.report.tables import clean, count
from whence.results import Comparison, Evidence, Finding, Status, VerdictKind
from whence.results.page import Page

_WORDS = {"same": "Same", "different": "Different", "undecided": "Undecided"}

_STARTS: dict[str, str] = {
    VerdictKind.PARAM_DIFF: "A parameter differs in",
    VerdictKind.STRUCTURAL: "The structure differs at",
}


def headline(page: Page) -> dict[str, Any]:
    """title of the page, word and sentence of the answer, where it starts, cause, what it rests on,
    what it would have seen, coverage as (number, words).
    """
    result = page.comparison
    first = result.findings[0] if result.findings else None
    names = [
        PurePath(clean(path)).name or clean(path) for path in (result.reference, result.target)
    ]
    return {
        "title": f"{_WORDS[result.status]}: {names[1]} against {names[0]} - whence",
        "word": _WORDS[result.status],
        "names": names,
        "sentence": _sentence(result, first),
        "where": _where(first) if first is not None else "",
        "cause": f"{first.cause}: {CAUSES[first.cause]}"
        if first is not None and first.cause in CAUSES
        else "",
        "confidence": first.confidence if first is not None else "",
        "rests": _rests(page),
        "seen": visible(result) if result.status == Status.SAME else "",
        "chance": chance(first).removeprefix("; ") if first is not None else "",
        "coverage": _coverage(result),
    }


def _sentence(result: Comparison, first: Finding | None) -> str:
    if result.inputs_differ:
        return (
            "The inputs differ, so nothing further down is proof: "
            f"{clean(result.inputs_differ[0])}."
        )
    if result.status == Status.SAME:
        return (
            "Bitwise identical."
            if set(result.counts) <= {VerdictKind.IDENTICAL}
            else f"No fault: every difference is {same_words(result)}."
        )
    if first is None:
        return (
            f"{clean(result.headline[:1].upper() + result.headline[1:])}."
            if result.headline
            else "No operator is at fault beyond doubt."
        )
    others = (
        f" and {count(len(result.findings) - 1, 'further finding')}"
        if len(result.findings) > 1
        else ""
    )
    start = _STARTS.get(first.verdict, "The error starts in")
    kind = f" ({clean(first.op_type)})" if first.op_type else ""
    return f"{start} {clean(first.name)}{kind}{others}."


def _rests(page: Page) -> str:
    generation = page.comparison.generation
    if generation is not None and generation.logits_only:
        return (
            "logits alone"
            if set(page.comparison.counts) == {VerdictKind.IDENTICAL}
            else f"logits alone; could not have seen {UNSEEN_IN_LOGITS}"
        )
    return basis(page.comparison) if page.comparison.coverage.calls else "outputs alone"


def _where(finding: Finding) -> str:
    parts = [f"step {finding.step}, rank {finding.rank}", clean(finding.slot), clean(finding.phase)]
    also = f"also in {count(len(finding.also), 'sibling')}" if finding.also else ""
    side = "in the reference" if finding.side == "reference" else ""
    return ", ".join(part for part in (*parts, also, side) if part)


def _coverage(result: Comparison) -> list[tuple[str, str]]:
    c = result.coverage
    if result.generation is not None and result.generation.logits_only:
        return [
            (
                count(result.generation.compared),
                f"of {count(result.generation.of, 'token')} compared",
            )
        ]
    if not c.calls:
        return []
    return [
        (count(c.calls), "captured"),
        (count(c.paired), "paired"),
        (count(c.measured), "measured"),
        (count(c.replayed if result.evidence == Evidence.REPLAY else 0), "replayed"),
        (count(result.unmatched), "unmatched"),
        (count(result.incomparable), "incomparable"),
    ]
