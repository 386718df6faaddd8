"""A Location on a terminal: the error at the output, then the operators that explain it, round by
round.
"""

from __future__ import annotations

from whence.report.document import Document, answering, few
from whence.report.tables import columns, count, listed
from whence.results import Explained, Location

_MOST_STEPS = 8
_MOST_NOTES = 4


@answering
def location(result: Location, *, output: str = "") -> Document:
    """The whole answer as text. output: where the runs were kept, shown last."""
    steps = len(result.rounds[0].steps) if result.rounds else 0
    over = f" over {count(steps, 'step')}" if steps else ""
    yield "OUTPUT ERROR", f"rel_l2 {_figure(result.error)}{over}, against {result.reference}"
    if not result.rounds and result.error == 0:
        yield "", "there is no error to explain"
    elif not result.rounds:
        yield (
            "",
            f"the comparison says {result.status} and names no operator at fault; --search looks "
            "for the call where the error arises, --patch CALL tries one",
        )
    for number, patch in enumerate(result.rounds, 1):
        yield from _round(number, patch)
    if result.rounds:
        shares = [r.share for r in result.rounds if r.share is not None]
        explained = f"; {_percent(sum(shares))} of the squared error explained" if shares else ""
        yield "LEFT", f"rel_l2 {_figure(result.left)}{explained}"
        yield "  still at fault", listed(result.remaining, _MOST_NOTES)
        if not result.remaining and result.rounds[-1].finding is not None:
            yield "", "no finding remains"
    command = " ".join(result.command) or "the model"
    yield "  rests on", f"{count(result.runs, 'run')} of {command}"
    yield from (f"note: {note}" for note in result.notes)
    if output:
        yield f"kept in {output}"


def _round(number: int, patch: Explained) -> Document:
    yield f"{number}", patch.name
    if (finding := patch.finding) is not None:
        cause = f"{finding.cause}: " if finding.cause else ""
        sentence = finding.sentence.partition(";")[0]
        yield "  finding", f"{cause}{sentence} ({finding.confidence})"
    if patch.points:
        yield "  patched", count(patch.calls, "call")
    before, after = _figure(patch.before), _figure(patch.after)
    yield "  output error", f"rel_l2 {before} before, {after} after: {_share(patch)}"
    if len(patch.steps) > 1:
        rows = ((f"step {step}", _figure(a), "->", _figure(b)) for _, step, a, b in patch.steps)
        yield "", few(list(columns(rows)), _MOST_STEPS, noun="more step")
    yield from (("  not patched", why) for why in patch.refused[:_MOST_NOTES])
    yield from (("  note", note) for note in patch.notes[:_MOST_NOTES])


def _share(patch: Explained) -> str:
    if patch.share is None and patch.calls:
        return "its share is not defined"
    if patch.share is None:
        return "nothing was patched, so nothing is credited to it"
    if patch.share < 0:
        increase = f"{_percent(-patch.share)} more squared error"
        return f"{increase}: its effect had hidden a part of another error"
    return f"explains {_percent(patch.share)} of the squared error"


def _figure(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.0995 or share == 0 else f"{share:.2%}"
