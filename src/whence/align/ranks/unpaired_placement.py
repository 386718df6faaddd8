"""How tensors without a partner lie on the ranks: as their call's weight, or as fused parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from whence.align.layout.permutations import located
from whence.align.ranks import shards
from whence.align.ranks.groups import Key, RankGroups, Side
from whence.align.ranks.rank_tensors import RankTensor
from whence.align.ranks.shards import Layout, Level
from whence.errors import ElementsMissing
from whence.records.slots import is_output, is_param


def place_unpaired(
    groups: RankGroups, side: Side, other: Side, partners: Mapping[Key, Key]
) -> None:
    """Decide the layouts of a side's tensors without a partner: equal on all ranks, cut as their
    call's weight is, or not known. partners: the other side's groups of calls, by this side's.
    """
    for key in side.groups:
        for slot in sorted(side.slots(key), key=lambda s: side.weights_first(key, s)):
            tensor = RankTensor(side, key, slot)
            records, place = tensor.records, tensor.place
            if not records or place in groups.layouts:
                continue
            groups.first.setdefault(place, (key, slot))
            layout = _layout(groups, tensor, other, partners)
            if layout is None:
                groups.unplaced[place] = side.name_of(key, slot)
                layout = (Level("replicated", len(records)),) if len(records) > 1 else ()
            groups.layouts[place] = layout


def _layout(
    groups: RankGroups, tensor: RankTensor, other: Side, partners: Mapping[Key, Key]
) -> Layout | None:
    side, key, slot = tensor.where
    place, records, shapes = tensor.place, tensor.records, tensor.shapes
    n = len(records)
    if n == 1:
        return ()
    if groups.cannot_join(*tensor.where):
        return None
    if groups.is_declared(*tensor.where):
        return groups.options(*tensor.where, records, shapes)[0][0]
    if all(groups.distance_between(side.name, records[0], r) == 0.0 for r in records[1:]):
        return (Level("replicated", n),)
    names = (s for s in side.slots(key) if is_param(s) and "weight" in s)
    weight = RankTensor(side, key, next(names, ""))
    levels = groups.layouts.get(weight.place) if weight.slot else None
    cut = levels[0] if levels and len(levels) == 1 else None
    is_cut = cut is not None and cut.how == "cat" and cut.axis == 0
    if is_param(slot):
        extents = [s[:1] for s in weight.shapes] if weight.slot else []
        if slot != weight.slot and is_cut and extents == [s[:1] for s in shapes]:
            return levels
        blocks = fused_parts(tensor, other, partners) if len(set(shapes)) == 1 else ()
        if blocks or _is_part_of(tensor, other, partners):
            return (Level("cat", n, 0, blocks),)
        return None
    if is_output(slot) and cut is not None and is_cut and shapes[0]:
        return (Level("cat", n, len(shapes[0]) - 1, cut.blocks),)
    layout = (Level("replicated", n),)
    if groups.copies(place, layout):
        groups.note_differing(place, layout)
        return layout
    return None


def _siblings(tensor: RankTensor, other: Side, partners: Mapping[Key, Key]) -> Iterator[Key]:
    """Unpaired groups of the other side below the partner of the tensor's parent, with its slot."""
    parent = tensor.side.parent(tensor.key)
    across = partners.get(parent) if parent is not None else None
    used = set(partners.values())
    for key in other.groups if across is not None else ():
        if key not in used and other.parent(key) == across and tensor.slot in other.slots(key):
            yield key


def _is_part_of(tensor: RankTensor, other: Side, partners: Mapping[Key, Key]) -> bool:
    """Are the pieces' rows, rank by rank, in one parameter of the other side that fuses more?"""
    keys = list(_siblings(tensor, other, partners))
    if not keys:
        return False
    try:
        pieces = [tensor.side.run.array(r) for r in tensor.records]
        if any(a.ndim != 2 or a.shape[1] != pieces[0].shape[1] for a in pieces):
            return False
        rows = np.concatenate(pieces)
        for key in keys:
            records = RankTensor(other, key, tensor.slot).records
            places = located(rows, other.run.array(records[0])) if len(records) == 1 else None
            if places is not None:
                # pieces on other ranks than they belong to are a fault
                return bool(np.all(np.diff(places[places >= 0]) > 0))
    except ElementsMissing:
        pass
    return False


def fused_parts(
    tensor: RankTensor, other: Side, partners: Mapping[Key, Key]
) -> tuple[tuple[int, int, int], ...]:
    """The blocks of a fused parameter, told by free parameters under the same parent; or ()."""
    keys = list(_siblings(tensor, other, partners))
    if not keys or not tensor.shapes[0]:
        return ()
    keys.sort(key=lambda k: min(c.order for c in other.groups[k].values()))
    try:
        pieces = [tensor.side.run.array(r) for r in tensor.records]
        like = pieces[0]
        candidates = [RankTensor(other, key, tensor.slot) for key in keys]
        parts = [
            other.run.array(c.records[0])
            for c in candidates
            if len(c.records) == 1
            and len(c.shapes[0]) == like.ndim
            and c.shapes[0][1:] == like.shape[1:]
        ]
    except ElementsMissing:
        return ()
    whole = sum(a.shape[0] for a in pieces)
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            if sum(p.shape[0] for p in parts[start:stop]) == whole:
                blocks = shards.part_order(pieces, parts[start:stop], 0)
                if blocks:
                    return blocks
    return ()
