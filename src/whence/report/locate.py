"""A Location on a terminal: the error at the output, then what explains it, round by round."""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.tables import clean, columns, count
from whence.results import Explained, Location

_LEFT = 19
_MOST_STEPS = 8
_MOST_NOTES = 4


def location(result: Location, *, output: str = "") -> str:
    """The whole answer as text. output: where the runs were kept, shown last."""
    return "\n".join(_lines(result, output)) + "\n"


def _lines(result: Location, output: str) -> Iterator[str]:
    steps = len(result.rounds[0].steps) if result.rounds else 0
    over = f" over {count(steps, 'step')}" if steps else ""
    yield _row(
        "OUTPUT ERROR", f"rel_l2 {_figure(result.error)}{over}, against {clean(result.reference)}"
    )
    if not result.rounds:
        why = (
            "there is no error to explain"
            if result.error == 0
            else f"the comparison says {result.status} and names no operator at fault"
        )
        yield _row(
            "",
            why
            + (
                ""
                if result.error == 0
                else "; --search looks for the call where the error arises, --patch CALL tries one"
            ),
        )
    for number, one in enumerate(result.rounds, 1):
        yield from _round(number, one)
    if result.rounds:
        left = f"rel_l2 {_figure(result.left)}"
        shares = [r.share for r in result.rounds if r.share is not None]
        told = f"; {_percent(sum(shares))} of the squared error explained" if shares else ""
        yield _row("LEFT", left + told)
        names = ", ".join(clean(n) for n in result.remaining[:_MOST_NOTES])
        more = (
            f" and {len(result.remaining) - _MOST_NOTES} more"
            if len(result.remaining) > _MOST_NOTES
            else ""
        )
        if result.remaining:
            yield _row("  still at fault", names + more)
        elif result.rounds[-1].finding is not None:
            yield _row("", "no finding remains")
    yield _row(
        "  rests on",
        f"{count(result.runs, 'run')} of {clean(' '.join(result.command)) or 'the model'}",
    )
    for note in result.notes:
        yield f"note: {clean(note)}"
    if output:
        yield f"kept in {clean(output)}"


def _round(number: int, one: Explained) -> Iterator[str]:
    yield _row(f"{number}", clean(one.name))
    if one.finding is not None:
        cause = f"{one.finding.cause}: " if one.finding.cause else ""
        yield _row(
            "  finding",
            clean(f"{cause}{one.finding.sentence.partition(';')[0]} ({one.finding.confidence})"),
        )
    if one.points:
        yield _row("  patched", count(one.calls, "call"))
    nothing = "nothing was patched, so nothing is credited to it"
    undefined = "its share is not defined" if one.calls else nothing
    share = (
        undefined if one.share is None else f"explains {_percent(one.share)} of the squared error"
    )
    if one.share is not None and one.share < 0:
        share = (
            f"{_percent(-one.share)} more squared error: what it did hid a part of another error"
        )
    yield _row(
        "  output error",
        f"rel_l2 {_figure(one.before)} before, {_figure(one.after)} after: {share}",
    )
    if len(one.steps) > 1:
        shown = [
            (f"step {step}", _figure(a), "->", _figure(b))
            for _, step, a, b in one.steps[:_MOST_STEPS]
        ]
        more = (
            [f"and {count(len(one.steps) - _MOST_STEPS, 'more step')}"]
            if len(one.steps) > _MOST_STEPS
            else []
        )
        for line in [*columns(shown), *more]:
            yield _row("", line)
    for text in one.refused[:_MOST_NOTES]:
        yield _row("  not patched", clean(text))
    for text in one.notes[:_MOST_NOTES]:
        yield _row("  note", clean(text))


def _figure(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.0995 or share == 0 else f"{share:.2%}"


def _row(left: str, right: str) -> str:
    return f"{left:<{_LEFT}}{right}".rstrip()
