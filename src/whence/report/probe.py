"""What variants of one model show, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.numerics import health_lines, health_words, precision_lines, precision_words
from whence.report.tables import clean, columns, from_here, headed
from whence.results.probe import (
    Held,
    OperatorPlace,
    Probed,
    Property,
    PropertyAnswer,
    SpreadShare,
    Variant,
)
from whence.results.verdict import Status

_WORDS: dict[str, str] = {
    Status.SAME: "HOLDS",
    Status.DIFFERENT: "VIOLATED",
    Status.UNDECIDED: "CANNOT TELL",
}
_SHOWN = (Held.VIOLATED, Held.OBSERVED, Held.UNKNOWN)


def probed_text(result: Probed) -> str:
    """The answer as text."""
    return "\n".join(_lines(result)) + "\n"


def headline(result: Probed) -> tuple[str, str]:
    """(the answer in capitals, the properties that it is about)."""
    broken = [a.property for a in result.answers if a.held == Held.VIOLATED]
    unclear = [a.property for a in result.answers if a.held == Held.UNKNOWN]
    return _WORDS[result.status], ", ".join(map(clean, broken or unclear)) or _tested(result)


def _tested(result: Probed) -> str:
    """How many properties were tested: what does not apply is no pass."""
    absent = sum(answer.held == Held.ABSENT for answer in result.answers)
    tested = len(result.answers) - absent
    if not tested:
        return "nothing was tested: no property that was asked for applies"
    others = f"; {absent} {'does' if absent == 1 else 'do'} not apply" if absent else ""
    return f"{tested} of {len(result.answers)} properties tested{others}"


def _lines(result: Probed) -> Iterator[str]:
    word, names = headline(result)
    yield headed(word, f"{names}   {clean(result.model)}")
    yield headed("  on", clean(result.inputs))
    yield from (headed("  note", clean(note)) for note in result.notes)
    yield ""
    rows = [("property", "holds", "ulp", "first operator", "in")]
    rows += [_row(answer) for answer in result.answers]
    yield from columns(rows, right=(2,))
    for answer in result.answers:
        yield from _details(answer)


def _row(answer: PropertyAnswer) -> tuple[str, str, str, str, str]:
    largest = max(
        (v for v in answer.variants if v.held == answer.held), key=lambda v: v.ulp, default=None
    )
    place = next(
        (v.first for v in answer.variants if v.held == answer.held and v.first is not None), None
    )
    if answer.findings:
        place = answer.findings[0].first
    return (
        clean(answer.property),
        clean(answer.held),
        f"{largest.ulp:.3g}" if largest is not None and largest.differing else "",
        clean(place.operator) if place is not None else "",
        module_words(place) if place is not None else "",
    )


def module_words(place: OperatorPlace) -> str:
    """The module that runs an operator, with its class."""
    return clean(place.scope or "the model itself") + (
        f" ({clean(place.op_type)})" * bool(place.scope)
    )


def _details(answer: PropertyAnswer) -> Iterator[str]:
    yield ""
    yield headed(answer.property.upper(), clean(answer_words(answer)))
    yield from details(answer)
    for variant in answer.variants:
        if variant.held in _SHOWN and variant.differing:
            yield from _variant(variant)
    if answer.shares:
        yield headed("  spread from", ", ".join(map(share_words, answer.shares)))
    if answer.power:
        yield headed("  power", clean(answer.power))
    yield from (headed("  note", clean(note)) for note in answer.notes)
    if answer.next:
        yield headed("  next", clean(answer.next))


def details(answer: PropertyAnswer) -> Iterator[str]:
    """Lines of what an answer holds beside variants: numbers that are lost, plans."""
    yield from health_lines(answer)
    if answer.precision is not None:
        yield from precision_lines(answer.precision)


def answer_words(answer: PropertyAnswer) -> str:
    """What an answer says, in one sentence."""
    if answer.property == Property.HEALTH and not answer.why:
        return health_words(answer)
    if answer.precision is not None and not answer.why:
        return precision_words(answer.precision)
    if answer.property == Property.SENSITIVITY and not (answer.cause or answer.why):
        reached = sum(v.held == Held.REACHED for v in answer.variants)
        return f"each of {reached} changes reaches an output"
    return answer.cause or answer.why or exactness(answer)


def exactness(answer: PropertyAnswer) -> str:
    """How many variants are equal bit for bit, and how far the others are apart."""
    ran = [v for v in answer.variants if v.held != Held.UNKNOWN or v.differing]
    rounded = [v for v in ran if v.held == Held.ROUNDING]
    exact = f"{len(ran) - len(rounded)} of {len(ran)} variants are equal bit for bit"
    if not rounded:
        return exact
    worst = max(rounded, key=lambda v: v.ulp)
    return f"{exact}; the others differ by at most {worst.ulp:.3g} ulp ({worst.name})"


def _variant(variant: Variant) -> Iterator[str]:
    size = f"{variant.differing} of {variant.count} elements move, by up to {variant.moved:.2g} rms"
    yield headed(f"  {clean(variant.held)}", f"{clean(variant.name)}: {size}")
    if variant.first is not None:
        after = f", fed by {clean(variant.first.after)}" if variant.first.after else ""
        yield headed(
            "    from", f"{clean(variant.first.operator)}{after} in {module_words(variant.first)}"
        )
        if variant.first.line:
            yield headed("    at", clean(from_here(variant.first.line)))
    if variant.in_float64 is not None:
        yield headed("    because", clean(variant.why))


def share_words(share: SpreadShare) -> str:
    """An operator with the part of a spread that it explains."""
    where = f" in {clean(share.scope)}" if share.scope else ""
    calls = f"{share.calls} calls" if share.calls > 1 else "1 call"
    return f"{clean(share.operator)}{where} {100 * share.share:.0f} % ({calls})"
