"""A Ladder on a terminal: the stage, level or release, then a line per rung, then the pass or
optimiser that a bisection named.
"""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.tables import clean, columns, count
from whence.results import Ladder, LadderKind, Pass, Rung, RungKind, Status

_LEFT = 19
# What is named, and what is counted in the last column.
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


def rungs(result: Ladder, *, output: str = "") -> str:
    """The whole answer as text. output: where runs and comparisons were kept, shown last."""
    return "\n".join(_lines(result, output)) + "\n"


def _lines(result: Ladder, output: str) -> Iterator[str]:
    title, last = _WORDS.get(result.kind, _WORDS[LadderKind.STAGES])
    heads: dict[str, str] = {
        Status.SAME: f"NO {title}",
        Status.DIFFERENT: f"{title} {' or '.join(map(clean, result.stages))}",
    }
    head = heads.get(result.status, "UNDECIDED")
    yield _row(head, clean(result.sentence))
    yield ""
    base = result.rungs[0].name if result.rungs else ""
    table = [("rung", f"against {clean(base)}", "rel_l2", "rests on", "rung before", last)]
    cells = [_cells(rung, is_base=not i) for i, rung in enumerate(result.rungs)]
    yield from ("  " + line for line in columns([*table, *cells], right=(5,)))
    for rung in result.rungs:
        if rung.why:
            yield _row(f"  {rung.name}", clean(rung.why.splitlines()[0]))
            yield from (f"  {clean(line)}" for line in rung.why.splitlines()[1:])
    if result.compiler_pass is not None:
        yield ""
        named = _pass if result.kind == LadderKind.STAGES else _optimizer
        yield from named(result.compiler_pass)
    elif result.kind != LadderKind.STAGES and result.status == Status.DIFFERENT:
        yield ""
        yield _row("NODE", clean(next(filter(None, (r.node for r in result.rungs)), "")))
    for note in result.notes:
        yield f"note: {clean(note)}"
    yield _row("ran", clean(result.subject))
    if output:
        yield f"kept in {clean(output)}"


def _cells(rung: Rung, *, is_base: bool) -> tuple[str, ...]:
    if is_base:
        return (
            rung.name,
            "run twice: " + ("bit-equal" if rung.verdict == RungKind.BIT_EQUAL else "not equal"),
            _figure(rung),
            "",
            "",
            count(rung.nodes) if rung.nodes else "",
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
        f"{count(rung.nodes or rung.graphs)}{broken}" if rung.verdict != RungKind.FAILED else "",
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


def _optimizer(culprit: Pass) -> Iterator[str]:
    yield _row("OPTIMISER", clean(culprit.info or culprit.why))
    if culprit.node:
        yield _row("  node", clean(culprit.node))
    if culprit.info and culprit.why:
        yield _row("  but", clean(culprit.why))
    if culprit.alone:
        alone = _ALONE.get(culprit.alone, f"{culprit.alone} with this one alone off")
        yield _row("  without it", f"{clean(culprit.subsystem)} is {alone}")
    broken = f"; {count(culprit.broken, 'run')} failed or could not be decided"
    text = f"a bisection by names, {count(culprit.runs, 'run')}{broken if culprit.broken else ''}"
    yield _row("  rests on", text)


def _row(title: str, text: str) -> str:
    return f"{title:<{_LEFT}}{' ' if len(title) >= _LEFT else ''}{text}".rstrip()
