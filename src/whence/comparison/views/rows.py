"""The rows of views: every pair of tensors in the order of execution, with another tool's
figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from whence import align
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.views import Tool, tool
from whence.comparison.views.formulas import Figures
from whence.errors import ElementsMissing
from whence.records import Call, Dumped, Record, Run, in_order
from whence.records.marks import Mark, has_mark
from whence.results import CallPair, Shown, SlotPair, ViewRow

_Place = tuple[int, int, int]
_OF_CALL = ("kind", "op_type", "occurrence", "phase", "step", "rank", "source")
_MOVES = ("cast", "transdata")


def viewed(
    paired: PairedRuns,
    views: Sequence[str],
    per_call: Mapping[int, str],
    tell: Callable[[int, int, str], None],
) -> dict[str, tuple[ViewRow, ...]]:
    """The rows of each view. Tensors and calls without a partner have rows with one side; nothing
    is left out.
    """
    out: dict[str, tuple[ViewRow, ...]] = {}
    for view in views:
        its = tool(view)
        placed = sorted(
            _rows(paired, per_call, its.MOVES_AGAINST_THEMSELVES), key=lambda item: item[0]
        )
        rows = [row for _, row in placed]
        measured = _figures(paired, view, rows, tell)
        out[view] = tuple(its.decide(list(measured)))
    return out


def _rows(
    paired: PairedRuns, per_call: Mapping[int, str], moves_against_themselves: bool
) -> Iterator[tuple[_Place, ViewRow]]:
    """(place, row) of everything. A call that only the target has stands behind the one before it
    that has a partner.
    """
    plan, target = paired.plan, paired.shown
    order_of: dict[int, int] = {}  # calls of the target -> order of the reference
    for pair in plan.pairs:
        call, partner = paired.calls[pair.reference], target.calls[pair.target]
        order_of[pair.target] = call.order
        if has_mark(call, Mark.PUT_TOGETHER) and has_mark(partner, Mark.PUT_TOGETHER):
            continue
        verdict = per_call.get(pair.reference, "")
        if moves_against_themselves and align.is_handed_on(call) and _moves(partner):
            row = _against_itself(target, partner)
            yield (call.order, 0, 0), msgspec.structs.replace(row, verdict=verdict)
        else:
            yield from _rows_of_pair(paired, pair, verdict)
    for call_id in (*plan.unmatched_reference, *(a for a, _ in plan.ambiguous)):
        call = paired.calls[call_id]
        for i, ref in enumerate(() if has_mark(call, Mark.PUT_TOGETHER) else call.refs):
            row = _lone((call_id, -1), paired.reference, call, ref.slot, is_target=False)
            yield (call.order, 0, i), row
    free = {*plan.unmatched_target, *(b for _, others in plan.ambiguous for b in others)}
    last, count = -1, 0
    for call in in_order(target.calls):
        last = order_of.get(call.id, last)
        if call.id in free and moves_against_themselves and _moves(call):
            count += 1
            yield (last, 2, count), _against_itself(target, call)
        elif call.id in free and not has_mark(call, Mark.PUT_TOGETHER):
            for ref in call.refs:
                count += 1
                row = _lone((-1, call.id), target, call, ref.slot, is_target=True)
                yield (last, 2, count), row


def _rows_of_pair(
    paired: PairedRuns, pair: CallPair, verdict: str
) -> Iterator[tuple[_Place, ViewRow]]:
    """(place, row) of every tensor of two calls."""
    reference, target = paired.reference, paired.shown
    call, partner = paired.calls[pair.reference], target.calls[pair.target]
    ids = pair.reference, pair.target
    place = {ref.slot: i for i, ref in enumerate(call.refs)}
    for slot in pair.slots:
        numbers = paired.measured[slot.reference_record, slot.target_record]
        row = ViewRow(
            ids,
            slot.reference_slot,
            _shown(reference, call, slot.reference_slot, slot.reference_record),
            _shown(target, partner, slot.target_slot, slot.target_record),
            verdict=verdict,
            rel_l2=0.0 if numbers.identical else numbers.values.get("rel_l2"),
            max_abs_err=0.0 if numbers.identical else numbers.values.get("max_abs_err"),
            note=numbers.why,
        )
        yield (call.order, 0, place.get(slot.reference_slot, 0)), row
    for name in pair.only_reference:
        row = _lone(ids, reference, call, name, is_target=False)
        yield (call.order, 0, place.get(name, 0)), row
    for i, name in enumerate(pair.only_target):
        yield (call.order, 1, i), _lone(ids, target, partner, name, is_target=True)


def _moves(call: Call) -> bool:
    """Is this one of the operators that only lay elements out, or round them? msit holds their
    input against their output.
    """
    return (
        call.op_type.lower() in _MOVES
        and len(call.slots("input")) == len(call.slots("output")) == 1
    )


def _against_itself(run: Run, call: Call) -> ViewRow:
    source, moved = call.slots("input")[0], call.slots("output")[0]
    return ViewRow(
        (-1, call.id),
        moved.slot,
        _shown(run, call, source.slot, source.record),
        _shown(run, call, moved.slot, moved.record),
        note="only the target has it: its input against its output",
    )


def _lone(call: tuple[int, int], run: Run, of: Call, slot: str, *, is_target: bool) -> ViewRow:
    record = next(ref.record for ref in of.refs if ref.slot == slot)
    side = _shown(run, of, slot, record)
    note = f"only the {'target' if is_target else 'reference'} has it"
    return ViewRow(call, slot, None if is_target else side, side if is_target else None, note=note)


def _shown(run: Run, call: Call, slot: str, number: int) -> Shown:
    record: Record = run.records[number]
    file = call.files.get(slot) or record.file
    s = record.statistics
    odd = s is not None and (
        s.nan + s.inf > 0 or any(v is not None and not math.isfinite(v) for v in (s.min, s.max))
    )
    taken: dict[str, Any] = {
        **{name: getattr(call, name) for name in _OF_CALL},
        **{name: getattr(s, name, None) for name in ("min", "max", "mean", "norm")},
    }
    return Shown(
        name=call.module_name,
        slot=slot,
        # as the dump has it, which is what another tool reads
        dtype=(isinstance(record.elements, Dumped) and record.elements.stored) or record.dtype,
        shape=record.shape,
        file=file,
        path=_path(run, file),
        not_finite=odd,
        **taken,
    )


def _path(run: Run, file: str) -> str:
    if not file:
        return ""
    return str(Path(run.path) / file) if Path(run.path).is_dir() else run.path


def _figures(
    paired: PairedRuns, view: str, rows: Sequence[ViewRow], tell: Callable[[int, int, str], None]
) -> Iterator[ViewRow]:
    its = tool(view)
    measured: dict[tuple[int, int], tuple[Figures, str]] = {}
    pairs = {
        (p.reference, p.target): {s.reference_slot: s for s in p.slots} for p in paired.plan.pairs
    }
    for count, row in enumerate(rows):
        tell(count + 1, len(rows), f"view {view}")
        slot: SlotPair | None = (
            pairs.get(row.call, {}).get(row.slot) if row.reference and row.target else None
        )
        if row.call[0] < 0 and row.reference and row.target:
            figures, why = _own_figures(paired.shown, paired.shown.calls[row.call[1]], its)
            yield msgspec.structs.replace(row, figures=figures, why=why)
            continue
        if slot is None:
            yield msgspec.structs.replace(row, why=row.note)
            continue
        key = slot.reference_record, slot.target_record
        if key not in measured:
            arrays = paired.arrays(slot)
            measured[key] = (
                its.figures(*arrays)
                if arrays is not None
                else ({}, paired.measured[key].why or "elements are missing")
            )
        figures, why = measured[key]
        yield msgspec.structs.replace(row, figures=figures, why=why)


def _own_figures(run: Run, call: Call, its: Tool) -> tuple[Figures, str]:
    try:
        return its.figures(*(run.array(call.slots(kind)[0].record) for kind in ("input", "output")))
    except ElementsMissing as error:
        return {}, str(error)
