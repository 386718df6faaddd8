"""How gradients lie on ranks that each have a loss of their own.

Where the loss of the whole is the mean of n losses, each rank differentiates its own: what it has
of a gradient is n times its part, until the ranks take the mean over their gradients. An optimiser
takes gradients that the ranks are done with, or should be.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from whence.align.ranks.groups import Key, Place, RankGroups, Side, is_sum
from whence.align.ranks.shards import Layout, Level
from whence.records.slots import is_output
from whence.records.training import BACKWARD, LOSS, is_left, is_taken
from whence.records.training import is_sum as _is_sum_of


def layout_at(groups: RankGroups, side: Side, key: Key, slot: str) -> Layout:
    """How a tensor lies on the ranks where a call reads or makes it, () on one rank."""
    base = groups.layouts_at.get((side.name, key, slot))
    if base is None:
        base = groups.layouts.get((side.name, side.holders(key, slot)[1]), ())
    return as_seen(groups, side, key, slot, base)


def as_seen(groups: RankGroups, side: Side, key: Key, slot: str, layout: Layout) -> Layout:
    """A layout of a tensor as it counts for one call."""
    if is_taken(key[3], key[5], slot):
        is_said = bool(side.placements(key, slot))
        return done(layout) if is_sum(layout) and not is_said else layout
    loss = _loss_behind(groups, side, key)
    if divisor(loss) == 1 or not is_left(key[3], key[5], slot):
        return layout
    if any(_parts_losses(p.ranks, side.ranks, loss) for p in side.placements(key, slot)):
        return layout  # the program says it of ranks that have losses of their own
    return _of_means(layout, loss, len(side.holders(key, slot)[1]))


def _parts_losses(mesh: Sequence[int], ranks: Sequence[int], loss: Layout) -> bool:
    """Do ranks of a mesh have other losses than each other, or is a loss's layout not over all
    ranks?
    """
    order = sorted(ranks)
    if math.prod(level.size for level in loss) != len(order):
        return True
    parts = set()
    for rank in mesh:
        place, own = order.index(rank), []
        for level in reversed(loss):
            place, coordinate = divmod(place, level.size)
            own.append(coordinate if level.divisor > 1 else 0)
        parts.add(tuple(own))
    return len(parts) > 1


def is_gradient(key: Key, slot: str) -> bool:
    """Is this tensor a gradient?"""
    return is_left(key[3], key[5], slot) or is_taken(key[3], key[5], slot)


def divisor(layout: Layout) -> int:
    """How many times too large the ranks' parts are."""
    return math.prod(level.divisor for level in layout)


def is_loss(side: Side, key: Key, slot: str) -> bool:
    """Is it a number that a model, or the code behind it, returns to begin a backward pass at, or
    one that this code reads?
    """
    if not is_output(slot):
        return False
    records = side.holders(key, slot)[1]
    if not records or side.run.records[records[0]].shape:
        return False
    return key[5] == LOSS or (key[3] == "forward" and records[0] in side.loss_records)


def note_loss(groups: RankGroups, side: Side, key: Key, slot: str) -> None:
    """Remember how the loss lies on the ranks, once it is known."""
    if is_loss(side, key, slot) and key[3] == "forward":
        layout = groups.layouts.get((side.name, side.holders(key, slot)[1]), ())
        groups.losses.setdefault((side.name, key[0]), layout)


def _loss_behind(groups: RankGroups, side: Side, key: Key) -> Layout:
    """How the loss that a call's gradients come from lies on the ranks. Where its root returns no
    loss, as a model in front of `nn.CrossEntropyLoss()`, it is that of the other roots if these
    agree, and () if not.
    """
    own = groups.losses.get((side.name, key[0]))
    if own is not None:
        return own
    layouts = {layout for (name, _), layout in groups.losses.items() if name == side.name}
    return layouts.pop() if len(layouts) == 1 else ()


def is_of_own_loss(groups: RankGroups, side: Side, key: Key, slot: str) -> bool:
    """Is it the gradient of a parameter that a call makes where ranks have losses of their own?
    What differs on the ranks is then parts of a sum, also where the sum is next to nothing and its
    rounding fits no layout (the bias of keys in an attention).
    """
    is_made = key[3] == BACKWARD and slot.startswith("output.grad.param.")
    return is_made and divisor(_loss_behind(groups, side, key)) > 1


def is_possible(groups: RankGroups, side: Side, key: Key, slot: str, layout: Layout) -> bool:
    """May a number lie like this? A mean is one of numbers that ranks made from pieces of their
    own, or from such a number; where these differ, none stands for all.
    """
    place = side.name, side.holders(key, slot)[1]
    inputs = (groups.layouts.get((side.name, side.holders(key, s)[1]), ()) for s in side.slots(key))
    of_pieces = any(
        level.how not in ("replicated", "sum") or level.divisor > 1  # or of a mean
        for read in inputs
        for level in read
    )
    if divisor(layout) > 1:
        return of_pieces
    return not of_pieces or groups.copies(place, layout)


class PartialGradients:
    """What becomes of gradients of which each rank has a part: where no loss of its own makes them
    parts, a backward pass adds them up before it returns to code that ranks run alike.
    """

    def __init__(self, groups: RankGroups, side: Side) -> None:
        self._groups, self._side = groups, side
        self._readers: dict[Place, list[Key]] = defaultdict(list)
        for key in side.groups:
            if key[3] == BACKWARD and not _is_sum_of(key[5]):
                for slot in side.slots(key):
                    if slot.startswith("input.grad."):
                        self._readers[side.name, side.holders(key, slot)[1]].append(key)

    def is_reduced(self, place: Place) -> bool:
        """Are the parts added up, or meant to stay parts until the optimiser's step?"""
        groups, side = self._groups, self._side
        key, slot = groups.first[place]
        loss = _loss_behind(groups, side, key)
        if divisor(loss) > 1 or side.placements(key, slot) or ".param." in slot:
            return True
        seen, todo = {place}, [place]
        while todo:
            for reader in self._readers.get(todo.pop(), ()):
                for made in self._made(reader):
                    if made in seen:
                        continue
                    seen.add(made)
                    layout = groups.layouts.get(made, ())
                    if is_sum(layout):
                        todo.append(made)
                    elif not groups.copies(made, layout):
                        return False
        return True

    def _made(self, key: Key) -> Iterator[Place]:
        for slot in self._side.slots(key):
            if slot.startswith("output.grad.") and ".param." not in slot:
                yield self._side.name, self._side.holders(key, slot)[1]


def done(layout: Layout) -> Layout:
    """The layout of what the ranks have added up."""
    return tuple(
        Level("replicated", level.size) if level.how == "sum" else level for level in layout
    )


def _of_means(layout: Layout, loss: Layout, ranks: int) -> Layout:
    """The layout of what was differentiated from losses of which the mean is the whole's."""
    if ranks != math.prod(level.size for level in loss):
        parts = [level for level in layout if level.how != "replicated"]
        if ranks > 1 and not parts:
            return layout
        return (Level("replicated", 1, divisor=divisor(loss)), *layout)
    levels: list[Level] = []
    for level, share in _aligned(layout, loss):
        levels.append(replace(level, divisor=share) if level.how != "replicated" else level)
    return tuple(levels)


def _aligned(layout: Layout, loss: Layout) -> Iterator[tuple[Level, int]]:
    """The levels of a layout, those that the loss has in two cut in two, with the divisor of the
    loss there. Pieces in an order of their own stay in one.
    """
    if len(layout) == 1 and len(loss) > 1 and layout[0].how in ("cat", "sum", "replicated"):
        layout = tuple(replace(layout[0], size=level.size) for level in loss)
    if [level.size for level in layout] == [level.size for level in loss]:
        yield from zip(layout, (level.divisor for level in loss), strict=True)
        return
    whole = divisor(loss)
    for level in layout:
        share = math.gcd(whole, level.size)
        whole //= share
        yield level, share
