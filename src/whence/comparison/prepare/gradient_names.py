"""Pairs the gradients that a step collects as their parameters are paired.

Where two models name their parameters otherwise, gradients of one shape cannot be told apart by
their slots. The calls that read the parameters are paired better, and tell which is which.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from whence import align
from whence.records import Call, Ref, Run
from whence.records.slots import is_param, parameter_path, split_slot
from whence.records.training import GRADIENTS
from whence.results import CallPair, SlotPair

Names = dict[str, set[str]]
"""By name of a parameter of the reference, the names of those of the target paired with it."""


def with_gradients_of_parameters(aligned: align.Aligned) -> align.Aligned:
    """Two aligned runs in which gradients that differ in name are paired only where the parameters
    are. Call and record ids stay.
    """
    reference, target, plan = aligned.reference, aligned.target, aligned.plan
    is_asked = [_is_renamed(pair, reference.calls[pair.reference]) for pair in plan.pairs]
    if not any(is_asked):
        return aligned
    names = _paired_names(plan.pairs, reference, target)
    pairs = tuple(
        _repaired(pair, names, (reference, target)) if asked else pair
        for pair, asked in zip(plan.pairs, is_asked, strict=True)
    )
    return align.Aligned(reference, target, msgspec.structs.replace(plan, pairs=pairs))


def _is_renamed(pair: CallPair, call: Call) -> bool:
    return call.op == GRADIENTS and any(_is_free(slot) for slot in pair.slots)


def _is_free(slot: SlotPair) -> bool:
    """Whether neither a name nor the axes of both tensors tell that they belong together."""
    return slot.reference_slot != slot.target_slot and not slot.dims


def _paired_names(pairs: Sequence[CallPair], reference: Run, target: Run) -> Names:
    names: Names = {}
    for pair in pairs:
        call, partner = reference.calls[pair.reference], target.calls[pair.target]
        for slot in pair.slots if call.phase == "forward" else ():
            if is_param(slot.reference_slot):
                name, across = (
                    parameter_path(call.scope, slot.reference_slot),
                    parameter_path(partner.scope, slot.target_slot),
                )
                names.setdefault(name, set()).add(across)
    return names


def _repaired(pair: CallPair, names: Names, runs: tuple[Run, Run]) -> CallPair:
    """The pair of two calls that collect gradients, with those that differ in name paired anew."""
    free = {slot.reference_slot for slot in pair.slots if _is_free(slot)}
    slots = [slot for slot in pair.slots if slot.reference_slot not in free]
    used = {slot.target_slot for slot in slots}
    own = {ref.slot: ref for ref in runs[0].calls[pair.reference].refs}
    across = {ref.slot: ref for ref in runs[1].calls[pair.target].refs if ref.slot not in used}
    alone = [slot for slot in (*free, *pair.only_reference) if slot in own]
    for slot in sorted(alone, key=list(own).index):
        kind, name = split_slot(slot)
        same_kind = (ref for ref in across.values() if split_slot(ref.slot)[0] == kind)
        match = next((ref for ref in same_kind if _is_of(ref.slot, names.get(name, ()))), None)
        if match is not None and _fits(own[slot], match, runs):
            del across[match.slot]
            slots.append(SlotPair(slot, match.slot, own[slot].record, match.record))
    placed = {slot.reference_slot for slot in slots}
    return msgspec.structs.replace(
        pair,
        slots=tuple(slots),
        only_reference=tuple(slot for slot in own if slot not in placed),
        only_target=tuple(across),
    )


def _is_of(slot: str, names: Collection[str]) -> bool:
    """Whether a gradient is of one of these parameters, perhaps named from a wrapper on."""
    name = split_slot(slot)[1]
    return any(name == other or name.endswith(f".{other}") for other in names)


def _fits(ref: Ref, match: Ref, runs: tuple[Run, Run]) -> bool:
    return runs[0].records[ref.record].shape == runs[1].records[match.record].shape
