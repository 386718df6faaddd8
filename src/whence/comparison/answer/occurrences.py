"""When an operator first differs: its executions counted, by type and by name, each against its
partner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from whence import align
from whence.comparison.paired_runs import PairedRuns
from whence.records import Call
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_written
from whence.results import Counted, Occurrence, Occurrences

_OPERATORS = 0.5  # share of calls that are operators, from which on a run is one of operators


def of_operators(paired: PairedRuns) -> bool:
    """Are these runs of operators (a predictor, a dump of a graph), not of modules?"""
    leaves = [c for c in paired.calls if c.leaf]
    return bool(leaves) and sum(c.kind == "operator" for c in leaves) >= _OPERATORS * len(leaves)


def counted(
    paired: PairedRuns, per_call: Mapping[int, str], significant: Collection[int]
) -> Occurrences:
    """The table. per_call: the verdict of each paired call of the reference. significant: those
    that rounding does not explain.

    Calls that the capture was not asked for count as nothing. An occurrence is equal when all its
    outputs are bit for bit.
    """
    rows: dict[tuple[str, str], list[tuple[Occurrence | None, bool, bool]]] = {}
    for call in sorted(align.selected(paired.calls), key=lambda c: (c.step, c.micro, c.order)):
        if not call.leaf or has_mark(call, Mark.PUT_TOGETHER):
            continue
        occurrence, differs = _occurrence(paired, call, per_call)
        for key in (("type", call.op_type or call.scope), ("name", call.module_name)):
            rows.setdefault(key, []).append((occurrence, differs, call.id in significant))
    table = tuple(_row(by, name, listed) for (by, name), listed in rows.items())
    by_type = [row for row in table if row.by == "type"]

    def earliest(column: str) -> Occurrence | None:
        occurrences = [
            occurrence for row in by_type if (occurrence := getattr(row, column)) is not None
        ]
        return min(
            occurrences,
            key=lambda occurrence: (
                paired.calls[occurrence.call].step,
                paired.calls[occurrence.call].micro,
                paired.calls[occurrence.call].order,
            ),
            default=None,
        )

    return Occurrences(
        earliest("first_difference"),
        earliest("first_significant"),
        tuple(r for r in table if r.by == "type" or r.count > 1),
    )


def _occurrence(
    paired: PairedRuns, call: Call, per_call: Mapping[int, str]
) -> tuple[Occurrence | None, bool]:
    """(the execution, does it differ); None when it has no partner or nothing of it could be
    measured.
    """
    index = paired.pair_of.get(call.id)
    if index is None:
        return None, False
    slots = [s for s in paired.slots[index].values() if is_written(s.reference_slot)]
    measured = [
        m
        for s in slots
        if (m := paired.measured[s.reference_record, s.target_record]).tier != "none"
    ]
    if not measured:
        return None, False
    worst = max((m.values.get("rel_l2") or 0.0 for m in measured), default=0.0)
    name = call.module_name
    verdict = per_call.get(call.id, "")
    return Occurrence(0, call.id, name, call.op_type, call.step, verdict, worst), not all(
        m.identical for m in measured
    )


def _row(by: str, name: str, listed: list[tuple[Occurrence | None, bool, bool]]) -> Counted:
    first = significant = None
    equal = differing = compared = 0
    for number, (occurrence, differs, is_significant) in enumerate(listed, 1):
        if occurrence is None:
            continue
        compared += 1
        if not differs:
            equal += first is None
            continue
        differing += 1
        numbered = msgspec.structs.replace(occurrence, number=number)
        first = first or numbered
        significant = significant or (numbered if is_significant else None)
    return Counted(by, name, len(listed), compared, equal, differing, first, significant)
