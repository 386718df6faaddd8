"""Parameters of one call of the reference that belong to several calls of the target (q, k, v)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whence.align import dims as ex
from whence.align.layout import permutations
from whence.align.module_names import starred
from whence.align.plan_editor import MOST_PARTS, PlanEditor, distinct, identifier, short
from whence.results import SlotPair


def own_parameters(editor: PlanEditor) -> None:
    """Make such parameters of the parts, which belong to the call's partner then."""
    runs: dict[tuple[str, str], tuple[int, int] | None] = {}
    for pair in list(editor.pairs.values()):
        call, kids = editor.reference.calls[pair.reference], editor.kids_target.get(pair.target, [])
        fused_slots = [
            r
            for r in call.slots("param")
            if r.slot in pair.only_reference and len(editor.reference.records[r.record].shape) == 2
        ]
        if not fused_slots or len(kids) < 2 or editor.kids_reference.get(call.id):
            continue
        name = starred(call.scope), fused_slots[0].slot
        if runs.get(name) is None:
            runs[name] = _run_of_kids(editor, fused_slots[0].record, kids)
        chosen = runs[name]
        if chosen is None or chosen[1] > len(kids):
            continue
        parts = [editor.target.calls[k] for k in kids[slice(*chosen)]]
        names = distinct([identifier(short(c)) for c in parts])
        slots = list(pair.slots)
        for ref in call.slots("param"):
            kind = ref.slot.rpartition("_")[2]  # in_proj_weight, in_proj_bias
            bound = {
                n: [r.record for r in c.slots("param") if r.slot == f"param.{kind}"]
                for n, c in zip(names, parts)
            }
            if ref.slot not in pair.only_reference or any(len(ids) != 1 for ids in bound.values()):
                continue
            node = ex.Cat(tuple(ex.Name(n) for n in names), 0)
            shape = editor.reference.records[ref.record].shape
            shapes = {n: [editor.target.records[r].shape for r in ids] for n, ids in bound.items()}
            if (
                all(len(s[0]) == len(shape) for s in shapes.values())
                and node.shape(shapes) == shape
            ):
                record = editor.derived.add(node, bound, "rows found by their elements")
                slots.append(
                    SlotPair(ref.slot, f"{parts[0].scope}:param.{kind}", ref.record, record)
                )
        if len(slots) > len(pair.slots):
            editor.set_slots(call.id, slots)
            editor.attach(call.id, [k for k in kids if k in editor.free_target])


def _run_of_kids(editor: PlanEditor, record: int, kids: Sequence[int]) -> tuple[int, int] | None:
    """(first, behind the last) of the calls whose joined weights are this one, by most rows."""
    whole = editor.array("reference", record)
    if whole is None:
        return None
    weights = [
        next(
            (
                r.record
                for r in editor.target.calls[k].slots("param")
                if len(editor.target.records[r.record].shape) == 2
            ),
            None,
        )
        for k in kids
    ]
    for count in range(2, MOST_PARTS + 1):
        for first in range(len(kids) - count + 1):
            parts = [editor.array("target", w) for w in weights[first : first + count]]
            joined = [p for p in parts if p is not None and p.shape[1] == whole.shape[1]]
            if len(joined) == count and sum(map(len, joined)) == len(whole):
                rows = permutations.located(whole, np.concatenate(joined))
                if rows is not None and (rows[rows >= 0] == np.flatnonzero(rows >= 0)).all():
                    return first, first + count
    return None
