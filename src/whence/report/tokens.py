"""Outputs of two runs on a terminal, as CSV and as JSON: the answer, the rates, what changed, then
prompt by prompt.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Sequence

import msgspec

from whence.report.document import Document, answering, few
from whence.report.tables import HEAD, cell, clean, columns, count, csv_text, listed, number
from whence.results import Disagreement, OutputMatch, PromptMatch, TokenComparison, TokenMatch

_MOST = 5
_PROMPT = 28  # columns of a prompt in the table
_ALL = ": --format json has all"
_TITLES = {"pass": "PASS", "fail": "FAIL", "undecided": "UNDECIDED"}


@answering
def tokens_text(result: TokenComparison, *, rows: int = 40, width: int | None = None) -> Document:
    """The whole answer as text. rows: largest number of prompts in the table; if there are more,
    those that pass are left out first. 0: all.

    width: of the terminal, to which prompts and differences in the table are cut.
    """
    yield _TITLES[result.status], _headline(result)
    if result.before is None:
        yield from _rates(result)
    else:
        yield from _commits(result, result.before)
    yield "  threshold", result.thresholds_from
    if result.full_count:
        longer = [(result.longer_target, "target"), (result.longer_reference, "reference")]
        sides = " and ".join(f"the {side} goes on in {count(n)}" for n, side in longer if n)
        yield (
            "  longer",
            f"of {count(result.full_count)} in full, {sides}"
            if sides
            else "none: in full is equal to the last",
        )
    if result.repeated:
        split = count(len(result.disagreements))
        asked = f"{count(result.repeated, 'prompt')} asked more than once"
        yield "  A/A", f"{asked}, {split} answered in two ways"
        yield "", few(result.disagreements, _MOST, _disagreement, where=_ALL)
    unread = result.unreadable + (result.before.unreadable if result.before else ())
    if unread:
        yield "UNREADABLE", f"{count(len(unread), 'record')}, none of which passes"
        yield "", few(unread, _MOST, where=_ALL)
    if result.prompts:
        yield ""
        yield from _table(result, rows, width)
    yield from (f"note: {note}" for note in result.notes)


def tokens_json(result: TokenComparison) -> str:
    """Everything as ASCII JSON, so that text that is not valid Unicode is kept."""
    return json.dumps(msgspec.to_builtins(result), indent=2) + "\n"


def tokens_csv(result: TokenComparison) -> str:
    """One line per prompt; a cell without a number is empty."""
    names = (
        "number",
        "verdict",
        "before",
        "change",
        "half",
        "longer",
        "unit",
        "first_character",
        "first_token",
        "prefix_length",
        "reference_length",
        "target_length",
        "matched_by",
        "reference_line",
        "target_line",
    )
    texts = ("prompt", "common", "reference_at", "target_at", "why", "id")
    rows: list[tuple[object, ...]] = [(*names, *texts)]
    for prompt in result.prompts:
        values = (getattr(prompt, n) for n in names)
        plain = (
            "" if v is None else {True: "yes", False: "no"}[v] if isinstance(v, bool) else v
            for v in values
        )
        rows.append((*plain, *(cell(getattr(prompt, n)) for n in texts)))
    return csv_text(rows)


def _headline(result: TokenComparison) -> str:
    if result.status == "undecided":
        return "no prompt could be compared"
    short = [w for w, share, least in _both(result) if share is not None and share < least]
    words = (
        f"{' and '.join(short)} below the threshold"
        if short
        else "both rates reach their thresholds"
    )
    if result.table is None or result.p_value is None:
        return words
    changed = (
        f"{count(len(result.newly_failing))} newly failing, "
        f"{count(len(result.newly_passing))} newly passing, p = {result.p_value:.2g}"
    )
    return f"{words}; {changed}"


def _both(result: TokenMatch) -> Iterator[tuple[str, float | None, float]]:
    yield "full match", result.full_match, result.full_threshold
    yield "half match", result.half_match, result.half_threshold


def _rates(result: TokenMatch) -> Document:
    counts = (result.full_count, result.half_count)
    intervals = (result.full_interval, result.half_interval)
    for (title, share, least), passed, interval in zip(_both(result), counts, intervals):
        yield f"  {title}", _rate(passed, result.count, share, interval, least)
    if result.not_compared:
        of = f"{count(result.not_compared)} of {count(result.count, 'prompt')}"
        yield "  not compared", f"{of}; they count as not passed"


def _rate(
    passed: int, of: int, share: float | None, interval: tuple[float, float], least: float
) -> str:
    low, high = interval
    inside = (
        "; too few prompts to be sure"
        if share is not None and low <= least <= high and 0 < least < 1
        else ""
    )
    return (
        f"{count(passed)} of {count(of)} = {_share(share)}, 95 % interval {_share(low)} to "
        f"{_share(high)}; "
        f"threshold {number(least)}: {'not' if share is None or share < least else ''} "
        f"reached{inside}"
    ).replace(":  ", ": ")


def _commits(result: TokenComparison, earlier: TokenMatch) -> Document:
    for title, match in (("before", earlier), ("after", result)):
        yield f"{title}: {match.reference} against {match.target}"
        yield from _rates(match)
    table = result.table or {}
    words = (
        ("both", "pass at both"),
        ("only_before", "only before"),
        ("only_after", "only after"),
        ("neither", "at neither"),
    )
    yield "prompts", ", ".join(f"{count(table.get(k, 0))} {w}" for k, w in words)
    names = {p.number: _named(p) for p in result.prompts}
    for title, numbers in (
        ("  newly failing", result.newly_failing),
        ("  newly passing", result.newly_passing),
    ):
        yield title, listed([names[n] for n in numbers], 2 * _MOST)
    if result.p_value is not None:
        changed = len(result.newly_failing) + len(result.newly_passing)
        on = f"on {count(changed, 'prompt')} that changed"
        yield "  sign test", f"p = {result.p_value:.3g}, two-sided, {on}"


def _named(prompt: PromptMatch) -> str:
    text = _quoted(_cut(prompt.prompt, _PROMPT)) if prompt.prompt else ""
    return f"{clean(prompt.id) or prompt.number} {text}".rstrip()


def _table(result: TokenComparison, rows: int, width: int | None) -> Iterator[str]:
    prompts: Sequence[PromptMatch] = result.prompts
    omitted = 0
    if rows and len(prompts) > rows:
        some = [p for p in prompts if p.verdict != "PASS" or p.change] or list(prompts)
        omitted, prompts = len(prompts) - len(some[:rows]), some[:rows]
    text = any(p.unit == "character" for p in prompts)
    head = [
        "no",
        "verdict",
        *(["before"] if result.before else []),
        "half",
        *(["char"] if text else []),
        "token",
        "prefix",
        "ref",
        "tgt",
        "prompt",
        "first difference",
    ]
    table = [head, *(_cells(p, text=text, with_earlier=result.before is not None) for p in prompts)]
    numbers = ("no", "char", "token", "prefix", "ref", "tgt")
    right = [i for i, h in enumerate(head) if h in numbers]
    give = {len(head) - 2: HEAD, len(head) - 1: HEAD}
    yield from columns(table, right, width=width, give=give, measure=_width)
    if omitted:
        yield f"{count(omitted, 'more prompt')}: --rows 0 shows all, --format csv too"


def _cells(prompt: PromptMatch, *, text: bool, with_earlier: bool) -> list[str]:
    half = "-" if prompt.half is None else "yes" if prompt.half else "no"
    first = [_whole(prompt.first_character)] if text else []
    lengths = [
        _whole(prompt.prefix_length),
        _whole(prompt.reference_length),
        _whole(prompt.target_length),
    ]
    return [
        clean(prompt.id) or str(prompt.number),
        prompt.verdict,
        *([prompt.before or "-"] if with_earlier else []),
        half,
        *first,
        _whole(prompt.first_token),
        *lengths,
        _quoted(_cut(prompt.prompt, _PROMPT)) if prompt.prompt else "-",
        _difference(prompt),
    ]


def _difference(prompt: PromptMatch) -> str:
    parts = []
    if prompt.full is not None and not prompt.full:
        parts.append(
            f"after {_quoted(prompt.common)}: {_quoted(prompt.reference_at)} | "
            f"{_quoted(prompt.target_at)}"
        )
    elif prompt.longer:
        parts.append(f"the {prompt.longer} goes on")
    if prompt.why:
        parts.append(clean(prompt.why))
    return "; ".join(parts)


def _disagreement(disagreement: Disagreement) -> str:
    prompt = _quoted(_cut(disagreement.prompt, _PROMPT))
    where = f"{disagreement.side}: {prompt}, {' and '.join(map(str, disagreement.lines))}"
    return f"{where}: {_parting(disagreement.match)}"


def _parting(match: OutputMatch) -> str:
    if match.first_token is not None:
        character = (
            f"character {match.first_character}, " if match.first_character is not None else ""
        )
        return f"part at {character}token {match.first_token}"
    lengths = f"{match.reference_length} and {match.target_length} {match.unit}s"
    return f"one goes on: {lengths}" if match.unit else "one is text, one a list of tokens"


def _quoted(text: str) -> str:
    """The text in quotes, safe to print; a combining mark next to a quote is shown as its code."""
    printable = clean(text)
    if printable and unicodedata.category(printable[0]).startswith("M"):
        printable = ascii(printable[0])[1:-1] + printable[1:]
    return f'"{printable}"'


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _whole(value: int | None) -> str:
    return "-" if value is None else str(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
