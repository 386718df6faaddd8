"""How tensors that are paired lie on the ranks: shapes propose, what siblings have and
elements decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from whence.align.calls.match import plan
from whence.align.layout.permutations import located
from whence.align.module_names import starred
from whence.align.ranks import shards
from whence.align.ranks.combined_figures import together
from whence.align.ranks.groups import Key, Place, RankGroups, Side, between
from whence.align.ranks.shards import FITS, Layout, Level
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records.slots import is_output, is_param

# a layout is better than another when its distance is below this share of the other's
_CLEARLY = 0.5
# members of a family (layers.*.mlp) whose layout was confirmed settle the others of the same shape
_CONFIRMED = 2

Both = tuple[Layout, Layout]
# groups of calls that are paired, with their pairs of slots
Facing = tuple[Key, Key, tuple[tuple[str, str], ...]]


def place(at: RankGroups) -> None:
    """Decide how every tensor of both sides lies: what is paired first, parameters before
    what is made with them.
    """
    left, right = at.sides
    facing = _facing(at)
    faced = {left.name: {f[0]: f[1] for f in facing}, right.name: {f[1]: f[0] for f in facing}}
    facing = [f for f in facing if not _is_part(at, f, faced)]
    for mine, theirs, slots in facing:
        for a, b in sorted(slots, key=lambda pair: left.weights_first(mine, pair[0])):
            _place(at, (left, mine, a), (right, theirs, b))
    faced = {left.name: {f[0]: f[1] for f in facing}, right.name: {f[1]: f[0] for f in facing}}
    for side, other in ((left, right), (right, left)):
        if len(side.ranks) > 1:
            place_alone(at, side, other, faced)


def _facing(at: RankGroups) -> list[Facing]:
    """Groups of calls that are paired, with their pairs of slots, in the order of the
    reference.
    """
    left, right = at.sides
    whole = together(left, right), together(right, left)
    found: dict[Key, Facing] = {}
    seen: set[Key] = set()
    for a in left.ranks:
        for b in right.ranks:
            open_left = any(a in ranks and key not in found for key, ranks in left.groups.items())
            open_right = any(b in ranks and key not in seen for key, ranks in right.groups.items())
            if not (open_left and open_right):
                continue
            one, two = left.view(a, whole[0]), right.view(b, whole[1])
            for pair in plan(one, two).pairs:
                mine, theirs = (
                    left.key_of[left.viewed[pair.reference].id],
                    right.key_of[right.viewed[pair.target].id],
                )
                if mine not in found and theirs not in seen:
                    found[mine] = (
                        mine,
                        theirs,
                        tuple((s.reference_slot, s.target_slot) for s in pair.slots),
                    )
                    seen.add(theirs)
    order = {key: min(c.order for c in ranks.values()) for key, ranks in left.groups.items()}
    return sorted(found.values(), key=lambda item: order[item[0]])


def _is_part(at: RankGroups, pair: Facing, faced: dict[str, dict[Key, Key]]) -> bool:
    """Is one of two calls only a part of what the other fuses, of equal extents because that one
    lies on several ranks?
    """
    for i, side in enumerate(at.sides):
        other = at.sides[1 - i]
        for slots in pair[2]:
            slot = slots[i]
            _, records = side.holders(pair[i], slot)
            _, theirs = other.holders(pair[1 - i], slots[1 - i])
            shapes = {side.run.records[r].shape for r in records}
            if (
                not is_param(slot)
                or len(records) < 2
                or shapes != {other.run.records[r].shape for r in theirs}
            ):
                continue
            if any(len(s) != 2 for s in shapes) or any(
                at.apart(side.name, records[0], r) == 0.0 for r in records[1:]
            ):
                continue
            without = {
                side.name: faced[side.name],
                other.name: {k: v for k, v in faced[other.name].items() if k != pair[1 - i]},
            }
            if fused_parts(at, side, other, pair[i], slot, (side.name, records), without):
                return True
    return False


def _place(at: RankGroups, one: tuple[Side, Key, str], two: tuple[Side, Key, str]) -> None:
    """Decide the layouts of two tensors that are paired."""
    held = [side.holders(key, slot) for side, key, slot in (one, two)]
    places = [
        (side.name, records) for (side, _, _), (_, records) in zip((one, two), held, strict=True)
    ]
    if not all(records for _, records in held) or all(place in at.layouts for place in places):
        return
    records = [
        [side.run.records[r] for r in found]
        for (side, _, _), (_, found) in zip((one, two), held, strict=True)
    ]
    shapes = [[r.shape for r in found] for found in records]
    if any(at.cannot_join(*seen) for seen in (one, two)):
        return
    for i, (_, key, slot) in enumerate((one, two)):
        at.first.setdefault(places[i], (key, slot))
        at.other.setdefault(places[i], places[1 - i])
    options = [
        [
            c
            for c in at.options(side, key, slot, found, shapes[i])
            if at.layouts.get(places[i], c[0]) == c[0]
        ]
        for i, ((side, key, slot), (_, found)) in enumerate(zip((one, two), held, strict=True))
    ]
    combos = [(a, b, shards.fits(s, t)) for a, s in options[0] for b, t in options[1]]
    best = max((fit for _, _, fit in combos), default=0)
    pairs = [(a, b) for a, b, fit in combos if fit == best > 0]
    if not pairs:
        return
    if is_param(one[2]):
        pairs = [
            p for p in pairs if not any(level.how == "sum" for part in p for level in part)
        ] or pairs
    pairs = [p for p in pairs if all(at.summable(places[i], p[i]) for i in (0, 1))] or pairs
    # Where both sides hold pieces, pieces put together along a wrong axis agree too: the simplest
    # layouts that agree are meant.
    pairs.sort(key=_complexity)
    family = (
        starred(one[1][4]),
        one[2],
        starred(two[1][4]),
        two[2],
        tuple(shapes[0]),
        tuple(shapes[1]),
    )
    picked = _pick(at, pairs, places, shapes, family, (one, two))
    for place, layout in zip(places, picked, strict=True):
        at.layouts.setdefault(place, layout)
        at.note_parted(place, at.layouts[place])


def _pick(
    at: RankGroups,
    pairs: list[Both],
    places: Sequence[Place],
    shapes: Sequence[Sequence[shards.Shape]],
    family: tuple[Any, ...],
    where: Sequence[tuple[Side, Key, str]],
) -> Both:
    """The pair of layouts whose joined elements are closest; what siblings were confirmed to have
    where that does not decide.
    """
    if all(
        at.is_declared(*one) or len(place[1]) == 1 for one, place in zip(where, places, strict=True)
    ):
        return pairs[0]
    if len(pairs) == 1 and all(level.how == "replicated" for part in pairs[0] for level in part):
        return pairs[0]
    votes = at.families[family]
    settled, count = votes.most_common(1)[0] if votes else (pairs[0], 0)
    if (
        count >= _CONFIRMED
        and len(votes) == 1
        and not any(level.how in ("sum", "replicated") for p in pairs for s in p for level in s)
    ):
        return settled
    try:
        arrays = [[at.run(name).array(r) for r in records] for name, records in places]
    except ElementsMissing:
        likely = (
            p
            for p in pairs
            if all(at.copies(place, part) for place, part in zip(places, p, strict=True))
        )
        return settled if votes else next(likely, settled)
    tried: list[tuple[float, Both]] = []
    for left, right in pairs:
        for one in shards.orders(left, shapes[0]):
            tried += [
                (between(one, arrays[0], two, arrays[1]), (one, two))
                for two in shards.orders(right, shapes[1])
            ]
    if is_param(where[0][2]) and all(error > 0 for error, _ in tried):
        tried += _by_parts(at, pairs, arrays)
    if is_output(where[0][2]) or is_param(where[0][2]):
        tried += [
            (between(p[0], arrays[0], p[1], arrays[1]), p) for p in _as_parameters(at, pairs, where)
        ]
    best = tried[0]
    for item in tried[1:]:
        if item[0] < _CLEARLY * best[0]:
            best = item
    if best[0] <= FITS:
        votes[best[1]] += 1
        return best[1]
    return settled


def _by_parts(
    at: RankGroups, pairs: Sequence[Both], arrays: Sequence[Sequence[Array]]
) -> list[tuple[float, Both]]:
    """Parameters whose parts were cut one by one."""
    found: list[tuple[float, Both]] = []
    for pair in pairs:
        for i in (0, 1):
            if (
                len(pair[i]) == 1
                and pair[i][0].how == "cat"
                and not pair[1 - i]
                and len({a.shape for a in arrays[i]}) == 1
            ):
                axis = pair[i][0].axis
                if arrays[1 - i][0].ndim != arrays[i][0].ndim:
                    continue
                blocks = shards.part_order(arrays[i], arrays[1 - i], axis)
                if blocks:
                    cut = (Level("cat", len(arrays[i]), axis, blocks),)
                    made = (cut, pair[1]) if i == 0 else (pair[0], cut)
                    found.append((between(made[0], arrays[0], made[1], arrays[1]), made))
    return found


def _as_parameters(
    at: RankGroups, pairs: Sequence[Both], where: Sequence[tuple[Side, Key, str]]
) -> Iterator[Any]:
    """Outputs, and a bias, in parts as their call's weight is."""
    for pair in pairs:
        for i, (side, key, slot) in enumerate(where):
            blocks = at.blocks_of(side, key)
            if (
                blocks
                and len(pair[i]) == 1
                and pair[i][0].how == "cat"
                and (pair[i][0].axis == 0 or not is_param(slot))
            ):
                cut = (Level("cat", pair[i][0].size, pair[i][0].axis, blocks),)
                yield (cut, pair[1]) if i == 0 else (pair[0], cut)


def _complexity(pair: Both) -> tuple[int, ...]:
    levels = [level.how for part in pair for level in part]
    return levels.count("sum"), len(levels), len(levels) - levels.count("replicated")


def place_alone(at: RankGroups, side: Side, other: Side, faced: dict[str, dict[Key, Key]]) -> None:
    """Layouts of what no tensor of the other side faces: equal on all ranks, cut as its call's
    weight is, or not known.
    """
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
    at: RankGroups,
    side: Side,
    other: Side,
    key: Key,
    slot: str,
    place: Place,
    shapes: Sequence[shards.Shape],
    faced: dict[str, dict[Key, Key]],
) -> Layout | None:
    n = len(place[1])
    if n == 1:
        return ()
    if at.cannot_join(side, key, slot):
        return None
    if at.is_declared(side, key, slot):
        return at.options(side, key, slot, place[1], shapes)[0][0]
    if all(at.apart(side.name, place[1][0], r) == 0.0 for r in place[1][1:]):
        return (Level("replicated", n),)
    weight = next((s for s in side.slots(key) if is_param(s) and "weight" in s), "")
    lies = at.layouts.get((side.name, side.holders(key, weight)[1])) if weight else None
    if is_param(slot):
        extents = (
            [side.run.records[r].shape[:1] for r in side.holders(key, weight)[1]] if weight else []
        )
        if (
            slot != weight
            and lies
            and len(lies) == 1
            and lies[0].how == "cat"
            and lies[0].axis == 0
            and extents == [s[:1] for s in shapes]
        ):
            return lies
        blocks = (
            fused_parts(at, side, other, key, slot, place, faced) if len(set(shapes)) == 1 else ()
        )
        if blocks:
            return (Level("cat", n, 0, blocks),)
        return (
            (Level("cat", n, 0),) if _is_part_of(at, side, other, key, slot, place, faced) else None
        )
    if (
        is_output(slot)
        and lies
        and len(lies) == 1
        and lies[0].how == "cat"
        and lies[0].axis == 0
        and shapes[0]
    ):
        return (Level("cat", n, len(shapes[0]) - 1, lies[0].blocks),)
    layout = (Level("replicated", n),)
    if at.copies(place, layout):
        at.note_parted(place, layout)
        return layout
    return None


def _is_part_of(
    at: RankGroups,
    side: Side,
    other: Side,
    key: Key,
    slot: str,
    place: Place,
    faced: dict[str, dict[Key, Key]],
) -> bool:
    """Are the rows of the ranks' pieces, one rank after the other, in one parameter of the other
    side that fuses more?
    """
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
        for theirs in (
            k
            for k in other.groups
            if k not in taken and other.parent(k) == across and slot in other.slots(k)
        ):
            _, records = other.holders(theirs, slot)
            if (
                len(records) == 1
                and (found := located(rows, other.run.array(records[0]))) is not None
            ):
                known = found[found >= 0]
                # pieces on other ranks than they belong to are a fault
                return bool(np.all(np.diff(known) > 0))
    except ElementsMissing:
        pass
    return False


def fused_parts(
    at: RankGroups,
    side: Side,
    other: Side,
    key: Key,
    slot: str,
    place: Place,
    faced: dict[str, dict[Key, Key]],
) -> tuple[tuple[int, int, int], ...]:
    """The parts of a fused parameter (q, k, v in one), found in the parameters of the other side's
    calls under the same parent.
    """
    above = side.parent(key)
    across = faced[side.name].get(above) if above is not None else None
    if across is None or not side.run.records[place[1][0]].shape:
        return ()
    taken = set(faced[other.name])
    parts: list[Array] = []
    try:
        ours = [side.run.array(r) for r in place[1]]
        for theirs in sorted(
            other.groups, key=lambda k: min(c.order for c in other.groups[k].values())
        ):
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
