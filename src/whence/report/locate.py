"""A Location on a terminal: the error at the output, then what explains it, round by round."""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.tables import clean, columns, count, headed
from whence.results import Explained, Location

_MOST_STEPS = 8
_MOST_NOTES = 4


def location(result: Location, *, output: str = "") -> str:
    """The whole answer as text. output: where the runs were kept, shown last."""
    return "\n".join(_lines(result, output)) + "\n"


def _lines(result: Location, output: str) -> Iterator[str]:
    steps = len(result.rounds[0].steps) if result.rounds else 0
    over = f" over {count(steps, 'step')}" if steps else ""
    yield headed(
        "OUTPUT ERROR", f"rel_l2 {_figure(result.error)}{over}, against {clean(result.reference)}"
    )
    if not result.rounds:
        why = (
            "there is no error to explain"
            if result.error == 0
            else f"the comparison says {result.status} and names no operator at fault"
        )
        yield headed(
            "",
            why
            + (
                ""
                if result.error == 0
                else "; --search looks for the call where the error arises, --patch CALL tries one"
            ),
        )
    for number, patch in enumerate(result.rounds, 1):
        yield from _round(number, patch)
    if result.rounds:
        remaining = f"rel_l2 {_figure(result.left)}"
        shares = [r.share for r in result.rounds if r.share is not None]
        explained_share = (
            f"; {_percent(sum(shares))} of the squared error explained" if shares else ""
        )
        yield headed("LEFT", remaining + explained_share)
        names = ", ".join(clean(n) for n in result.remaining[:_MOST_NOTES])
        others = (
            f" and {len(result.remaining) - _MOST_NOTES} more"
            if len(result.remaining) > _MOST_NOTES
            else ""
        )
        if result.remaining:
            yield headed("  still at fault", names + others)
        elif result.rounds[-1].finding is not None:
            yield headed("", "no finding remains")
    yield headed(
        "  rests on",
        f"{count(result.runs, 'run')} of {clean(' '.join(result.command)) or 'the model'}",
    )
    for note in result.notes:
        yield f"note: {clean(note)}"
    if output:
        yield f"kept in {clean(output)}"


def _round(number: int, patch: Explained) -> Iterator[str]:
    yield headed(f"{number}", clean(patch.name))
    if (finding := patch.finding) is not None:
        cause = f"{finding.cause}: " if finding.cause else ""
        sentence = finding.sentence.partition(";")[0]
        yield headed("  finding", clean(f"{cause}{sentence} ({finding.confidence})"))
    if patch.points:
        yield headed("  patched", count(patch.calls, "call"))
    if patch.share is None:
        share = "its share is not defined"
        if not patch.calls:
            share = "nothing was patched, so nothing is credited to it"
    elif patch.share < 0:
        increase = f"{_percent(-patch.share)} more squared error"
        share = f"{increase}: its effect had hidden a part of another error"
    else:
        share = f"explains {_percent(patch.share)} of the squared error"
    before, after = _figure(patch.before), _figure(patch.after)
    yield headed("  output error", f"rel_l2 {before} before, {after} after: {share}")
    if len(patch.steps) > 1:
        rows = [
            (f"step {step}", _figure(a), "->", _figure(b))
            for _, step, a, b in patch.steps[:_MOST_STEPS]
        ]
        for line in columns(rows):
            yield headed("", line)
        if len(patch.steps) > _MOST_STEPS:
            yield headed("", f"and {count(len(patch.steps) - _MOST_STEPS, 'more step')}")
    for text in patch.refused[:_MOST_NOTES]:
        yield headed("  not patched", clean(text))
    for text in patch.notes[:_MOST_NOTES]:
        yield headed("  note", clean(text))


def _figure(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.0995 or share == 0 else f"{share:.2%}"
