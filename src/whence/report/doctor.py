"""A Checkup on a terminal: healthy or not, then the clean runs, the faults by kind, what was not
named, and what it cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whence.report.tables import clean, columns, count, headed, listed, size
from whence.results import Checkup, Clean, PlantedFault, Status

_MOST = 5


def checkup(result: Checkup, *, output: str = "") -> str:
    """The whole answer as text. output: where the runs were kept, shown last."""
    return "\n".join(_lines(result, output)) + "\n"


def _lines(result: Checkup, output: str) -> Iterator[str]:
    planted = [p for p in result.planted if p.outcome != "not planted"]
    clear = [p for p in planted if p.size_class == "clear"]
    alarms = [c for c in result.clean if c.status != Status.SAME]
    named = sum(p.outcome == "named first" for p in clear)
    words = (
        f"{len(alarms)} of {count(len(result.clean), 'clean run')} flagged; {named} of "
        f"{count(len(clear), 'clear fault')} named first"
    )
    yield headed("HEALTHY" if result.healthy else "NOT HEALTHY", words)
    for run in result.clean:
        yield from _clean(run)
    if result.planted:
        yield ""
        yield from _table(planted)
        yield from _worth_a_line(result.planted)
    yield ""
    yield from _cost(result)
    for note in result.notes:
        yield f"note: {clean(note)}"
    if output:
        yield f"kept in {clean(output)}"


def _clean(run: Clean) -> Iterator[str]:
    if run.status == Status.SAME:
        yield headed(
            f"  {run.name}",
            "bitwise identical" if run.identical else "differs, and every difference is rounding",
        )
    else:
        text = (
            f"FALSE ALARM: {listed(run.findings, _MOST)}"
            if run.findings
            else f"{run.status}: {clean(run.headline)}"
        )
        yield headed(f"  {run.name}", text)
    if run.name == "the same again" and run.nondeterministic:
        yield headed(
            "  nondeterministic",
            f"differ between two equal runs on equal inputs: {listed(run.nondeterministic, _MOST)}",
        )


def _table(planted: Sequence[PlantedFault]) -> Iterator[str]:
    head = (
        "fault",
        "planted",
        "named first",
        "named",
        "detected",
        "missed",
        "below rounding",
        "size: times own rounding",
    )
    kinds = dict.fromkeys(p.fault for p in planted)
    rows: list[Sequence[str]] = [head]
    for kind in (*kinds, *(["all"] if len(kinds) > 1 else [])):
        some = [p for p in planted if kind in ("all", p.fault)]
        sizes = sorted(p.size for p in some if p.size is not None)
        spread = (
            f"{sizes[0]:.2g}" + (f" to {sizes[-1]:.2g}" if sizes[-1] != sizes[0] else "")
            if sizes
            else "infinite"
        )
        small = sum(p.outcome in ("below rounding", "no effect") for p in some)
        counts = [
            str(sum(p.outcome == o for p in some))
            for o in ("named first", "named", "detected", "missed")
        ]
        rows.append((kind, str(len(some)), *counts, str(small), spread))
    yield from columns(rows, right=range(1, 7))


def _worth_a_line(planted: Sequence[PlantedFault]) -> Iterator[str]:
    for fault in planted:
        if fault.outcome == "named first":
            continue
        first_named = f"; first named: {clean(fault.named)}" if fault.named else ""
        how_large = "" if fault.size is None else f", {fault.size:.2g} times its own rounding"
        yield headed(
            f"  {fault.outcome}",
            clean(f"{fault.fault} in {fault.site} ({fault.op_type}): {fault.words}{how_large}")
            + first_named,
        )


def _cost(result: Checkup) -> Iterator[str]:
    share = f"{result.replayable / result.calls:.0%}" if result.calls else "none"
    yield headed("coverage", f"{count(result.calls, 'call')}; {share} can be replayed")
    for reason, number in list(result.not_replayable.items())[:_MOST]:
        yield headed("", f"not {count(number)}: {clean(reason)}")
    yield headed(
        "cost",
        f"{result.captured_s:.1f} s with capture, {result.bare_s:.1f} s without; "
        f"{size(result.disk_bytes)} on disk",
    )
    yield headed("checked", clean(result.subject))
