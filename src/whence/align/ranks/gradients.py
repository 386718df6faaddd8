"""How gradients are distributed over ranks that each compute their own loss.

Where the loss of the whole model is the mean of n losses, each rank differentiates its own: its
gradient is n times its part of the whole, until the ranks average their gradients. An optimiser
reads gradients that the ranks have averaged, or should have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from whence.align.ranks.groups import Key, Place, RankGroups, RankTensor, Side, is_sum
from whence.align.ranks.shards import Layout, Level
from whence.records.training import BACKWARD
from whence.records.training import is_sum as _is_sum_of


def layout_at(groups: RankGroups, tensor: RankTensor) -> Layout:
    """How a tensor is distributed over the ranks where a call reads or makes it; () on one rank."""
    base = groups.layouts_at.get(tensor.where)
    return as_seen(groups, tensor, groups.layouts.get(tensor.place, ()) if base is None else base)


def as_seen(groups: RankGroups, tensor: RankTensor, layout: Layout) -> Layout:
    """The layout that counts for one call: gradients read by an optimiser count as added up, and
    gradients of ranks with their own losses as means.
    """
    if tensor.is_taken:
        return done(layout) if is_sum(layout) and not tensor.placements else layout
    loss = _loss_behind(groups, tensor)
    if divisor(loss) == 1 or not tensor.is_left:
        return layout
    if any(_parts_losses(p.ranks, tensor.side.ranks, loss) for p in tensor.placements):
        return layout  # the program states it for ranks that have their own losses
    return _of_means(layout, loss, len(tensor.records))


def _parts_losses(mesh: Sequence[int], ranks: Sequence[int], loss: Layout) -> bool:
    """Whether ranks of a mesh have different losses, or the layout of the loss does not cover all
    ranks.
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


def divisor(layout: Layout) -> int:
    """The factor by which the sum of the ranks' parts is too large."""
    return math.prod(level.divisor for level in layout)


def note_loss(groups: RankGroups, tensor: RankTensor) -> None:
    """Record how the loss is distributed over the ranks, once that is known."""
    if tensor.is_loss and tensor.key[3] == "forward":
        layout = groups.layouts.get(tensor.place, ())
        groups.losses.setdefault((tensor.side.name, tensor.key[0]), layout)


def _loss_behind(groups: RankGroups, tensor: RankTensor) -> Layout:
    """How the loss is distributed from which a call's gradients come. Where the call's root returns
    no loss (a model before `nn.CrossEntropyLoss()`), the layout of the other roots' losses if these
    agree, else ().
    """
    own = groups.losses.get((tensor.side.name, tensor.key[0]))
    if own is not None:
        return own
    layouts = {layout for (name, _), layout in groups.losses.items() if name == tensor.side.name}
    return layouts.pop() if len(layouts) == 1 else ()


def is_of_own_loss(groups: RankGroups, tensor: RankTensor) -> bool:
    """Whether a tensor is a parameter's gradient, made by a call where ranks have their own losses.
    What differs between the ranks is then parts of a sum, even where the sum is nearly zero and its
    rounding fits no layout (the bias of keys in an attention).
    """
    is_made = tensor.key[3] == BACKWARD and tensor.slot.startswith("output.grad.param.")
    return is_made and divisor(_loss_behind(groups, tensor)) > 1


def is_possible(groups: RankGroups, tensor: RankTensor, layout: Layout) -> bool:
    """Whether a scalar may be distributed like this. A mean needs scalars that ranks computed from
    pieces of their own, or from such scalars; where these differ, no single one stands for all.
    """
    of_pieces = any(
        level.how not in ("replicated", "sum") or level.divisor > 1  # or of a mean
        for beside in tensor.side.tensors(tensor.key)
        for level in groups.layouts.get(beside.place, ())
    )
    if divisor(layout) > 1:
        return of_pieces
    return not of_pieces or groups.copies(tensor.place, layout)


class PartialGradients:
    """Decides what happens to gradients of which each rank has a part. Unless the ranks' own losses
    make them parts, a backward pass must add them up before it returns to code that all ranks run
    alike.
    """

    def __init__(self, groups: RankGroups, side: Side) -> None:
        self._groups, self._side = groups, side
        self._readers: dict[Place, list[Key]] = defaultdict(list)
        for key in side.groups:
            if key[3] == BACKWARD and not _is_sum_of(key[5]):
                for tensor in side.tensors(key):
                    if tensor.slot.startswith("input.grad."):
                        self._readers[tensor.place].append(key)

    def is_reduced(self, place: Place) -> bool:
        """Whether the parts are added up, or meant to stay parts until the optimiser's step."""
        groups, tensor = self._groups, self._groups.first[place]
        loss = _loss_behind(groups, tensor)
        if divisor(loss) > 1 or tensor.placements or ".param." in tensor.slot:
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
        for tensor in self._side.tensors(key):
            if tensor.slot.startswith("output.grad.") and ".param." not in tensor.slot:
                yield tensor.place


def done(layout: Layout) -> Layout:
    """The layout after the ranks have added up their parts."""
    return tuple(
        Level("replicated", level.size) if level.how == "sum" else level for level in layout
    )


def _of_means(layout: Layout, loss: Layout, ranks: int) -> Layout:
    """The layout of gradients of losses whose mean is the loss of the whole."""
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
    """The levels of a layout, cut where the loss's levels are cut, with the loss's divisor at each.
    Pieces in an order of their own are not cut.
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
