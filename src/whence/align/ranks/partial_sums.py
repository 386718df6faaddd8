"""Partial sums that nobody adds up, and replicas that differ: what ranks hold, and should not."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from whence.align.ranks import shards
from whence.align.ranks.groups import (
    Key,
    Place,
    RankGroups,
    Side,
    between,
    described,
    is_sum,
    joined_array,
)
from whence.align.ranks.shards import FITS, Level
from whence.errors import ElementsMissing
from whence.records.slots import is_input, is_output


def unreduced(at: RankGroups, side: Side) -> None:
    """Partial sums that nobody adds up: each rank goes on with its own, so the tensor is what one
    rank has.
    """
    sums = [
        p
        for p, layout in at.layouts.items()
        if p[0] == side.name and p in at.first and is_sum(layout)
    ]
    if not sums:
        return
    readers: dict[Place, list[Key]] = defaultdict(list)
    for key in side.groups:
        if all(call.leaf for call in side.groups[key].values()):
            for slot in side.slots(key):
                if is_input(slot):
                    readers[side.name, side.holders(key, slot)[1]].append(key)
    for place in sums:
        key, slot = at.first[place]
        if at.is_declared(side, key, slot) or _added_up(at, side, key, place, readers):
            _stand_in(at, side, key, place, readers)
            continue
        whole = tuple(
            Level("replicated", level.size) if level.how == "sum" else level
            for level in at.layouts[place]
        )
        at.layouts[place] = whole
        at.note_parted(place, whole)
        at.notes.append(
            f"{side.name}: each rank holds a partial sum of {side.name_of(key, slot)}, and no "
            "call adds them up"
        )


def _added_up(
    at: RankGroups, side: Side, key: Key, place: Place, readers: dict[Place, list[Key]]
) -> bool:
    """Does what is made of these summands come out whole on all ranks: of the modules that read
    them, else of the calls around?
    """
    for reader in readers.get(place, ()):
        for made in _outputs(at, side, reader, place):
            if not (
                _added_up(at, side, reader, made, readers)
                if is_sum(at.layouts[made])
                else _is_whole(at, made)
            ):
                return False
    if place in readers:
        return True
    above = side.parent(key)
    while above is not None:
        found = [p for p in _outputs(at, side, above, place) if not is_sum(at.layouts[p])]
        if found:
            return all(_is_whole(at, p) for p in found)
        above = side.parent(above)
    return False


def _stand_in(
    at: RankGroups, side: Side, key: Key, place: Place, readers: dict[Place, list[Key]]
) -> None:
    """The sum as the ranks made it, where that is the sum of these summands but for the rounding of
    adding them up.
    """
    if len(at.layouts[place]) != 1:
        return
    around: list[Place] = []
    above = side.parent(key)
    while above is not None and not around:
        around = _outputs(at, side, above, place)
        above = side.parent(above)
    made = [p for reader in readers.get(place, ()) for p in _outputs(at, side, reader, place)]
    run = side.run
    record, u = described(run, place[1][0])
    for other in (*made, *around):
        if at.parted.get(other) or {level.how for level in at.layouts[other]} != {"replicated"}:
            continue
        if run.records[other[1][0]].shape != record.shape:
            continue
        try:
            parts = np.stack([run.array(r).astype(np.float64) for r in place[1]])
            error = np.abs(run.array(other[1][0]).astype(np.float64) - parts.sum(0))
        except ElementsMissing:
            return
        if u and np.all(error <= len(parts) * u * np.abs(parts).sum(0)):
            at.stands[place] = other[1][0]
            return


def _outputs(at: RankGroups, side: Side, key: Key, but: Place) -> list[Place]:
    """What a call returns, but for one tensor."""
    found = [(side.name, side.holders(key, slot)[1]) for slot in side.slots(key) if is_output(slot)]
    return [p for p in found if p != but and p in at.layouts]


def _is_whole(at: RankGroups, place: Place) -> bool:
    """Have all ranks the same, or pieces of what the other side has?"""
    if any(level.how != "replicated" for level in at.layouts[place]) and place in at.other:
        name, records = at.other[place]
        try:
            mine, theirs = (
                [at.run(n).array(r) for r in ids] for n, ids in (place, (name, records))
            )
            return between(at.layouts[place], mine, at.layouts[name, records], theirs) <= FITS
        except (ElementsMissing, KeyError):
            return True
    return at.parted.get(place, 0.0) <= at.rounding(place)


def choose(at: RankGroups, side: Side) -> None:
    """Which rank stands for all where they should be alike: the first, or the one that is furthest
    off where only some are.
    """
    beyond = [
        p
        for p, apart in at.parted.items()
        if p[0] == side.name and apart > at.rounding(p) and p in at.first
    ]
    rounded = [
        (p, apart)
        for p, apart in at.parted.items()
        if p[0] == side.name and 0 < apart <= at.rounding(p)
    ]
    if rounded:
        largest = max(apart for _, apart in rounded)
        count = f"{len(rounded)} tensors" if len(rounded) > 1 else "1 tensor"
        at.notes.append(
            f"{side.name}: replicas of {count} are not bit-equal: they differ by up to "
            f"{largest:.2g}, as by rounding"
        )
    if not beyond:
        return

    def begun(place: Place) -> tuple[int, bool]:
        key, slot = at.first[place]
        return min(c.order for c in side.groups[key].values()), not is_input(slot)

    made = [p for p in beyond if not is_input(at.first[p][1])] or beyond
    leaves = [p for p in made if next(iter(side.groups[at.first[p][0]].values())).leaf] or made
    place = min(leaves, key=begun)
    key, slot = at.first[place]
    ranks, _ = side.holders(key, slot)
    errors = _from_other(at, place)
    if errors and max(errors) > 2 * min(errors):
        at.shown[side.name] = ranks[max(range(len(ranks)), key=errors.__getitem__)]
    else:
        at.shown[side.name] = ranks[0]
    try:
        size = max(
            shards.apart(side.run.array(r), side.run.array(place[1][0])) for r in place[1][1:]
        )
        apart = f" (rel_l2 {size:.2g})"
    except ElementsMissing:
        apart = ""
    at.notes.append(
        f"{side.name}: replicas differ from {side.name_of(key, slot)} on{apart}: rank "
        f"{at.shown[side.name]} stands for all"
    )


def _from_other(at: RankGroups, place: Place) -> list[float]:
    """How far each rank's replica is from its partner."""
    if place not in at.other:
        return []
    name, records = at.other[place]
    try:
        theirs = [at.run(name).array(r) for r in records]
        made = joined_array(at.layouts[name, records], theirs)
        return [shards.apart(at.run(place[0]).array(r), made) for r in place[1]]
    except (ElementsMissing, KeyError):
        return []
