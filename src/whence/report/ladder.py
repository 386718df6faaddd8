"""A Ladder on a terminal: first the stage, level or release at fault, then a line per rung, then
the pass or optimiser that a bisection named.
"""

from __future__ import annotations

from whence.report.document import Document, Table, answering
from whence.report.tables import count
from whence.results import Ladder, LadderKind, Pass, Place, Rung, RungKind, Status

# The name of a rung, and the unit counted in the last column.
_WORDS: dict[str, tuple[str, str]] = {
    LadderKind.STAGES: ("STAGE", "graphs"),
    LadderKind.LEVELS: ("LEVEL", "nodes"),
    LadderKind.RELEASES: ("RELEASE", "nodes"),
}
_ALONE: dict[str, str] = {
    RungKind.BIT_EQUAL: "bit-equal",
    RungKind.NOISE: "within the noise",
    RungKind.OUTSIDE: "outside the noise all the same: other optimisers change something too",
    RungKind.UNDECIDED: "undecided",
    RungKind.FAILED: "a failure: it does not run",
}
_VERDICTS: dict[str, str] = {RungKind.NOISE: "within noise", RungKind.OUTSIDE: "OUTSIDE"}


@answering
def rungs(result: Ladder, *, output: str = "") -> Document:
    """The whole answer as text. output: where runs and comparisons were kept, shown last."""
    title, last = _WORDS.get(result.kind, _WORDS[LadderKind.STAGES])
    heads: dict[str, str] = {
        Status.SAME: f"NO {title}",
        Status.DIFFERENT: f"{title} {' or '.join(result.stages)}",
    }
    yield heads.get(result.status, "UNDECIDED"), result.sentence
    yield ""
    base = result.rungs[0].name if result.rungs else ""
    head = ("rung", f"against {base}", "rel_l2", "rests on", "rung before", last)
    cells = [_cells(rung, is_base=not i) for i, rung in enumerate(result.rungs)]
    yield Table([head, *cells], right=(5,), indent="  ")
    for rung in result.rungs:
        first, *others = rung.why.splitlines() or [""]
        yield f"  {rung.name}", first
        yield from (f"  {line}" for line in others)
    if result.place is not None:
        yield ""
        yield from _place(result.place)
    if (culprit := result.compiler_pass) is not None:
        yield ""
        yield from (_pass if result.kind == LadderKind.STAGES else _optimizer)(culprit)
    elif result.kind != LadderKind.STAGES and result.status == Status.DIFFERENT:
        yield ""
        yield "NODE", next(filter(None, (r.node for r in result.rungs)), "")
    yield from (f"note: {note}" for note in result.notes)
    yield "ran", result.subject
    if output:
        yield f"kept in {output}"


def _cells(rung: Rung, *, is_base: bool) -> tuple[str, ...]:
    figure = "" if rung.rel_l2 is None else f"{rung.rel_l2:.2g}"
    if is_base:
        again = "bit-equal" if rung.verdict == RungKind.BIT_EQUAL else "not equal"
        nodes = count(rung.nodes) if rung.nodes else ""
        return rung.name, f"run twice: {again}", figure, "", "", nodes
    previous = "" if rung.previous_rel_l2 is None else f"rel_l2 {rung.previous_rel_l2:.2g}"
    broken = f" ({count(rung.breaks, 'break')})" if rung.breaks else ""
    return (
        rung.name,
        _VERDICTS.get(rung.verdict, rung.verdict),
        figure,
        rung.evidence,
        "bit-equal" if rung.previous_identical else previous,
        f"{count(rung.nodes or rung.graphs)}{broken}" if rung.verdict != RungKind.FAILED else "",
    )


def _place(place: Place) -> Document:
    lines = [f"{each.source}, {each.code} ({each.operator})" for each in place.operators]
    yield "LINE", "; ".join(lines) or place.why
    piece = f"{count(len(lines), 'operator')} of {place.of}, " if lines and place.of else ""
    yield "  rests on", f"{piece}{count(place.runs, 'run')} with a part compiled"


def _pass(culprit: Pass) -> Document:
    number = "" if culprit.number is None else str(culprit.number)
    words = (culprit.backend, culprit.subsystem, number, culprit.info)
    yield "PASS", " / ".join(filter(None, words)) if culprit.backend else culprit.why
    broken = (
        f"; {count(culprit.broken, 'run')} failed or could not be decided, and counted as bad"
        if culprit.broken
        else ""
    )
    yield "  rests on", f"torch's compiler bisector, {count(culprit.runs, 'run')}{broken}"


def _optimizer(culprit: Pass) -> Document:
    yield "OPTIMISER", culprit.info or culprit.why
    yield "  node", culprit.node
    if culprit.info:
        yield "  but", culprit.why
    if culprit.alone:
        alone = _ALONE.get(culprit.alone, f"{culprit.alone} with this one alone off")
        yield "  without it", f"{culprit.subsystem} is {alone}"
    broken = f"; {count(culprit.broken, 'run')} failed or could not be decided"
    text = f"a bisection by names, {count(culprit.runs, 'run')}{broken if culprit.broken else ''}"
    yield "  rests on", text
