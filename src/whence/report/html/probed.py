"""What variants of one model show, as a page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from whence.report.document import text
from whence.report.html import escaped, filled
from whence.report.probe import answer_words, details, headline, module_words, share_words, shown
from whence.report.tables import clean, from_here
from whence.results.probe import Held, OperatorPlace, Probed, PropertyAnswer, Variant
from whence.results.verdict import Status

_CLASSES = {Status.SAME: "same", Status.DIFFERENT: "different", Status.UNDECIDED: "undecided"}
_SHAPES = {
    Held.VIOLATED: ("broken", "M6 1.6 10.6 10.4H1.4z"),
    Held.UNKNOWN: ("unclear", "M6 1.4 10.6 6 6 10.6 1.4 6z"),
    Held.OBSERVED: ("observed", "M2 2h8v8H2z"),
    Held.ROUNDING: ("rounding", "M2 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0"),
    Held.EXACT: ("good", "M2 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0"),
    Held.ABSENT: ("absent", "M2 5.2h8v1.6H2z"),
    Held.UNHEALTHY: ("observed", "M2 2h8v8H2z"),
    Held.HEALTHY: ("good", "M2 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0"),
    Held.REACHED: ("good", "M2 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0"),
    Held.MEASURED: ("rounding", "M2 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0"),
}
"""Colour and shape of each answer: neither alone tells it."""
_FIRST = (Held.VIOLATED, Held.UNKNOWN)


def probed_html(result: Probed) -> str:
    """The page. Every word of the answer is in it, without a script too."""
    words, names = headline(result)
    body = "".join((_bar(), "<main>", _answer(result, words, names), *_sections(result), "</main>"))
    title = f"{words.lower()}: {names} of {clean(result.model)}"
    return filled(title, msgspec.to_builtins(result), scripts=("theme", "probed"), body=body)


def _bar() -> str:
    links = "".join(
        f'<a href="#{anchor}">{word}</a>'
        for anchor, word in (("properties", "properties"), ("variants", "variants"))
    )
    button = '<button id="theme" type="button">light / dark</button>'
    return f'<header class="bar"><b>whence probe</b><nav>{links}</nav>{button}</header>'


def _answer(result: Probed, words: str, names: str) -> str:
    rows = [("model", escaped(clean(result.model))), ("inputs", escaped(clean(result.inputs)))]
    if result.command:
        rows.append(("command", f"<code>{escaped(clean(' '.join(result.command)))}</code>"))
    rows += [
        (answer.property, _because(answer)) for answer in result.answers if answer.held in _FIRST
    ]
    rows += [("note", escaped(clean(note))) for note in result.notes]
    facts = "".join(f"<dt>{escaped(clean(name))}</dt><dd>{text}</dd>" for name, text in rows)
    status = f'<p class="status {_CLASSES[result.status]}">{escaped(words.lower())}</p>'
    title = f'<h1 id="answer-title" tabindex="-1">{escaped(names)}</h1>'
    return f'<section class="answer">{status}{title}<dl class="six">{facts}</dl></section>'


def _because(answer: PropertyAnswer) -> str:
    text = escaped(clean(answer.cause or answer.why))
    if answer.next:
        text += f'<div class="command"><code>{escaped(clean(answer.next))}</code></div>'
    return text


def _sections(result: Probed) -> Iterator[str]:
    lead = "Each is asked by running the model otherwise; what may not move is compared bit by bit."
    head = ("property", "holds", "ulp", "first operator", "in", "")
    rows = [_row(answer) for answer in result.answers]
    yield _section("properties", "Properties", lead, _table("probed", head, rows, right=(2,)))
    asked = [answer for answer in result.answers if answer.held != Held.ABSENT]
    asked.sort(key=lambda answer: answer.held not in _FIRST)
    parts = "".join(map(_property, asked))
    lead = (
        "ulp: units in the last place. rms: root mean squares of the output. in float64: the same "
        "two runs in float64, where rounding goes away and a dependence stays."
    )
    yield _section("variants", "Variants", lead, parts)


def _section(anchor: str, title: str, lead: str, content: str) -> str:
    return f'<section id="{anchor}"><h2>{title}</h2><p class="lead">{lead}</p>{content}</section>'


def _row(answer: PropertyAnswer) -> tuple[str, ...]:
    ulp, place = shown(answer)
    return (
        escaped(clean(answer.property)),
        _chip(answer.held),
        ulp,
        f"<code>{escaped(clean(place.operator))}</code>" if place is not None else "",
        escaped(module_words(place)) if place is not None else "",
        f'<span class="soft">{escaped(clean(answer.cause or answer.why))}</span>',
    )


def _property(answer: PropertyAnswer) -> str:
    head = ("variant", "holds", "ulp", "moved, rms", "in float64", "may move by", "differ", "first")
    rows = [_variant_row(variant) for variant in answer.variants]
    items = [answer_words(answer)]
    if answer.shares:
        items.append("spread from " + ", ".join(map(share_words, answer.shares)))
    items += [answer.power, *answer.notes]
    words = "".join(f"<li>{escaped(clean(item))}</li>" for item in items if item)
    table = _table("variants", head, rows, right=(2, 3, 4, 5, 6)) if rows else ""
    if lines := text(details(answer)):
        table += f'<pre class="lines">{escaped(lines.rstrip())}</pre>'
    return (
        f'<div class="panel asked"><h3>{escaped(clean(answer.property))} {_chip(answer.held)}</h3>'
        f'<ul class="bullets">{words}</ul>{table}</div>'
    )


def _variant_row(variant: Variant) -> tuple[str, ...]:
    return (
        escaped(clean(variant.name)),
        _chip(variant.held),
        _number(variant.ulp) if variant.differing else "",
        _number(variant.moved) if variant.differing else "",
        _number(variant.in_float64) if variant.in_float64 is not None else "",
        _number(variant.effect) if variant.effect is not None else "",
        f"{variant.differing} of {variant.count}" if variant.count else "",
        _place(variant.first) or f'<span class="soft">{escaped(clean(variant.why))}</span>',
    )


def _place(place: OperatorPlace | None) -> str:
    if place is None:
        return ""
    line = f'<div class="soft small">{escaped(clean(from_here(place.line)))}</div>'
    module = escaped(module_words(place))
    return f"<code>{escaped(clean(place.operator))}</code> in {module}{line * bool(place.line)}"


def _chip(held: str) -> str:
    colour, shape = _SHAPES[Held(held)]
    mark = f'<svg class="mark tint-{colour}" viewBox="0 0 12 12" aria-hidden="true">'
    return f'<span class="chip">{mark}<path d="{shape}"/></svg>{escaped(clean(held))}</span>'


def _number(value: float) -> str:
    return f"{value:.3g}"


def _table(
    kind: str, head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int]
) -> str:
    """kind: of the style sheet. Cells are HTML already."""

    def cells(row: Sequence[str], tag: str) -> str:
        ends = [' class="r"' if place in right else "" for place in range(len(row))]
        return "".join(f"<{tag}{end}>{cell}</{tag}>" for cell, end in zip(row, ends))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    top = f"<thead><tr>{cells(head, 'th')}</tr></thead>"
    table = f'<table class="flat {kind}">{top}<tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'
