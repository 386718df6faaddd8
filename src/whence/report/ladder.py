"""A Ladder on a terminal: the stage, then a line per rung, then the pass that torch's bisector
named.
"""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.tables import clean, columns, count
from whence.results import Ladder, Pass, Rung, RungKind, Status

_LEFT = 19
_VERDICTS: dict[str, str] = {RungKind.NOISE: "within noise", RungKind.OUTSIDE: "OUTSIDE"}


def rungs(result: Ladder, *, output: str = "") -> str:
    """The whole answer as text. output: where runs and comparisons were kept, shown last."""
    return "\n".join(_lines(result, output)) + "\n"


def _lines(result: Ladder, output: str) -> Iterator[str]:
    heads: dict[str, str] = {
        Status.SAME: "NO STAGE",
        Status.DIFFERENT: f"STAGE {' or '.join(map(clean, result.stages))}",
    }
    head = heads.get(result.status, "UNDECIDED")
    yield _row(head, clean(result.sentence))
    yield ""
    table = [("rung", "against eager", "rel_l2", "rests on", "rung before", "graphs")]
    yield from ("  " + line for line in columns([*table, *map(_cells, result.rungs)], right=(5,)))
    for rung in result.rungs:
        if rung.why:
            yield _row(f"  {rung.name}", clean(rung.why.splitlines()[0]))
            yield from (f"  {clean(line)}" for line in rung.why.splitlines()[1:])
    if result.compiler_pass is not None:
        yield ""
        yield from _pass(result.compiler_pass)
    for note in result.notes:
        yield f"note: {clean(note)}"
    yield _row("ran", clean(result.subject))
    if output:
        yield f"kept in {clean(output)}"


def _cells(rung: Rung) -> tuple[str, ...]:
    if rung.name == "eager":
        return (
            rung.name,
            "run twice: " + ("bit-equal" if rung.verdict == RungKind.BIT_EQUAL else "not equal"),
            _figure(rung),
            "",
            "",
            "",
        )
    from_previous = (
        "bit-equal"
        if rung.previous_identical
        else ""
        if rung.previous_rel_l2 is None
        else f"rel_l2 {rung.previous_rel_l2:.2g}"
    )
    broken = f" ({count(rung.breaks, 'break')})" if rung.breaks else ""
    verdict = _VERDICTS.get(rung.verdict, rung.verdict)
    return (
        rung.name,
        verdict,
        _figure(rung),
        clean(rung.evidence),
        from_previous,
        f"{count(rung.graphs)}{broken}" if rung.verdict != RungKind.FAILED else "",
    )


def _figure(rung: Rung) -> str:
    return "" if rung.rel_l2 is None else f"{rung.rel_l2:.2g}"


def _pass(culprit: Pass) -> Iterator[str]:
    words = [
        culprit.backend,
        culprit.subsystem,
        "" if culprit.number is None else str(culprit.number),
        culprit.info,
    ]
    yield _row(
        "PASS", clean(" / ".join(w for w in words if w)) if culprit.backend else clean(culprit.why)
    )
    broken = (
        f"; {count(culprit.broken, 'run')} failed or could not be decided, and counted as bad"
        if culprit.broken
        else ""
    )
    yield _row("  rests on", f"torch's compiler bisector, {count(culprit.runs, 'run')}{broken}")


def _row(title: str, text: str) -> str:
    return f"{title:<{_LEFT}}{' ' if len(title) >= _LEFT else ''}{text}".rstrip()
