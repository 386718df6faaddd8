"""The first screen of a page: what, where, why, how sure, the effect at the outputs, what next."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from whence.records.slots import is_of_child
from whence.report import effect
from whence.report.answer import CAUSES, is_bitwise, same_words
from whence.report.evidence import basis, chance, visible
from whence.report.generation import UNSEEN_IN_LOGITS
from whence.report.html.steps import next_steps
from whence.report.tables import AT_LINE, clean, count, from_here
from whence.results import (
    Comparison,
    Confidence,
    Evidence,
    Finding,
    Status,
    VerdictKind,
)
from whence.results.page import Page

_WORDS = {"same": "Same", "different": "Different", "undecided": "Undecided"}

_STARTS: dict[str, str] = {
    VerdictKind.PARAM_DIFF: "A parameter differs in",
    VerdictKind.STRUCTURAL: "The structure differs at",
}
_SURE: dict[str, str] = {
    Confidence.CERTAIN: "Certain",
    Confidence.LIKELY: "Likely",
    Confidence.SUSPECT: "Suspect",
}
_CODE = re.compile(r"\w*[._]\w")
_BOTH_SIDES = re.compile(r": \S+ is .+ in the reference, ")
"""A clause of a finding that names an argument with both values."""


def headline(page: Page) -> dict[str, Any]:
    """title of the page, kind of the answer in a word, its sentence, and the six answers: where
    (name, type, more), why (sentences, the most telling first), sure, effect, next.
    """
    result = page.comparison
    first = result.findings[0] if result.findings else None
    names = [
        PurePath(clean(path)).name or clean(path) for path in (result.reference, result.target)
    ]
    return {
        "title": f"{_WORDS[result.status]}: {names[1]} against {names[0]} - whence",
        "word": _WORDS[result.status],
        "kind": _kind(result, first),
        "names": names,
        "sentence": _sentence(page, first),
        "where": _where(page, first),
        "why": _why(page, first),
        "sure": _sure(page, first),
        "seen": visible(result) if result.status == Status.SAME else "",
        "effect": _effect(page),
        "next": next_steps(page),
        "coverage": _coverage(result),
    }


def _kind(result: Comparison, first: Finding | None) -> str:
    """The answer in two words."""
    if result.status == Status.UNDECIDED:
        return "Cannot tell"
    if result.status == Status.SAME:
        return "No difference" if is_bitwise(result) else "No fault"
    if result.inputs_differ:
        return "Different inputs"
    return "Fault" if first is not None else "Different"


def _sentence(page: Page, first: Finding | None) -> str:
    result = page.comparison
    if result.inputs_differ:
        return (
            "The inputs differ, so nothing further down is proof: "
            f"{clean(result.inputs_differ[0])}."
        )
    if result.status == Status.SAME:
        where = ", in what is there" if result.missing else ""
        return (
            f"Bitwise identical{where}."
            if is_bitwise(result)
            else f"No fault: every difference is {same_words(result)}{where}."
        )
    if first is None:
        return _undecided(result)
    others = (
        f" and {count(len(result.findings) - 1, 'further finding')}"
        if len(result.findings) > 1
        else ""
    )
    start = _STARTS.get(first.verdict, "The error starts in")
    kind = f" ({clean(first.op_type)})" if first.op_type else ""
    return f"{start} {clean(first.name)}{kind}{others}."


def _undecided(result: Comparison) -> str:
    """What cannot be told, without the reason where that stands below."""
    about, text = result.undecided, clean(result.headline)
    if not text:
        return "No operator is at fault beyond doubt."
    if about is None:
        return f"{_upper(text)}."
    reason = clean(about.why)
    if reason and text.endswith(f": {reason}"):
        text = text.removesuffix(f": {reason}")
    # The name of a call keeps its letters.
    return f"{text if text.startswith(clean(about.place)) else _upper(text)}."


def _upper(text: str) -> str:
    """The text with a capital, unless it begins with a name of code."""
    return text if _CODE.match(text) else text[:1].upper() + text[1:]


def _where(page: Page, first: Finding | None) -> dict[str, Any]:
    """name, type, source of the call that the answer is about, and more in words; empty where it is
    about none.
    """
    if first is not None:
        return {
            "name": clean(first.name),
            "type": clean(first.op_type),
            "source": clean(from_here(first.source)) if AT_LINE.search(first.source) else "",
            "more": _more(first),
        }
    if page.comparison.status == Status.SAME:
        return {"text": "No call differs" if is_bitwise(page.comparison) else "No call is at fault"}
    about = page.comparison.undecided
    if page.comparison.status != Status.UNDECIDED or about is None:
        return {}
    slot, place = clean(about.slot), f"step {about.step}, rank {about.rank}"
    others = f"and {count(about.others, 'other')}" if about.others else ""
    return {
        "name": clean(about.name or about.root),
        "type": clean(about.op_type),
        "source": clean(from_here(about.source)) if AT_LINE.search(about.source) else "",
        "more": [part for part in (slot, place, others) if part],
    }


def _more(finding: Finding) -> list[str]:
    operator = finding.operator.removeprefix("aten.").removesuffix(".default")
    parts = [
        f"operator {clean(operator)}" if operator else "",
        "in its own code" if is_of_child(finding.slot) else clean(finding.slot),
        f"step {finding.step}, rank {finding.rank}",
        clean(finding.phase),
        f"also in {count(len(finding.also), 'sibling')}" if finding.also else "",
        "in the reference" if finding.side == "reference" else "",
    ]
    return [part for part in parts if part]


def _why(page: Page, first: Finding | None) -> list[str]:
    result = page.comparison
    if first is not None:
        clauses = [clean(clause) for clause in first.sentence.split("; ") if clause]
        named = [clause for clause in clauses if _BOTH_SIDES.search(clause)]
        if not named and page.places and page.places[0].arguments:
            named = [clean(page.places[0].arguments)]
        cause = _upper(CAUSES.get(first.cause, ""))
        rest = [_upper(clause) for clause in clauses if clause not in named]
        return [text for text in (*named, cause, *rest) if text]
    if result.status == Status.SAME:
        worst = max(page.calls, key=lambda call: call.score or 0.0, default=None)
        if worst is None or not worst.score:
            return []
        return [
            f"The largest error is {worst.score:.2g} times what is allowed there: "
            f"{clean(worst.name)}" + (f" ({clean(worst.op_type)})" if worst.op_type else "")
        ]
    return [_upper(clean(result.undecided.why))] if result.undecided is not None else []


def _sure(page: Page, first: Finding | None) -> list[str]:
    rests = _rests(page)
    if first is None or page.comparison.status != Status.DIFFERENT:
        return [_upper(rests)] if rests else []
    sure = _SURE.get(first.confidence, _upper(first.confidence))
    return [text for text in (sure, chance(first).removeprefix("; "), rests) if text]


def _rests(page: Page) -> str:
    generation = page.comparison.generation
    if generation is not None and generation.logits_only:
        return (
            "logits alone"
            if is_bitwise(page.comparison)
            else f"logits alone; could not have seen {UNSEEN_IN_LOGITS}"
        )
    return basis(page.comparison) if page.comparison.coverage.calls else "outputs alone"


def _effect(page: Page) -> list[str]:
    """What the differences come to at the outputs of the model, in parts."""
    result = page.comparison
    if result.effect is not None:
        return effect.words(result.effect).split("; ")
    if not page.calls:
        return []
    if is_bitwise(result):
        return ["none: everything is bitwise equal"]
    return ["not known: no output of a model was compared"]


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
