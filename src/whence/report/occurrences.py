"""Executions of operators, counted, as lines: which is the first to differ, and which is the first
that rounding does not explain.
"""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.tables import clean, count
from whence.results import Comparison, Counted, Occurrence

_MOST = 4


def lines(result: Comparison, *, every: bool = False) -> Iterator[tuple[str, str]]:
    """(left, right) of each line. every: all operators, by type and by name; else the first of
    those that differ.
    """
    table = result.occurrences
    if table is None or (table.first_difference is None and not every):
        return
    yield (
        "FIRST DIFFERENCE",
        _one(table.first_difference)
        if table.first_difference is not None
        else "none: every tensor is bitwise equal",
    )
    if table.first_difference is not None:
        first = table.first_significant
        if first is not None:
            yield "FIRST SIGNIFICANT", _one(first)
        elif not result.findings:  # a finding may name a module, which is no counted operator
            yield "FIRST SIGNIFICANT", "none: rounding explains every difference"
    rows = sorted(
        (r for r in table.rows if every or (r.by == "type" and r.first_significant is not None)),
        key=_order,
    )
    for row in rows if every else rows[:_MOST]:
        yield "  by " + row.by, sentence(row)
    if len(rows) > _MOST and not every:
        yield "", f"and {count(len(rows) - _MOST)} more operators (--occurrences, report.json)"


def _order(row: Counted) -> tuple[bool, bool, int]:
    first = row.first_significant or row.first_difference
    return (
        row.by == "name",
        row.first_significant is None,
        first.call if first is not None else 1 << 62,
    )


def sentence(row: Counted) -> str:
    """What became of one operator's executions."""
    name, first = clean(row.name), row.first_difference
    uncompared = (
        f"; {count(row.count - row.compared)} of {count(row.count)} could not be compared"
        if row.compared < row.count
        else ""
    )
    if first is None:
        return (
            f"{name}: all {count(row.compared)} equal{uncompared}"
            if row.compared
            else f"{name}: nothing could be compared{uncompared}"
        )
    earlier = first.number - 1
    equal = (
        ""
        if not earlier
        else "occurrence 1 equal, "
        if earlier == 1
        else f"occurrences 1-{earlier} equal, "
    )
    if row.equal < earlier:
        equal = f"{count(row.equal)} before it equal, "
    text = (
        f"{name}: {equal}{_nth(first.number)} of {count(row.count)} first to differ ({_at(first)})"
    )
    if row.first_significant is None:
        text += ", none significant"
    elif row.first_significant.number != first.number:
        text += (
            f", {_nth(row.first_significant.number)} first significant "
            f"({_at(row.first_significant)})"
        )
    else:
        text += ", and first significant"
    return text + uncompared


def _at(where: Occurrence) -> str:
    step = f", step {where.step}" if where.step else ""
    return f"{clean(where.name)}, rel_l2 {where.rel_l2:.2g}{step}"


def _one(where: Occurrence) -> str:
    call = f"{clean(where.name)}   {clean(where.op_type)}, its {_nth(where.number)}"
    return f"{call}   rel_l2 {where.rel_l2:.2g}, step {where.step} ({where.verdict})"


def _nth(number: int) -> str:
    ending = (
        "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"
