"""The first screen of a page: what, where, why, how sure, the effect at the outputs, what next."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from whence.report.answer import CAUSES, same_words
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
from whence.results.page import Page, PageCall

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
_UNJUDGED = (VerdictKind.UNDETERMINED, VerdictKind.INCOMPARABLE)
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
        "sentence": _sentence(result, first),
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
        return "No difference" if _is_equal(result) else "No fault"
    if result.inputs_differ:
        return "Different inputs"
    return "Fault" if first is not None else "Different"


def _is_equal(result: Comparison) -> bool:
    return set(result.counts) <= {VerdictKind.IDENTICAL}


def _sentence(result: Comparison, first: Finding | None) -> str:
    if result.inputs_differ:
        return (
            "The inputs differ, so nothing further down is proof: "
            f"{clean(result.inputs_differ[0])}."
        )
    if result.status == Status.SAME:
        return (
            "Bitwise identical."
            if _is_equal(result)
            else f"No fault: every difference is {same_words(result)}."
        )
    if first is None:
        return (
            f"{_upper(clean(result.headline))}."
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
    if page.comparison.status != Status.UNDECIDED:
        return {}
    call = _unjudged(page)
    if call is None:
        return {}
    return {
        "name": clean(call.name),
        "type": clean(call.op_type),
        "source": clean(from_here(call.source)) if AT_LINE.search(call.source) else "",
        "more": [
            part for part in (clean(call.slot), f"step {call.step}, rank {call.rank}") if part
        ],
    }


def _unjudged(page: Page) -> PageCall | None:
    """The first call that nothing could be told of."""
    calls = [call for call in page.calls if call.verdict in _UNJUDGED]
    return next((call for call in calls if call.leaf), next(iter(calls), None))


def _more(finding: Finding) -> list[str]:
    operator = finding.operator.removeprefix("aten.").removesuffix(".default")
    parts = [
        f"operator {clean(operator)}" if operator else "",
        clean(finding.slot),
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
    call = _unjudged(page)
    reasons = [clean(call.sentence)] if call is not None and call.sentence else []
    return [_upper(text) for text in reasons if text != clean(result.headline)]


def _sure(page: Page, first: Finding | None) -> list[str]:
    rests = _rests(page)
    if first is None:
        return [_upper(f"rests on {rests}")] if rests else []
    by_chance = chance(first).removeprefix("; ")
    sure = _SURE.get(first.confidence, _upper(first.confidence))
    rest = f"rests on {rests}" if rests else ""
    return [text for text in (sure, by_chance, rest) if text]


def _rests(page: Page) -> str:
    generation = page.comparison.generation
    if generation is not None and generation.logits_only:
        return (
            "logits alone"
            if _is_equal(page.comparison)
            else f"logits alone; could not have seen {UNSEEN_IN_LOGITS}"
        )
    return basis(page.comparison) if page.comparison.coverage.calls else "outputs alone"


def _effect(page: Page) -> list[str]:
    """What the differences come to at the outputs of the model, in sentences."""
    effect = getattr(page.comparison, "effect", None)
    if effect is None:
        return _at_roots(page)
    parts = []
    if effect.differing and effect.error is not None:
        of = " of statistics" if effect.from_statistics else ""
        parts.append(
            f"Relative error{of} {effect.error:.2g} at {clean(effect.slot)} of {clean(effect.name)}"
        )
    elif effect.differing:
        parts.append(
            f"{count(effect.differing, 'output')} not finite or of another shape: "
            f"{clean(effect.name)}"
        )
    elif effect.outputs:
        parts.append("The outputs are equal, bit for bit")
    if effect.unmeasured:
        parts.append(f"{count(effect.unmeasured, 'output')} could not be measured")
    if effect.tokens:
        changed = f"{count(effect.tokens_changed)} of {count(effect.tokens, 'token')} changed"
        parts.append(changed if effect.tokens_changed else "No token changed")
    elif effect.rows:
        moved = f"The largest element moved in {count(effect.moved)} of {count(effect.rows, 'row')}"
        parts.append(moved if effect.moved else f"The largest element stays in all "
                     f"{count(effect.rows, 'row')}")  # fmt: skip
    return parts


def _at_roots(page: Page) -> list[str]:
    """The error of what the outermost calls returned."""
    roots = [call for call in page.calls if call.parent < 0]
    known = [call for call in roots if call.error is not None]
    if not known or len(roots) > len(page.calls) // 2 > 1:
        return []
    worst = max(known, key=lambda call: call.error or 0.0)
    if not worst.error:
        unknown = len(roots) - len(known)
        if unknown:
            return [f"{count(unknown)} of {count(len(roots), 'output')} could not be measured"]
        return ["The outputs are equal, bit for bit"]
    where = f" in step {worst.step}" if len({call.step for call in roots}) > 1 else ""
    return [f"Relative error {worst.error:.2g} at the output of {clean(worst.name)}{where}"]


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
