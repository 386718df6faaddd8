"""How tensors lie on the ranks that no tensor of the other side faces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whence.align.layout.permutations import located
from whence.align.ranks import shards
from whence.align.ranks.groups import Joining, Key, Place, Side
from whence.align.ranks.shards import Layout, Level
from whence.dtypes import Array
from whence.errors import ElementsMissing


def place_alone(at: Joining, side: Side, other: Side, faced: dict[str, dict[Key, Key]]) -> None:
    """Layouts of what no tensor of the other side faces: equal on all ranks, cut as its call's weight is, or not known."""
    for key in side.groups:
        for slot in sorted(side.slots(key), key=lambda s: side.weights_first(key, s)):
            _, records = side.holders(key, slot)
            place = (side.name, records)
            if not records or place in at.layouts:
                continue
            at.first.setdefault(place, (key, slot))
            shapes = [side.run.records[r].shape for r in records]
            layout = _lies_alone(at, side, other, key, slot, place, shapes, faced)
            if layout is None:
                at.unplaced[place] = side.name_of(key, slot)
                layout = (Level("replicated", len(records)),) if len(records) > 1 else ()
            at.layouts[place] = layout


def _lies_alone(
    at: Joining, side: Side, other: Side, key: Key, slot: str, place: Place, shapes: Sequence[shards.Shape],
    faced: dict[str, dict[Key, Key]],
) -> Layout | None:  # fmt: skip
    n = len(place[1])
    if n == 1:
        return ()
    if at.cannot_join(side, key, slot):
        return None
    if at.is_declared(side, key, slot):
        return at.options(side, key, slot, place[1], shapes)[0][0]
    if all(at.apart(side.name, place[1][0], r) == 0.0 for r in place[1][1:]):
        return (Level("replicated", n),)
    weight = next((s for s in side.slots(key) if s.startswith("param") and "weight" in s), "")
    lies = at.layouts.get((side.name, side.holders(key, weight)[1])) if weight else None
    if slot.startswith("param"):
        extents = [side.run.records[r].shape[:1] for r in side.holders(key, weight)[1]] if weight else []
        if slot != weight and lies and len(lies) == 1 and lies[0].how == "cat" and lies[0].axis == 0 and extents == [s[:1] for s in shapes]:
            return lies
        blocks = fused_parts(at, side, other, key, slot, place, faced) if len(set(shapes)) == 1 else ()
        if blocks:
            return (Level("cat", n, 0, blocks),)
        return (Level("cat", n, 0),) if _is_part_of(at, side, other, key, slot, place, faced) else None
    if slot.startswith("output") and lies and len(lies) == 1 and lies[0].how == "cat" and lies[0].axis == 0 and shapes[0]:
        return (Level("cat", n, len(shapes[0]) - 1, lies[0].blocks),)
    layout = (Level("replicated", n),)
    if at.copies(place, layout):
        at.note_parted(place, layout)
        return layout
    return None


def _is_part_of(
    at: Joining, side: Side, other: Side, key: Key, slot: str, place: Place, faced: dict[str, dict[Key, Key]]
) -> bool:  # fmt: skip
    """Are the rows of the ranks' pieces, one rank after the other, in one parameter of the other side that fuses more?"""
    above = side.parent(key)
    across = faced[side.name].get(above) if above is not None else None
    if across is None:
        return False
    taken = set(faced[other.name])
    try:
        ours = [side.run.array(r) for r in place[1]]
        if any(a.ndim != 2 or a.shape[1] != ours[0].shape[1] for a in ours):
            return False
        rows = np.concatenate(ours)
        for theirs in (k for k in other.groups if k not in taken and other.parent(k) == across and slot in other.slots(k)):
            _, records = other.holders(theirs, slot)
            if len(records) == 1 and (found := located(rows, other.run.array(records[0]))) is not None:
                known = found[found >= 0]
                return bool(np.all(np.diff(known) > 0))  # pieces on other ranks than they belong to are a fault
    except ElementsMissing:
        pass
    return False


def fused_parts(
    at: Joining, side: Side, other: Side, key: Key, slot: str, place: Place, faced: dict[str, dict[Key, Key]]
) -> tuple[tuple[int, int, int], ...]:
    """The parts of a fused parameter (q, k, v in one), found in the parameters of the other side's calls under the same parent."""
    above = side.parent(key)
    across = faced[side.name].get(above) if above is not None else None
    if across is None or not side.run.records[place[1][0]].shape:
        return ()
    taken = set(faced[other.name])
    parts: list[Array] = []
    try:
        ours = [side.run.array(r) for r in place[1]]
        for theirs in sorted(other.groups, key=lambda k: min(c.order for c in other.groups[k].values())):
            if theirs in taken or other.parent(theirs) != across or slot not in other.slots(theirs):
                continue
            _, records = other.holders(theirs, slot)
            shape = other.run.records[records[0]].shape
            if len(records) == 1 and len(shape) == ours[0].ndim and shape[1:] == ours[0].shape[1:]:
                parts.append(other.run.array(records[0]))
    except ElementsMissing:
        return ()
    whole = sum(a.shape[0] for a in ours)
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            if sum(p.shape[0] for p in parts[start:stop]) == whole:
                blocks = shards.part_order(ours, parts[start:stop], 0)
                if blocks:
                    return blocks
    return ()
