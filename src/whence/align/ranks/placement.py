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
from whence.align.ranks.combined_figures import combined_figures
from whence.align.ranks.groups import Key, Place, RankGroups, Side, between
from whence.align.ranks.shards import FITS, Layout, Level
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records.slots import is_output, is_param

# a layout is better than another when its distance is below this share of the other's
_CLEARLY = 0.5
# members of a family (layers.*.mlp) whose layout was confirmed settle the others of the same shape
_CONFIRMED = 2

LayoutPair = tuple[Layout, Layout]
# groups of calls that are paired, with their pairs of slots
GroupPair = tuple[Key, Key, tuple[tuple[str, str], ...]]


def place(groups: RankGroups) -> None:
    """Decide how every tensor of both sides lies: what is paired first, parameters before
    what is made with them.
    """
    reference, target = groups.sides
    paired = _paired_groups(groups)
    partners = {
        reference.name: {f[0]: f[1] for f in paired},
        target.name: {f[1]: f[0] for f in paired},
    }
    paired = [f for f in paired if not _is_part(groups, f, partners)]
    for key, target_key, slots in paired:
        for a, b in sorted(slots, key=lambda pair: reference.weights_first(key, pair[0])):
            _place(groups, (reference, key, a), (target, target_key, b))
    partners = {
        reference.name: {f[0]: f[1] for f in paired},
        target.name: {f[1]: f[0] for f in paired},
    }
    for side, other_side in ((reference, target), (target, reference)):
        if len(side.ranks) > 1:
            place_unpaired(groups, side, other_side, partners)


def _paired_groups(groups: RankGroups) -> list[GroupPair]:
    """Groups of calls that are paired, with their pairs of slots, in the order of the
    reference.
    """
    reference, target = groups.sides
    whole = combined_figures(reference, target), combined_figures(target, reference)
    pairs: dict[Key, GroupPair] = {}
    used: set[Key] = set()
    for a in reference.ranks:
        for b in target.ranks:
            is_open = any(
                a in ranks and key not in pairs for key, ranks in reference.groups.items()
            )
            target_is_open = any(
                b in ranks and key not in used for key, ranks in target.groups.items()
            )
            if not (is_open and target_is_open):
                continue
            view, target_view = reference.view(a, whole[0]), target.view(b, whole[1])
            for pair in plan(view, target_view).pairs:
                key, target_key = (
                    reference.key_of[reference.viewed[pair.reference].id],
                    target.key_of[target.viewed[pair.target].id],
                )
                if key not in pairs and target_key not in used:
                    pairs[key] = (
                        key,
                        target_key,
                        tuple((s.reference_slot, s.target_slot) for s in pair.slots),
                    )
                    used.add(target_key)
    order = {key: min(c.order for c in ranks.values()) for key, ranks in reference.groups.items()}
    return sorted(pairs.values(), key=lambda item: order[item[0]])


def _is_part(groups: RankGroups, pair: GroupPair, partners: dict[str, dict[Key, Key]]) -> bool:
    """Is one of two calls only a part of what the other fuses, of equal extents because that one
    lies on several ranks?
    """
    for i, side in enumerate(groups.sides):
        other_side = groups.sides[1 - i]
        for slots in pair[2]:
            slot = slots[i]
            _, records = side.holders(pair[i], slot)
            _, records_across = other_side.holders(pair[1 - i], slots[1 - i])
            shapes = {side.run.records[r].shape for r in records}
            if (
                not is_param(slot)
                or len(records) < 2
                or shapes != {other_side.run.records[r].shape for r in records_across}
            ):
                continue
            if any(len(s) != 2 for s in shapes) or any(
                groups.distance_between(side.name, records[0], r) == 0.0 for r in records[1:]
            ):
                continue
            without = {
                side.name: partners[side.name],
                other_side.name: {
                    k: v for k, v in partners[other_side.name].items() if k != pair[1 - i]
                },
            }
            if fused_parts(groups, side, other_side, pair[i], slot, (side.name, records), without):
                return True
    return False


def _place(
    groups: RankGroups, tensor: tuple[Side, Key, str], partner: tuple[Side, Key, str]
) -> None:
    """Decide the layouts of two tensors that are paired."""
    holders = [side.holders(key, slot) for side, key, slot in (tensor, partner)]
    places = [
        (side.name, records)
        for (side, _, _), (_, records) in zip((tensor, partner), holders, strict=True)
    ]
    if not all(records for _, records in holders) or all(
        place in groups.layouts for place in places
    ):
        return
    records = [
        [side.run.records[r] for r in ids]
        for (side, _, _), (_, ids) in zip((tensor, partner), holders, strict=True)
    ]
    shapes = [[r.shape for r in ids] for ids in records]
    if any(groups.cannot_join(*tensor_or_partner) for tensor_or_partner in (tensor, partner)):
        return
    for i, (_, key, slot) in enumerate((tensor, partner)):
        groups.first.setdefault(places[i], (key, slot))
        groups.partner.setdefault(places[i], places[1 - i])
    options = [
        [
            c
            for c in groups.options(side, key, slot, ids, shapes[i])
            if groups.layouts.get(places[i], c[0]) == c[0]
        ]
        for i, ((side, key, slot), (_, ids)) in enumerate(
            zip((tensor, partner), holders, strict=True)
        )
    ]
    combos = [(a, b, shards.fits(s, t)) for a, s in options[0] for b, t in options[1]]
    best = max((fit for _, _, fit in combos), default=0)
    pairs = [(a, b) for a, b, fit in combos if fit == best > 0]
    if not pairs:
        return
    if is_param(tensor[2]):
        pairs = [
            p for p in pairs if not any(level.how == "sum" for part in p for level in part)
        ] or pairs
    pairs = [p for p in pairs if all(groups.summable(places[i], p[i]) for i in (0, 1))] or pairs
    # Where both sides hold pieces, pieces put together along a wrong axis agree too: the simplest
    # layouts that agree are meant.
    pairs.sort(key=_complexity)
    family = (
        starred(tensor[1][4]),
        tensor[2],
        starred(partner[1][4]),
        partner[2],
        tuple(shapes[0]),
        tuple(shapes[1]),
    )
    picked = _pick(groups, pairs, places, shapes, family, (tensor, partner))
    for place, layout in zip(places, picked, strict=True):
        groups.layouts.setdefault(place, layout)
        groups.note_differing(place, groups.layouts[place])


def _pick(
    groups: RankGroups,
    pairs: list[LayoutPair],
    places: Sequence[Place],
    shapes: Sequence[Sequence[shards.Shape]],
    family: tuple[Any, ...],
    where: Sequence[tuple[Side, Key, str]],
) -> LayoutPair:
    """The pair of layouts whose joined elements are closest; what siblings were confirmed to have
    where that does not decide.
    """
    if all(
        groups.is_declared(*layout) or len(place[1]) == 1
        for layout, place in zip(where, places, strict=True)
    ):
        return pairs[0]
    if len(pairs) == 1 and all(level.how == "replicated" for part in pairs[0] for level in part):
        return pairs[0]
    votes = groups.families[family]
    settled, count = votes.most_common(1)[0] if votes else (pairs[0], 0)
    if (
        count >= _CONFIRMED
        and len(votes) == 1
        and not any(level.how in ("sum", "replicated") for p in pairs for s in p for level in s)
    ):
        return settled
    try:
        arrays = [[groups.run(name).array(r) for r in records] for name, records in places]
    except ElementsMissing:
        likely = (
            p
            for p in pairs
            if all(groups.copies(place, part) for place, part in zip(places, p, strict=True))
        )
        return settled if votes else next(likely, settled)
    tried: list[tuple[float, LayoutPair]] = []
    for proposed, proposed_across in pairs:
        for layout in shards.orders(proposed, shapes[0]):
            tried += [
                (between(layout, arrays[0], layout_across, arrays[1]), (layout, layout_across))
                for layout_across in shards.orders(proposed_across, shapes[1])
            ]
    if is_param(where[0][2]) and all(error > 0 for error, _ in tried):
        tried += _by_parts(groups, pairs, arrays)
    if is_output(where[0][2]) or is_param(where[0][2]):
        tried += [
            (between(p[0], arrays[0], p[1], arrays[1]), p)
            for p in _as_parameters(groups, pairs, where)
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
    groups: RankGroups, pairs: Sequence[LayoutPair], arrays: Sequence[Sequence[Array]]
) -> list[tuple[float, LayoutPair]]:
    """Parameters whose parts were cut one by one."""
    out: list[tuple[float, LayoutPair]] = []
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
                    layouts = (cut, pair[1]) if i == 0 else (pair[0], cut)
                    out.append((between(layouts[0], arrays[0], layouts[1], arrays[1]), layouts))
    return out


def _as_parameters(
    groups: RankGroups, pairs: Sequence[LayoutPair], where: Sequence[tuple[Side, Key, str]]
) -> Iterator[Any]:
    """Outputs, and a bias, in parts as their call's weight is."""
    for pair in pairs:
        for i, (side, key, slot) in enumerate(where):
            blocks = groups.blocks_of(side, key)
            if (
                blocks
                and len(pair[i]) == 1
                and pair[i][0].how == "cat"
                and (pair[i][0].axis == 0 or not is_param(slot))
            ):
                cut = (Level("cat", pair[i][0].size, pair[i][0].axis, blocks),)
                yield (cut, pair[1]) if i == 0 else (pair[0], cut)


def _complexity(pair: LayoutPair) -> tuple[int, ...]:
    levels = [level.how for part in pair for level in part]
    return levels.count("sum"), len(levels), len(levels) - levels.count("replicated")


def place_unpaired(
    groups: RankGroups, side: Side, other_side: Side, partners: dict[str, dict[Key, Key]]
) -> None:
    """Layouts of what no tensor of the other side faces: equal on all ranks, cut as its call's
    weight is, or not known.
    """
    for key in side.groups:
        for slot in sorted(side.slots(key), key=lambda s: side.weights_first(key, s)):
            _, records = side.holders(key, slot)
            place = (side.name, records)
            if not records or place in groups.layouts:
                continue
            groups.first.setdefault(place, (key, slot))
            shapes = [side.run.records[r].shape for r in records]
            layout = _unpaired_layout(groups, side, other_side, key, slot, place, shapes, partners)
            if layout is None:
                groups.unplaced[place] = side.name_of(key, slot)
                layout = (Level("replicated", len(records)),) if len(records) > 1 else ()
            groups.layouts[place] = layout


def _unpaired_layout(
    groups: RankGroups,
    side: Side,
    other_side: Side,
    key: Key,
    slot: str,
    place: Place,
    shapes: Sequence[shards.Shape],
    partners: dict[str, dict[Key, Key]],
) -> Layout | None:
    n = len(place[1])
    if n == 1:
        return ()
    if groups.cannot_join(side, key, slot):
        return None
    if groups.is_declared(side, key, slot):
        return groups.options(side, key, slot, place[1], shapes)[0][0]
    if all(groups.distance_between(side.name, place[1][0], r) == 0.0 for r in place[1][1:]):
        return (Level("replicated", n),)
    weight = next((s for s in side.slots(key) if is_param(s) and "weight" in s), "")
    weight_layout = (
        groups.layouts.get((side.name, side.holders(key, weight)[1])) if weight else None
    )
    if is_param(slot):
        extents = (
            [side.run.records[r].shape[:1] for r in side.holders(key, weight)[1]] if weight else []
        )
        if (
            slot != weight
            and weight_layout
            and len(weight_layout) == 1
            and weight_layout[0].how == "cat"
            and weight_layout[0].axis == 0
            and extents == [s[:1] for s in shapes]
        ):
            return weight_layout
        blocks = (
            fused_parts(groups, side, other_side, key, slot, place, partners)
            if len(set(shapes)) == 1
            else ()
        )
        if blocks:
            return (Level("cat", n, 0, blocks),)
        return (
            (Level("cat", n, 0),)
            if _is_part_of(groups, side, other_side, key, slot, place, partners)
            else None
        )
    if (
        is_output(slot)
        and weight_layout
        and len(weight_layout) == 1
        and weight_layout[0].how == "cat"
        and weight_layout[0].axis == 0
        and shapes[0]
    ):
        return (Level("cat", n, len(shapes[0]) - 1, weight_layout[0].blocks),)
    layout = (Level("replicated", n),)
    if groups.copies(place, layout):
        groups.note_differing(place, layout)
        return layout
    return None


def _is_part_of(
    groups: RankGroups,
    side: Side,
    other_side: Side,
    key: Key,
    slot: str,
    place: Place,
    partners: dict[str, dict[Key, Key]],
) -> bool:
    """Are the rows of the ranks' pieces, one rank after the other, in one parameter of the other
    side that fuses more?
    """
    above = side.parent(key)
    across = partners[side.name].get(above) if above is not None else None
    if across is None:
        return False
    used = set(partners[other_side.name])
    try:
        pieces = [side.run.array(r) for r in place[1]]
        if any(a.ndim != 2 or a.shape[1] != pieces[0].shape[1] for a in pieces):
            return False
        rows = np.concatenate(pieces)
        for candidate in (
            k
            for k in other_side.groups
            if k not in used and other_side.parent(k) == across and slot in other_side.slots(k)
        ):
            _, records = other_side.holders(candidate, slot)
            if (
                len(records) == 1
                and (rows_across := located(rows, other_side.run.array(records[0]))) is not None
            ):
                recognised = rows_across[rows_across >= 0]
                # pieces on other ranks than they belong to are a fault
                return bool(np.all(np.diff(recognised) > 0))
    except ElementsMissing:
        pass
    return False


def fused_parts(
    groups: RankGroups,
    side: Side,
    other_side: Side,
    key: Key,
    slot: str,
    place: Place,
    partners: dict[str, dict[Key, Key]],
) -> tuple[tuple[int, int, int], ...]:
    """The parts of a fused parameter (q, k, v in one), found in the parameters of the other side's
    calls under the same parent.
    """
    above = side.parent(key)
    across = partners[side.name].get(above) if above is not None else None
    if across is None or not side.run.records[place[1][0]].shape:
        return ()
    used = set(partners[other_side.name])
    parts: list[Array] = []
    try:
        pieces = [side.run.array(r) for r in place[1]]
        for candidate in sorted(
            other_side.groups, key=lambda k: min(c.order for c in other_side.groups[k].values())
        ):
            if (
                candidate in used
                or other_side.parent(candidate) != across
                or slot not in other_side.slots(candidate)
            ):
                continue
            _, records = other_side.holders(candidate, slot)
            shape = other_side.run.records[records[0]].shape
            if (
                len(records) == 1
                and len(shape) == pieces[0].ndim
                and shape[1:] == pieces[0].shape[1:]
            ):
                parts.append(other_side.run.array(records[0]))
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
