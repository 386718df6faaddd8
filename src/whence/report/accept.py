"""Reports on a terminal whether an expectation may be renewed."""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.document import Document, Table, answering
from whence.report.tables import count
from whence.results import Acceptance, AcceptKind, JudgedValue

_MOST = 12
_HEADS = {
    AcceptKind.UNCHANGED: ("SAME", "every expected value holds"),
    AcceptKind.NOISE: ("NOISE", "rounding explains the change: renew it"),
    AcceptKind.CLOSER: ("CLOSER", "the new value is nearer to the exact result: renew it"),
    AcceptKind.CANNOT_TELL: ("CANNOT TELL", "the evidence does not decide"),
    AcceptKind.CHANGED: ("REFUSED", "the change is larger than every way of rounding"),
    AcceptKind.FAULT: ("REFUSED", "the new value is no rounding of the exact result"),
    AcceptKind.IGNORES_INPUT: ("REFUSED", "the program does not depend on an input"),
}


@answering
def accepted_text(result: Acceptance) -> Document:
    """The answer as text."""
    yield _HEADS[result.verdict]
    first = result.values[0]
    if result.verdict != AcceptKind.UNCHANGED:
        yield "  value", _value(first)
    yield "  because", first.words
    if first.limit is not None and first.new_times is not None and first.old_times is not None:
        yield (
            "  from exact" if first.exact is not None else "  from the mean",
            f"old {first.old_times:.3g}, new {first.new_times:.3g} standard deviations of rounding "
            f"({first.limit:.3g} allowed)",
        )
    yield "  tried", ", ".join(result.ways)
    if len(result.values) > 1:
        yield Table(list(_rows(result)), right=(2, 3, 4), indent="  ")
        if more := len(result.values) - _MOST:
            yield f"  and {count(more, 'value')} more" if more > 0 else ""
    if result.status == "same" and result.verdict != AcceptKind.UNCHANGED:
        yield "  tolerance", _tolerance(first)
    yield "  pull request", result.sentence
    yield "  written", result.written
    yield "  next", result.next
    yield from (f"note: {note}" for note in result.notes)


def _rows(result: Acceptance) -> Iterator[tuple[str, ...]]:
    yield "value", "verdict", "change", "old", "new", "at"
    for value in result.values[:_MOST]:
        yield (
            value.name,
            value.verdict,
            _number(value.change),
            _number(value.old_times),
            _number(value.new_times),
            value.index,
        )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _value(value: JudgedValue) -> str:
    at = f" at {value.index}" if value.index else ""
    exact = f", exactly {value.exact:.9g}" if value.exact is not None else ""
    numbers = ""
    if value.expected is not None and value.actual is not None:
        numbers = f"expected {value.expected:.9g}, now {value.actual:.9g}{exact}"
    return f"{value.name}{at}: {numbers}" if value.name or at else numbers


def _tolerance(value: JudgedValue) -> str:
    parts = []
    if value.relative_tolerance:
        parts.append(f"rtol {value.relative_tolerance:g}")
    if value.tolerance:
        parts.append(f"atol {value.tolerance:g}")
    return " or ".join(parts)
