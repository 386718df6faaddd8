"""The ranks of one run, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from whence.report import tables
from whence.report.tables import clean, count, headed
from whence.results import CollectiveRow, RankFinding, RankReport, RankVerdict

_MOST_ROWS = 40
_TITLES = {
    RankVerdict.FAULT: "FAULT",
    RankVerdict.UNKNOWN: "CANNOT TELL",
    RankVerdict.WARNING: "WARNING",
}


def ranks_text(result: RankReport) -> str:
    """The answer as text."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: RankReport) -> Iterator[str]:
    for finding in result.findings:
        yield from _finding(finding)
    if not result.findings:
        title = {RankVerdict.NOTHING: "NOTHING", RankVerdict.UNKNOWN: _TITLES[RankVerdict.UNKNOWN]}
        but = ", but the run is not whole" if result.ended else ""
        words = f"no rank parts from the others in what was checked{but}"
        yield headed(title.get(result.verdict, "FINE"), words)
    for check in result.checks:
        yield headed(f"  {check.kind}", f"{check.verdict}: {clean(check.words)}")
    whole = f"{count(len(result.ranks), 'rank')}, {count(result.steps, 'step')}"
    yield headed("ranks", whole)
    for mesh in result.meshes:
        yield headed("mesh", clean(mesh))
    for group in result.groups:
        named = f" ({clean(group.purpose)})" if group.purpose else ""
        listed = ", ".join(map(str, group.ranks))
        yield headed(
            "group", f"{clean(group.name)}{named}: ranks {listed}; {group.issued:,} issued"
        )
    if result.ended:
        yield headed("missing", clean(result.ended))
    if result.collectives:
        yield ""
        yield from _table(result)


def _finding(finding: RankFinding) -> Iterator[str]:
    where = "before the first step" if finding.step < 0 else f"step {finding.step}"
    title = _TITLES.get(finding.verdict, str(finding.verdict))
    yield headed(title, f"{clean(finding.sentence)}   {where}")
    for shown in finding.evidence:
        yield headed("  evidence", clean(shown))


def _table(result: RankReport) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        ("collective", "op", "dtype", "ranks", "by", "before", "a step", "bytes a step")
    ]
    rows += [_row(row) for row in result.collectives[:_MOST_ROWS]]
    yield from tables.columns(rows, right=(5, 6, 7))
    if len(result.collectives) > _MOST_ROWS:
        yield f"... {count(len(result.collectives) - _MOST_ROWS, 'more row')}, in --format json"


def _row(row: CollectiveRow) -> tuple[str, ...]:
    number = str(row.most) if row.fewest == row.most else f"{row.fewest}-{row.most}"
    return (
        clean(row.kind),
        clean(row.op) or "-",
        clean(row.dtype) or "-",
        ",".join(map(str, row.ranks)),
        clean(row.by) or "-",
        str(row.before),
        number,
        tables.size(row.nbytes),
    )
