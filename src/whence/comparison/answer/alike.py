"""Tensors that count as equal, or as differing by rounding alone, although rounding made no such
bits: the filling of masks, and masks in another form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from whence import dtypes, judge
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.verdicts.returned_shapes import reshaped
from whence.records.slots import is_param
from whence.results import GUILTY, Alike, SlotPair, VerdictKind

_JUDGED_OTHERWISE: Collection[str] = (
    *GUILTY,
    VerdictKind.UNDETERMINED,
    VerdictKind.DECLARED,
    VerdictKind.OTHER_FORM,
    VerdictKind.INCOMPARABLE,
)


def alike(paired: PairedRuns, per_call: Mapping[int, str]) -> tuple[Alike, ...]:
    """Every such tensor of the calls that pass, once, in the order of execution. per_call: verdict
    of each call of the reference.
    """
    tensors: dict[tuple[int, int], Alike] = {}
    for index, pair in enumerate(paired.plan.pairs):
        if per_call.get(pair.reference, "") in _JUDGED_OTHERWISE:
            continue
        call = paired.calls[pair.reference]
        for slot in paired.slots[index].values():
            key = slot.reference_record, slot.target_record
            if key in tensors or is_param(slot.reference_slot):
                continue
            for elements, words in _unlike(paired, slot):
                name = call.module_name
                tensors[key] = Alike(name, slot.reference_slot, call.step, elements, words)
    for returned in reshaped(paired):
        slot = returned.slot
        call = paired.calls[paired.plan.pairs[returned.pair].reference]
        elements = paired.reference.records[slot.reference_record].count
        tensors[slot.reference_record, slot.target_record] = Alike(
            call.module_name,
            slot.reference_slot,
            call.step,
            elements,
            f"returned as {returned.words} in the reference",
        )
    return tuple(tensors.values())


def _unlike(paired: PairedRuns, slot: SlotPair) -> Iterator[tuple[int, str]]:
    """(how many elements differ so, the first of them on both sides in words)."""
    measured = paired.measured[slot.reference_record, slot.target_record]
    reference, target = paired.records(slot)
    if measured.identical:
        shown = paired.shown.records[slot.target_record]
        if shown.dtype != reference.dtype or shown.shape != reference.shape:
            forms = (
                f"{reference.dtype} {list(reference.shape)}",
                f"{shown.dtype} {list(shown.shape)}",
            )
            yield reference.count, f"a mask that says the same as {forms[0]} and as {forms[1]}"
        return
    kinds = [dtypes.DTYPES.get(record.dtype) for record in (reference, target)]
    if not all(kind is not None and kind.kind == "float" for kind in kinds):
        return
    may_be_filled = bool(measured.values.get("inf_mismatch")) or (
        judge.is_filled(reference) and judge.is_filled(target)
    )
    arrays = paired.arrays(slot) if may_be_filled else None
    if arrays is None or arrays[0].shape != arrays[1].shape:
        return
    differ = judge.filled_otherwise(*arrays)
    if count := int(np.count_nonzero(differ)):
        place = np.unravel_index(int(np.argmax(differ)), differ.shape)
        a, b = (float(array[place]) for array in arrays)
        yield count, f"{a:.6g} against {b:.6g}"
