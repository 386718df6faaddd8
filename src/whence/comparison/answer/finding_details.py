"""What is added to a finding: the element that differs most, and where the target keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from whence import align
from whence.comparison.paired_runs import PairedRuns
from whence.dtypes import Array
from whence.records.slots import is_of_child, is_output, split_child
from whence.results import Finding, SlotPair, VerdictKind

_CLEARLY = 0.1  # of the largest error of any token
_LONGEST = 80  # characters of a dims expression that are shown


def with_worst(finding: Finding, paired: PairedRuns) -> Finding:
    """Add the element with the largest error, as both sides have it, and where the tensors of a
    rearranged one are to be found.
    """
    finding = _with_layout(finding, paired)
    if finding.pair < 0 or finding.verdict == VerdictKind.PARAM_DIFF:
        return finding
    slots = paired.slots[finding.pair]
    slot = paired.slot(finding.pair, finding.slot) if finding.slot else None
    slot = slot or next((s for s in slots.values() if is_output(s.reference_slot)), None)
    if slot is None:
        return finding
    finding = msgspec.structs.replace(finding, printed_at=_printed_at(paired, slot))
    measured = paired.measured[slot.reference_record, slot.target_record]
    arrays = paired.arrays(slot)
    place = measured.max_abs_index
    if arrays is None or place is None or arrays[0].shape != arrays[1].shape:
        return finding
    since = _since(paired, finding, arrays)
    numbers = {
        k: measured.values.get(k)
        for k in ("rel_l2", "cosine_similarity", "max_abs_err")
        if k in measured.values
    }
    return msgspec.structs.replace(
        finding,
        slot=_slot_name(paired, finding, slot),
        worst_index=place,
        worst_reference=_number(arrays[0][place]),
        worst_target=_number(arrays[1][place]),
        numbers={**finding.numbers, **numbers},
        sentence=finding.sentence + since,
    )


def _printed_at(paired: PairedRuns, slot: SlotPair) -> tuple[str, ...]:
    """The line in both logs, () where a side is no log."""
    sides = (paired.reference, slot.reference_record), (paired.target, slot.target_record)
    lines = [
        f"{name}:{row}"
        for run, record in sides
        if 0 <= record < len(run.records)
        for name, _, row in (run.records[record].file.rpartition(","),)
        if row.isdigit()
    ]
    return tuple(lines) if len(lines) == len(sides) else ()


def _with_layout(finding: Finding, paired: PairedRuns) -> Finding:
    """Where the target keeps what the finding is about, and which of the tensors that it was
    joined from differs.
    """
    slot = paired.slot(finding.pair, finding.slot) if finding.pair >= 0 and finding.slot else None
    if slot is None or not slot.dims or _since(paired, finding, paired.arrays(slot)):
        return finding
    arrays = paired.arrays(slot)
    parts: tuple[str, ...] = ()
    if arrays is not None and arrays[0].shape == arrays[1].shape:
        # Of activations all elements differ a little: those that differ most are meant.
        error = (
            np.abs(arrays[1].astype(np.float64) - arrays[0].astype(np.float64))
            if arrays[0].dtype.kind not in "bc"
            else None
        )
        if error is not None and np.isfinite(error).all():
            limit = 0.0 if finding.verdict == VerdictKind.PARAM_DIFF else float(error.max()) / 10
            derived = {tensor.record: tensor for tensor in paired.plan.made_target}
            parts = align.named(derived, paired.shown.records, slot.target_record, error > limit)
    where = (
        _and(parts)
        if parts
        else slot.dims
        if len(slot.dims) <= _LONGEST
        else f"{slot.dims[:_LONGEST]} ..."
    )
    return msgspec.structs.replace(finding, sentence=f"{finding.sentence}; {where} of the target")


def _since(paired: PairedRuns, finding: Finding, arrays: tuple[Array, Array] | None) -> str:
    """Where the calls of several steps were joined: from which token and step on they part."""
    if arrays is None or arrays[0].shape != arrays[1].shape:
        return ""
    pair = paired.plan.pairs[finding.pair]
    sides = {"reference": paired.calls[pair.reference], "target": paired.target.calls[pair.target]}
    for joined in reversed(paired.plan.joined):  # of the target where both were
        call = sides[joined.side]
        total, dims = sum(tokens for *_, tokens in joined.pieces), arrays[0].ndim
        # Features are last, unless there is one number for each token.
        axis = next(
            (
                k
                for k in range(max(dims - 1, 1 + (dims < 3)))
                if k < dims and arrays[0].shape[k] == total
            ),
            None,
        )
        if (
            (joined.root, joined.step, joined.micro) != (call.root, call.step, call.micro)
            or len(joined.pieces) < 2
            or axis is None
        ):
            continue
        error = np.abs(arrays[1].astype(np.float64) - arrays[0].astype(np.float64))
        by_token = error.max(axis=tuple(k for k in range(dims) if k != axis))
        token = int(np.argmax(by_token > _CLEARLY * by_token.max()))
        ends = np.cumsum([tokens for *_, tokens in joined.pieces])
        step = joined.pieces[int(np.searchsorted(ends, token, side="right"))][0]
        return f"; from token {token} on, step {step} of the {joined.side}"
    return ""


def _slot_name(paired: PairedRuns, finding: Finding, slot: SlotPair) -> str:
    """The slot in words: what a child is given is named by the child ("o_proj:input.0")."""
    if not is_of_child(finding.slot):
        return slot.reference_slot
    kids = paired.kids.get(paired.plan.pairs[finding.pair].reference, [])
    k, name = split_child(finding.slot)
    if k >= len(kids):
        return slot.reference_slot
    child = paired.calls[kids[k]]
    return f"{child.scope.rpartition('.')[2] or child.op_type}:{name}"


def _and(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]


def _number(value: Any) -> float | None:
    number = complex(value)
    return number.real if np.isfinite(number.real) else None
