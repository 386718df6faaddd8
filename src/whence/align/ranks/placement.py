"""How paired tensors lie on the ranks: shapes propose, siblings and elements decide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from whence.align.calls.match import plan
from whence.align.ranks import gradients, shards
from whence.align.ranks.combined_figures import combined_figures
from whence.align.ranks.groups import Key, RankGroups, between
from whence.align.ranks.rank_tensors import RankTensor
from whence.align.ranks.shards import FITS, Layout, Level
from whence.align.ranks.unpaired_placement import fused_parts, place_unpaired
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records.slots import is_output, is_param

# a layout is better than another when its distance is below this share of the other's
_CLEARLY = 0.5
# members of a family (layers.*.mlp) whose layout was confirmed settle the others of the same shape
_CONFIRMED = 2

LayoutPair = tuple[Layout, Layout]
TensorPair = tuple[RankTensor, RankTensor]
# groups of calls that are paired, with their pairs of slots
GroupPair = tuple[Key, Key, tuple[tuple[str, str], ...]]


def place(groups: RankGroups) -> None:
    """Decide the layout of every tensor: paired ones first, parameters before what they make."""
    reference, target = groups.sides
    paired = _paired_groups(groups)
    partners = {a: b for a, b, _ in paired}, {b: a for a, b, _ in paired}
    paired = [pair for pair in paired if not _is_part(groups, pair, partners)]
    for key, target_key, slots in paired:
        for a, b in sorted(slots, key=lambda pair: reference.weights_first(key, pair[0])):
            _place(groups, (RankTensor(reference, key, a), RankTensor(target, target_key, b)))
    if len(reference.ranks) > 1:
        place_unpaired(groups, reference, target, {a: b for a, b, _ in paired})
    if len(target.ranks) > 1:
        place_unpaired(groups, target, reference, {b: a for a, b, _ in paired})


def _paired_groups(groups: RankGroups) -> list[GroupPair]:
    """Paired groups of calls with their pairs of slots, in the order of the reference."""
    reference, target = groups.sides
    whole = combined_figures(reference, target), combined_figures(target, reference)
    pairs: dict[Key, GroupPair] = {}
    used: set[Key] = set()
    for a in reference.ranks:
        for b in target.ranks:
            is_open = any(a in ranks and k not in pairs for k, ranks in reference.groups.items())
            if not is_open or all(b not in r or k in used for k, r in target.groups.items()):
                continue
            view, target_view = reference.view(a, whole[0]), target.view(b, whole[1])
            for pair in plan(view, target_view).pairs:
                key = reference.key_of[reference.viewed[pair.reference].id]
                target_key = target.key_of[target.viewed[pair.target].id]
                if key not in pairs and target_key not in used:
                    slots = tuple((s.reference_slot, s.target_slot) for s in pair.slots)
                    pairs[key] = (key, target_key, slots)
                    used.add(target_key)
    order = {key: min(c.order for c in ranks.values()) for key, ranks in reference.groups.items()}
    return sorted(pairs.values(), key=lambda item: order[item[0]])


def _is_part(
    groups: RankGroups, pair: GroupPair, partners: tuple[dict[Key, Key], dict[Key, Key]]
) -> bool:
    """Is one of two calls only a part of the other, which is fused and lies on several ranks?"""
    for i, side in enumerate(groups.sides):
        other = groups.sides[1 - i]
        for slots in pair[2]:
            tensor = RankTensor(side, pair[i], slots[i])
            partner = RankTensor(other, pair[1 - i], slots[1 - i])
            shapes = set(tensor.shapes)
            if (
                not is_param(tensor.slot)
                or len(tensor.records) < 2
                or shapes != set(partner.shapes)
                or any(len(s) != 2 for s in shapes)
                or any(
                    groups.distance_between(side.name, tensor.records[0], r) == 0.0
                    for r in tensor.records[1:]
                )
            ):
                continue
            others = {k: v for k, v in partners[i].items() if v != partner.key}
            if fused_parts(tensor, other, others):
                return True
    return False


def _place(groups: RankGroups, pair: TensorPair) -> None:
    """Decide the layouts of two tensors that are paired."""
    places = [tensor.place for tensor in pair]
    if not all(tensor.records for tensor in pair):
        return
    are_gradients = all(gradients.is_gradient(tensor.key, tensor.slot) for tensor in pair)
    if all(p in groups.layouts for p in places) and not are_gradients:
        return
    if any(groups.cannot_join(*tensor.where) for tensor in pair):
        return
    for i, tensor in enumerate(pair):
        groups.first.setdefault(places[i], (tensor.key, tensor.slot))
        groups.partner.setdefault(places[i], places[1 - i])
    options = [groups.options(*tensor.where, tensor.records, tensor.shapes) for tensor in pair]
    layouts = _that_fit(
        [option for option in own if groups.layouts.get(place, option[0]) == option[0]]
        for own, place in zip(options, places, strict=True)
    )
    if not layouts and are_gradients:
        _place_here(groups, pair, _that_fit(options))
    if not layouts or all(p in groups.layouts for p in places):
        return
    if is_param(pair[0].slot):
        layouts = [
            p for p in layouts if not any(level.how == "sum" for part in p for level in part)
        ] or layouts
    layouts = [
        p for p in layouts if all(groups.summable(places[i], p[i]) for i in (0, 1))
    ] or layouts
    if any(gradients.is_of_own_loss(groups, *tensor.where) for tensor in pair):
        layouts = [
            p for p in layouts if all(groups.copies(places[i], p[i]) for i in (0, 1))
        ] or layouts
    if not pair[0].shapes[0] and not is_param(pair[0].slot):
        layouts = [
            p
            for p in layouts
            if all(gradients.is_possible(groups, *t.where, a) for t, a in zip(pair, p, strict=True))
        ] or layouts
    # Where both sides hold pieces, pieces put together along a wrong axis agree too: the simplest
    # layouts that agree are meant.
    layouts.sort(key=_complexity)
    for tensor_place, layout in zip(places, _pick(groups, layouts, pair), strict=True):
        groups.layouts.setdefault(tensor_place, layout)
        groups.note_differing(tensor_place, groups.layouts[tensor_place])
    for tensor in pair:
        gradients.note_loss(groups, *tensor.where)


def _that_fit(options: Iterable[Sequence[tuple[Layout, Any]]]) -> list[LayoutPair]:
    """Pairs of layouts by which two tensors get shapes that fit each other best."""
    first, second = options
    combos = [(a, b, shards.fits(s, t)) for a, s in first for b, t in second]
    best = max((fit for _, _, fit in combos), default=0)
    return [(a, b) for a, b, fit in combos if fit == best > 0]


def _place_here(groups: RankGroups, pair: TensorPair, layouts: list[LayoutPair]) -> None:
    """Decide the layouts of two gradients for these calls alone, where elements confirm them.

    One tensor may be two gradients: with one row a rank, that of the tokens' embeddings, of which
    each rank has its row, is that of the positions', of which each has a summand.
    """
    try:
        arrays = [[tensor.side.run.array(r) for r in tensor.records] for tensor in pair]
    except ElementsMissing:
        return
    for proposed in sorted(layouts, key=_complexity):
        if _distance(groups, proposed, pair, arrays) <= FITS:
            for tensor, layout in zip(pair, proposed, strict=True):
                if groups.layouts.setdefault(tensor.place, layout) != layout:
                    groups.layouts_at[tensor.side.name, tensor.key, tensor.slot] = layout
            return


def _pick(groups: RankGroups, layouts: list[LayoutPair], pair: TensorPair) -> LayoutPair:
    """The layouts whose joined elements are closest; else what siblings are known to have."""
    if all(groups.is_declared(*tensor.where) or len(tensor.records) == 1 for tensor in pair):
        return layouts[0]
    levels = [level.how for p in layouts for part in p for level in part]
    if len(layouts) == 1 and set(levels) <= {"replicated"}:
        return layouts[0]
    votes = groups.families[(*pair[0].family, *pair[1].family)]
    settled, count = votes.most_common(1)[0] if votes else (layouts[0], 0)
    is_settled = count >= _CONFIRMED and len(votes) == 1
    if is_settled and not {"sum", "replicated"} & set(levels):
        return settled
    try:
        arrays = [[tensor.side.run.array(r) for r in tensor.records] for tensor in pair]
    except ElementsMissing:
        likely = (
            p
            for p in layouts
            if all(groups.copies(tensor.place, part) for tensor, part in zip(pair, p, strict=True))
        )
        return settled if votes else next(likely, settled)
    tried = [
        (a, b)
        for proposed, proposed_across in layouts
        for a in shards.orders(proposed, pair[0].shapes)
        for b in shards.orders(proposed_across, pair[1].shapes)
    ]
    errors = [_distance(groups, tried_pair, pair, arrays) for tried_pair in tried]
    more: list[LayoutPair] = []
    if is_param(pair[0].slot) and all(error > 0 for error in errors):
        more += _by_parts(layouts, arrays)
    if is_output(pair[0].slot) or is_param(pair[0].slot):
        more += _as_parameters(groups, layouts, pair)
    tried += more
    errors += [_distance(groups, tried_pair, pair, arrays) for tried_pair in more]
    best = 0
    for i, error in enumerate(errors):
        if error < _CLEARLY * errors[best]:
            best = i
    if errors[best] <= FITS:
        votes[tried[best]] += 1
        return tried[best]
    return settled


def _distance(
    groups: RankGroups, layouts: LayoutPair, pair: TensorPair, arrays: Sequence[Sequence[Array]]
) -> float:
    """How far two tensors are apart when they are joined by these layouts."""
    a, b = (gradients.as_seen(groups, *t.where, p) for t, p in zip(pair, layouts, strict=True))
    return between(a, arrays[0], b, arrays[1])


def _by_parts(
    layouts: Sequence[LayoutPair], arrays: Sequence[Sequence[Array]]
) -> Iterator[LayoutPair]:
    """Layouts of parameters whose parts were cut one by one."""
    for pair in layouts:
        for i in (0, 1):
            pieces, whole = arrays[i], arrays[1 - i]
            is_cut = len(pair[i]) == 1 and pair[i][0].how == "cat" and not pair[1 - i]
            if (
                is_cut
                and len({a.shape for a in pieces}) == 1
                and whole[0].ndim == pieces[0].ndim
                and (blocks := shards.part_order(pieces, whole, pair[i][0].axis))
            ):
                cut = (Level("cat", len(pieces), pair[i][0].axis, blocks),)
                yield (cut, pair[1]) if i == 0 else (pair[0], cut)


def _as_parameters(
    groups: RankGroups, layouts: Sequence[LayoutPair], tensors: TensorPair
) -> Iterator[LayoutPair]:
    """Layouts of outputs, and a bias, in parts as their call's weight is."""
    for pair in layouts:
        for i, (side, key, slot) in enumerate(t.where for t in tensors):
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
