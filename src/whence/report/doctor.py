"""A Checkup on a terminal: healthy or not, then the clean runs, the faults by kind, faults that
were not named, and the cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from whence.report.document import Document, Table, answering
from whence.report.tables import count, listed, size
from whence.results import Checkup, Clean, PlantedFault, Status

_MOST = 5


@answering
def checkup(result: Checkup, *, output: str = "") -> Document:
    """The whole answer as text. output: where the runs were kept, shown last."""
    planted = [p for p in result.planted if p.outcome != "not planted"]
    clear = [p for p in planted if p.size_class == "clear"]
    alarms = [c for c in result.clean if c.status != Status.SAME]
    named = sum(p.outcome == "named first" for p in clear)
    words = (
        f"{len(alarms)} of {count(len(result.clean), 'clean run')} flagged; {named} of "
        f"{count(len(clear), 'clear fault')} named first"
    )
    yield "HEALTHY" if result.healthy else "NOT HEALTHY", words
    for run in result.clean:
        yield f"  {run.name}", _clean(run)
        if run.name == "the same again" and run.nondeterministic:
            names = listed(run.nondeterministic, _MOST)
            yield "  nondeterministic", f"differ between two equal runs on equal inputs: {names}"
    if result.planted:
        yield ""
        yield _table(planted)
        yield from _worth_a_line(result.planted)
    yield ""
    yield from _cost(result)
    yield from (f"note: {note}" for note in result.notes)
    if output:
        yield f"kept in {output}"


def _clean(run: Clean) -> str:
    if run.status == Status.SAME:
        return "bitwise identical" if run.identical else "differs, and every difference is rounding"
    if run.findings:
        return f"FALSE ALARM: {listed(run.findings, _MOST)}"
    return f"{run.status}: {run.headline}"


def _table(planted: Sequence[PlantedFault]) -> Table:
    counted = ("named first", "named", "detected", "missed")
    rows: list[Sequence[str]] = [
        ("fault", "planted", *counted, "below rounding", "size: times own rounding")
    ]
    kinds = dict.fromkeys(p.fault for p in planted)
    for kind in (*kinds, *(["all"] if len(kinds) > 1 else [])):
        some = [p for p in planted if kind in ("all", p.fault)]
        ends = sorted(p.size for p in some if p.size is not None)
        spread = "infinite"
        if ends:
            spread = f"{ends[0]:.2g}" + (f" to {ends[-1]:.2g}" if ends[-1] != ends[0] else "")
        outcomes = [p.outcome for p in some]
        small = outcomes.count("below rounding") + outcomes.count("no effect")
        numbers = (len(some), *map(outcomes.count, counted), small)
        rows.append((kind, *map(str, numbers), spread))
    return Table(rows, right=range(1, 7))


def _worth_a_line(planted: Sequence[PlantedFault]) -> Document:
    for fault in planted:
        if fault.outcome == "named first":
            continue
        first_named = f"; first named: {fault.named}" if fault.named else ""
        how_large = "" if fault.size is None else f", {fault.size:.2g} times its own rounding"
        yield (
            f"  {fault.outcome}",
            f"{fault.fault} in {fault.site} ({fault.op_type}): {fault.words}{how_large}"
            f"{first_named}",
        )


def _cost(result: Checkup) -> Document:
    share = f"{result.replayable / result.calls:.0%}" if result.calls else "none"
    yield "coverage", f"{count(result.calls, 'call')}; {share} can be replayed"
    for reason, number in list(result.not_replayable.items())[:_MOST]:
        yield "", f"not {count(number)}: {reason}"
    yield (
        "cost",
        f"{result.captured_s:.1f} s with capture, {result.bare_s:.1f} s without; "
        f"{size(result.disk_bytes)} on disk",
    )
    if result.kernels:
        yield "kernels", result.kernels
    yield "checked", result.subject
