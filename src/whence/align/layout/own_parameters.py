"""A fused parameter that a call of the reference has itself, and calls below its partner have in parts (torch's attention)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whence.align import dims as ex
from whence.align.layout import permutations
from whence.align.module_names import starred
from whence.align.plan_editor import MOST_PARTS, Matching, distinct, identifier, short
from whence.results import SlotPair


def own_parameters(at: Matching) -> None:
    """Make such parameters of the parts, which belong to the call's partner then."""
    known: dict[tuple[str, str], tuple[int, int] | None] = {}
    for pair in list(at.pairs.values()):
        call, kids = at.reference.calls[pair.reference], at.kids_target.get(pair.target, [])
        fused_slots = [r for r in call.slots("param") if r.slot in pair.only_reference and len(at.reference.records[r.record].shape) == 2]
        if not fused_slots or len(kids) < 2 or at.kids_reference.get(call.id):
            continue
        name = starred(call.scope), fused_slots[0].slot
        if known.get(name) is None:
            known[name] = _run_of_kids(at, fused_slots[0].record, kids)
        chosen = known[name]
        if chosen is None or chosen[1] > len(kids):
            continue
        parts = [at.target.calls[k] for k in kids[slice(*chosen)]]
        names = distinct([identifier(short(c)) for c in parts])
        slots = list(pair.slots)
        for ref in call.slots("param"):
            kind = ref.slot.rpartition("_")[2]  # in_proj_weight, in_proj_bias
            bound = {n: [r.record for r in c.slots("param") if r.slot == f"param.{kind}"] for n, c in zip(names, parts)}
            if ref.slot not in pair.only_reference or any(len(found) != 1 for found in bound.values()):
                continue
            node = ex.Cat(tuple(ex.Name(n) for n in names), 0)
            shape = at.reference.records[ref.record].shape
            shapes = {n: [at.target.records[r].shape for r in found] for n, found in bound.items()}
            if all(len(s[0]) == len(shape) for s in shapes.values()) and node.shape(shapes) == shape:
                made = at.making.add(node, bound, "rows found by their elements")
                slots.append(SlotPair(ref.slot, f"{parts[0].scope}:param.{kind}", ref.record, made))
        if len(slots) > len(pair.slots):
            at.put(call.id, slots)
            at.belongs(call.id, [k for k in kids if k in at.free_target])


def _run_of_kids(at: Matching, record: int, kids: Sequence[int]) -> tuple[int, int] | None:
    """(first, behind the last) of the calls whose weights one after another are this one, told by most of its rows."""
    whole = at.array("reference", record)
    if whole is None:
        return None
    weights = [
        next((r.record for r in at.target.calls[k].slots("param") if len(at.target.records[r.record].shape) == 2), None) for k in kids
    ]
    for count in range(2, MOST_PARTS + 1):
        for first in range(len(kids) - count + 1):
            parts = [at.array("target", w) for w in weights[first : first + count]]
            joined = [p for p in parts if p is not None and p.shape[1] == whole.shape[1]]
            if len(joined) == count and sum(map(len, joined)) == len(whole):
                found = permutations.located(whole, np.concatenate(joined))
                if found is not None and (found[found >= 0] == np.flatnonzero(found >= 0)).all():
                    return first, first + count
    return None
