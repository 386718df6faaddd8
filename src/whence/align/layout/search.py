"""Tensors of paired calls that hold the same in other axes: flattened, transposed, padded, heads or
channels in another order.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from whence import dtypes
from whence.align import dims as ex
from whence.align.layout.activations import activations
from whence.align.layout.axes import ways
from whence.align.layout.layout_state import Face, LayoutState
from whence.align.layout.weights import parameters
from whence.align.module_names import starred
from whence.records import Run
from whence.records.slots import is_param, param_name
from whence.results import Plan, SlotPair


def laid_out(reference: Run, target: Run, plan: Plan) -> tuple[Run, Plan]:
    """Give the target's tensors the axes of those they face. Elements are read of few of every
    family of siblings.
    """
    at = LayoutState(reference, target, plan)
    _left_over(at)
    parameters(at)
    activations(at)
    made: dict[Face, int] = {}
    for face, (node, why) in at.decided.items():
        try:
            made[face] = at.making.add(node, {"x": [face[1]]}, why)
        except ex.Unfit:
            continue
    at.notes += _told(at)
    for call, pair in at.pairs.items() if made else ():
        slots = tuple(_with(slot, made) for slot in pair.slots)
        if slots != pair.slots:
            at.pairs[call] = msgspec.structs.replace(pair, slots=slots)
    return at.done()


def _with(slot: SlotPair, made: dict[Face, int]) -> SlotPair:
    found = made.get((slot.reference_record, slot.target_record))
    return slot if found is None else msgspec.structs.replace(slot, target_record=found)


def _left_over(at: LayoutState) -> None:
    """Pair slots that are left on both sides where one layout fits and the data agree."""
    known: dict[tuple[object, ...], bool] = {}
    for pair in list(at.pairs.values()):
        if not pair.only_reference or not pair.only_target:
            continue
        call, other = at.calls(pair)
        mine, theirs = ({r.slot: r.record for r in c.refs} for c in (call, other))
        slots, free = list(pair.slots), list(pair.only_target)
        for name in pair.only_reference:
            kind = name.partition(".")[0]
            fits = [
                f
                for f in free
                if f.partition(".")[0] == kind
                and f in theirs
                and name in mine
                and _fit(at, (mine[name], theirs[f]))
            ]
            if len(fits) != 1:
                continue
            face = mine[name], theirs[fits[0]]
            shapes = tuple(r.shape for r in at.records(face))
            key = (starred(call.scope), starred(other.scope), name, fits[0], shapes)
            if not known.get(key):
                known[key] = at.agree(face)
            if known[key]:
                slots.append(SlotPair(name, fits[0], *face))
                free.remove(fits[0])
        if len(slots) != len(pair.slots):
            only = tuple(
                n for n in pair.only_reference if n not in {s.reference_slot for s in slots}
            )
            at.pairs[call.id] = msgspec.structs.replace(
                pair, slots=tuple(slots), only_reference=only, only_target=tuple(free)
            )


def _fit(at: LayoutState, face: Face) -> bool:
    a, b = at.records(face)
    return dtypes.is_floating(a.dtype) == dtypes.is_floating(b.dtype) and bool(
        ways(b.shape, a.shape)
    )


def _told(at: LayoutState) -> list[str]:
    """How many tensors were laid otherwise, and what of the target's parameters is left out, in
    sentences.
    """
    counts = Counter(_brief(str(node)) for node, _ in at.decided.values())
    shown = ", ".join(f"{how} ({count})" for how, count in counts.most_common(3)) + (
        ", ..." if len(counts) > 3 else ""
    )
    total = sum(counts.values())
    out: dict[str, None] = (
        {f"{total} tensors of the target were brought to the reference's axes: {shown}": None}
        if counts
        else {}
    )
    for pair in at.pairs.values():
        for slot in pair.slots:
            face = slot.reference_record, slot.target_record
            if is_param(slot.reference_slot) and face in at.decided:
                a, b = at.records(face)
                if a.count < b.count:
                    name = f"{at.target.calls[pair.target].scope}.{param_name(slot.target_slot)}"
                    out[
                        f"{name} of the target is {list(b.shape)}, of the reference "
                        f"{list(a.shape)}: the rest was left out"
                    ] = None
    return list(out)


def _brief(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]} ..."
