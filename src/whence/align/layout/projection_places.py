"""Finds where the channels of each part of a fused call lie in the whole call, by weights or by
outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from whence.align.layout import permutations
from whence.align.layout.distances import clear_best, distance
from whence.align.layout.projection_groups import Group, extent, weight
from whence.align.plan_editor import PlanEditor
from whence.dtypes import Array

Places = tuple[tuple[int, ...], ...]  # for each part: the indices of its channels in the whole


def by_weights(editor: PlanEditor, group: Group) -> tuple[Places, bool, int] | None:
    """(indices of the parts' rows in the whole's weight, whether the weight is transposed, number
    of rows found); None where weights do not tell.
    """
    side = group.parts_side
    whole = editor.array(group.whole_side, weight(editor, group.whole_side, group.whole))
    parts = [editor.array(side, weight(editor, side, c)) for c in group.parts]
    if whole is None or any(p is None for p in parts):
        return None
    extents = [extent(editor, side, c) for c in group.parts]
    best: tuple[Places, bool, int] | None = None
    for turned_parts, turned in itertools.product((False, True), repeat=2):
        source = whole.T if turned else whole
        weights = [p.T if turned_parts else p for p in parts if p is not None]
        if (
            [len(p) for p in weights] != extents
            or len(source) != sum(extents)
            or any(p.shape[1] != source.shape[1] for p in weights)
        ):
            continue
        orders = [permutations.located(p, source) for p in weights]
        rows = sum(int(np.count_nonzero(f >= 0)) for f in orders if f is not None)
        places = _filled(orders, extents)
        if places is None or any(
            f is None and _is_elsewhere(editor, group, p)
            for f, p in zip(orders, weights, strict=True)
        ):
            continue
        if best is None or rows > best[2]:
            best = places, turned != turned_parts, rows
    return best


def _is_elsewhere(editor: PlanEditor, group: Group, part: Array) -> bool:
    """Whether the rows of a part occur in another call beside the whole, so that it is not a part
    of it.
    """
    side = group.whole_side
    for k in editor.kids(side).get(group.whole.parent, ()):
        if k != group.whole.id:
            candidate = editor.array(side, weight(editor, side, editor.run(side).calls[k]))
            if candidate is not None and any(
                permutations.located(part, t) is not None for t in (candidate, candidate.T)
            ):
                return True
    return False


def _filled(located: Sequence[permutations.Order | None], extents: Sequence[int]) -> Places | None:
    """The indices of all parts' channels; one part that was not found gets the indices that the
    others leave. None where they do not cover the whole exactly once.
    """
    total = sum(extents)
    orders = [permutations.completed(f, total) if f is not None else None for f in located]
    missing = [i for i, order in enumerate(orders) if order is None]
    if len(missing) > 1 or len(missing) == len(orders):
        return None
    used = {int(i) for order in orders if order is not None for i in order}
    if missing:
        orders[missing[0]] = np.array([i for i in range(total) if i not in used], np.int64)
    places = tuple(tuple(int(i) for i in order) for order in orders if order is not None)
    is_partition = len({i for p in places for i in p}) == total
    return places if is_partition and [len(p) for p in places] == list(extents) else None


def by_outputs(editor: PlanEditor, group: Group) -> Places | None:
    """The indices of the parts' channels by their outputs: one part after another, or interleaved
    in blocks of heads.
    """
    side = group.parts_side
    whole = editor.array(group.whole_side, group.whole.slots("output")[0].record)
    parts = [editor.array(side, c.slots("output")[0].record) for c in group.parts]
    if whole is None or any(p is None for p in parts):
        return None
    rows = whole.reshape(-1, whole.shape[-1])
    outputs = [p.reshape(-1, p.shape[-1]) for p in parts if p is not None]
    if any(p.dtype.kind in "iub" or len(p) != len(rows) for p in outputs):
        return None
    joined = np.concatenate([p.astype(np.float64) for p in outputs], -1)
    extents = [extent(editor, side, c) for c in group.parts]
    candidates = list(dict.fromkeys(_arrangements(extents)))
    best = clear_best([distance(joined, rows[:, np.concatenate(p)]) for p in candidates])
    return candidates[best] if best is not None else None


def _arrangements(extents: Sequence[int]) -> Iterator[Places]:
    """Candidate indices for parts of these extents: the parts in any order, in any number of equal
    groups.
    """
    for groups in range(1, math.gcd(*extents) + 1):
        if any(n % groups for n in extents):
            continue
        for order in itertools.permutations(range(len(extents))):
            step = sum(extents) // groups
            offset = 0
            places: dict[int, tuple[int, ...]] = {}
            for part in order:
                length = extents[part] // groups
                places[part] = tuple(
                    g * step + offset + i for g in range(groups) for i in range(length)
                )
                offset += length
            yield tuple(places[i] for i in range(len(extents)))
