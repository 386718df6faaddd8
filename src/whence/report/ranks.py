"""Reports on the ranks of one run, on a terminal."""

from __future__ import annotations

from whence.report import tables
from whence.report.document import Document, Table, answering
from whence.report.tables import count
from whence.results import CollectiveRow, RankReport, RankVerdict

_MOST_ROWS = 40
_TITLES = {
    RankVerdict.FAULT: "FAULT",
    RankVerdict.UNKNOWN: "CANNOT TELL",
    RankVerdict.WARNING: "WARNING",
}
_NO_FINDING = {RankVerdict.NOTHING: "NOTHING", RankVerdict.UNKNOWN: "CANNOT TELL"}


@answering
def ranks_text(result: RankReport) -> Document:
    """The answer as text."""
    for finding in result.findings:
        at = "before the first step" if finding.step < 0 else f"step {finding.step}"
        yield _TITLES.get(finding.verdict, finding.verdict), f"{finding.sentence}   {at}"
        yield from (("  evidence", shown) for shown in finding.evidence)
    if not result.findings:
        but = ", but the run is not whole" if result.ended else ""
        words = f"no rank parts from the others in what was checked{but}"
        yield _NO_FINDING.get(result.verdict, "FINE"), words
    yield from ((f"  {c.kind}", f"{c.verdict}: {c.words}") for c in result.checks)
    yield "ranks", f"{count(len(result.ranks), 'rank')}, {count(result.steps, 'step')}"
    yield from (("mesh", mesh) for mesh in result.meshes)
    for group in result.groups:
        named = f" ({group.purpose})" if group.purpose else ""
        listed = ", ".join(map(str, group.ranks))
        yield "group", f"{group.name}{named}: ranks {listed}; {group.issued:,} issued"
    yield "missing", result.ended
    if result.collectives:
        yield ""
        head = ("collective", "op", "dtype", "ranks", "by", "before", "a step", "bytes a step")
        yield Table([head, *map(_row, result.collectives[:_MOST_ROWS])], right=(5, 6, 7))
    if len(result.collectives) > _MOST_ROWS:
        yield f"... {count(len(result.collectives) - _MOST_ROWS, 'more row')}, in --format json"


def _row(row: CollectiveRow) -> tuple[str, ...]:
    return (
        row.kind,
        row.op or "-",
        row.dtype or "-",
        ",".join(map(str, row.ranks)),
        row.by or "-",
        str(row.before),
        str(row.most) if row.fewest == row.most else f"{row.fewest}-{row.most}",
        tables.size(row.nbytes),
    )
