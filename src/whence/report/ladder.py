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
    for one in result.rungs:
        if one.why:
            yield _row(f"  {one.name}", clean(one.why.splitlines()[0]))
            yield from (f"  {clean(line)}" for line in one.why.splitlines()[1:])
    if result.compiler_pass is not None:
        yield ""
        yield from _pass(result.compiler_pass)
    for note in result.notes:
        yield f"note: {clean(note)}"
    yield _row("ran", clean(result.subject))
    if output:
        yield f"kept in {clean(output)}"


def _cells(one: Rung) -> tuple[str, ...]:
    if one.name == "eager":
        return (
            one.name,
            "run twice: " + ("bit-equal" if one.verdict == RungKind.BIT_EQUAL else "not equal"),
            _figure(one),
            "",
            "",
            "",
        )
    before = (
        "bit-equal"
        if one.previous_identical
        else ""
        if one.previous_rel_l2 is None
        else f"rel_l2 {one.previous_rel_l2:.2g}"
    )
    broken = f" ({count(one.breaks, 'break')})" if one.breaks else ""
    verdict = _VERDICTS.get(one.verdict, one.verdict)
    return (
        one.name,
        verdict,
        _figure(one),
        clean(one.evidence),
        before,
        f"{count(one.graphs)}{broken}" if one.verdict != RungKind.FAILED else "",
    )


def _figure(one: Rung) -> str:
    return "" if one.rel_l2 is None else f"{one.rel_l2:.2g}"


def _pass(found: Pass) -> Iterator[str]:
    words = [
        found.backend,
        found.subsystem,
        "" if found.number is None else str(found.number),
        found.info,
    ]
    yield _row(
        "PASS", clean(" / ".join(w for w in words if w)) if found.backend else clean(found.why)
    )
    broken = (
        f"; {count(found.broken, 'run')} failed or could not be decided, and counted as bad"
        if found.broken
        else ""
    )
    yield _row("  rests on", f"torch's compiler bisector, {count(found.runs, 'run')}{broken}")


def _row(left: str, right: str) -> str:
    return f"{left:<{_LEFT}}{' ' if len(left) >= _LEFT else ''}{right}".rstrip()
