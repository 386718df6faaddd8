"""Finds partial sums that nobody adds up, and replicas that differ between ranks."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from whence.align.ranks import shards
from whence.align.ranks.gradients import PartialGradients, done
from whence.align.ranks.groups import (
    Key,
    Place,
    RankGroups,
    Side,
    between,
    is_sum,
    joined_array,
    record_and_roundoff,
)
from whence.align.ranks.shards import FITS
from whence.errors import ElementsMissing
from whence.records.slots import is_input, is_output


def unreduced(groups: RankGroups, side: Side) -> None:
    """Note partial sums that nobody adds up: the tensor then counts as what one rank has."""
    sums = [
        p
        for p, layout in groups.layouts.items()
        if p[0] == side.name and p in groups.first and is_sum(layout)
    ]
    if not sums:
        return
    readers: dict[Place, list[Key]] = defaultdict(list)
    for key in side.groups:
        if all(call.leaf for call in side.groups[key].values()):
            for tensor in side.tensors(key):
                if is_input(tensor.slot):
                    readers[tensor.place].append(key)
    backward = PartialGradients(groups, side)
    for place in sums:
        tensor = groups.first[place]
        if tensor.is_loss or (tensor.is_gradient and backward.is_reduced(place)):
            continue  # calls of their own show what happens to these
        if not tensor.is_gradient and (
            groups.is_declared(tensor) or _added_up(groups, side, tensor.key, place, readers)
        ):
            _stand_in(groups, side, tensor.key, place, readers)
            continue
        whole = groups.layouts[place] = done(groups.layouts[place])
        groups.note_differing(place, whole)
        groups.notes.append(
            f"{side.name}: each rank holds a partial sum of {tensor}, and no call adds them up"
        )


def _added_up(
    groups: RankGroups, side: Side, key: Key, place: Place, readers: dict[Place, list[Key]]
) -> bool:
    """Whether the calls that read these summands, or else the enclosing calls, return whole
    tensors.
    """
    for reader in readers.get(place, ()):
        for output in _outputs(groups, side, reader, place):
            if not (
                _added_up(groups, side, reader, output, readers)
                if is_sum(groups.layouts[output])
                else _is_whole(groups, output)
            ):
                return False
    if place in readers:
        return True
    above = side.parent(key)
    while above is not None:
        outputs = [p for p in _outputs(groups, side, above, place) if not is_sum(groups.layouts[p])]
        if outputs:
            return all(_is_whole(groups, p) for p in outputs)
        above = side.parent(above)
    return False


def _stand_in(
    groups: RankGroups, side: Side, key: Key, place: Place, readers: dict[Place, list[Key]]
) -> None:
    """Use the sum that the ranks computed, if it equals the sum of these parts up to rounding."""
    if len(groups.layouts[place]) != 1:
        return
    around: list[Place] = []
    above = side.parent(key)
    while above is not None and not around:
        around = _outputs(groups, side, above, place)
        above = side.parent(above)
    outputs = [
        p for reader in readers.get(place, ()) for p in _outputs(groups, side, reader, place)
    ]
    run = side.run
    record, u = record_and_roundoff(run, place[1][0])
    for candidate in (*outputs, *around):
        if groups.differing.get(candidate) or {
            level.how for level in groups.layouts[candidate]
        } != {"replicated"}:
            continue
        if run.records[candidate[1][0]].shape != record.shape:
            continue
        try:
            parts = np.stack([run.array(r).astype(np.float64) for r in place[1]])
            error = np.abs(run.array(candidate[1][0]).astype(np.float64) - parts.sum(0))
        except ElementsMissing:
            return
        if u and np.all(error <= len(parts) * u * np.abs(parts).sum(0)):
            groups.sum_of[place] = candidate[1][0]
            return


def _outputs(groups: RankGroups, side: Side, key: Key, but: Place) -> list[Place]:
    """The outputs of a call, without one tensor."""
    places = [tensor.place for tensor in side.tensors(key) if is_output(tensor.slot)]
    return [p for p in places if p != but and p in groups.layouts]


def _is_whole(groups: RankGroups, place: Place) -> bool:
    """Whether all ranks have the same tensor, or pieces of the other side's tensor."""
    if (
        any(level.how != "replicated" for level in groups.layouts[place])
        and place in groups.partner
    ):
        name, records = groups.partner[place]
        try:
            arrays, arrays_across = (
                [groups.run(n).array(r) for r in ids] for n, ids in (place, (name, records))
            )
            return (
                between(groups.layouts[place], arrays, groups.layouts[name, records], arrays_across)
                <= FITS
            )
        except (ElementsMissing, KeyError):
            return True
    return groups.differing.get(place, 0.0) <= groups.rounding(place)


def choose(groups: RankGroups, side: Side) -> None:
    """Choose the rank whose replicas are used for all: the first, or the one furthest from its
    partner.
    """
    beyond = [
        p
        for p, difference in groups.differing.items()
        if p[0] == side.name and difference > groups.rounding(p) and p in groups.first
    ]
    rounded = [
        (p, difference)
        for p, difference in groups.differing.items()
        if p[0] == side.name and 0 < difference <= groups.rounding(p)
    ]
    if rounded:
        largest = max(difference for _, difference in rounded)
        count = f"{len(rounded)} tensors" if len(rounded) > 1 else "1 tensor"
        groups.notes.append(
            f"{side.name}: replicas of {count} are not bit-equal: they differ by up to "
            f"{largest:.2g}, as by rounding"
        )
    if not beyond:
        return

    def begun(place: Place) -> tuple[int, bool]:
        tensor = groups.first[place]
        return min(c.order for c in side.groups[tensor.key].values()), not is_input(tensor.slot)

    outputs = [p for p in beyond if not is_input(groups.first[p].slot)] or beyond
    leaves = [
        p for p in outputs if next(iter(side.groups[groups.first[p].key].values())).leaf
    ] or outputs
    place = min(leaves, key=begun)
    ranks = groups.first[place].ranks
    errors = _replica_distances(groups, place)
    if errors and max(errors) > 2 * min(errors):
        groups.shown_rank[side.name] = ranks[max(range(len(ranks)), key=errors.__getitem__)]
    else:
        groups.shown_rank[side.name] = ranks[0]
    try:
        size = max(
            shards.distance_joined(side.run.array(r), side.run.array(place[1][0]))
            for r in place[1][1:]
        )
        difference = f" (rel_l2 {size:.2g})"
    except ElementsMissing:
        difference = ""
    groups.notes.append(
        f"{side.name}: replicas differ from {groups.first[place]} on{difference}: rank "
        f"{groups.shown_rank[side.name]} is used for all"
    )


def _replica_distances(groups: RankGroups, place: Place) -> list[float]:
    """Distance of each rank's replica from its partner."""
    if place not in groups.partner:
        return []
    name, records = groups.partner[place]
    try:
        arrays = [groups.run(name).array(r) for r in records]
        whole = joined_array(groups.layouts[name, records], arrays)
        return [shards.distance_joined(groups.run(place[0]).array(r), whole) for r in place[1]]
    except (ElementsMissing, KeyError):
        return []
