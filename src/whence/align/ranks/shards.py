"""Proposes how one tensor is distributed over several ranks, from shapes: whole, in pieces, or as
partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from whence.align.dims import Cat, Cut, Name, Node, Rearrange, Share, Star, Sum, names
from whence.align.layout.distances import distance
from whence.dtypes import Array

Shape = tuple[int, ...]
FITS = 0.3  # largest `distance_joined` at which elements confirm a layout
HOW = ("replicated", "cat", "sum", "zigzag", "striped")


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a layout: each of `size` ranks, or groups of ranks, holds the whole tensor, a
    piece along `axis` (counted from the front), or a summand.

    zigzag: rank r of n has pieces r and 2n-1-r of 2n. striped: every n-th index from r on. blocks:
    (rank, start, stop) along `axis` in the order of the whole, for parts that were cut one by one
    ([q0 k0 v0 | q1 k1 v1]). divisor: factor by which the ranks' joined tensor is too large; a mean
    over ranks is a sum with their number as divisor.
    """

    how: str
    size: int
    axis: int = 0
    blocks: tuple[tuple[int, int, int], ...] = ()
    divisor: int = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """A user's declaration of how tensors are distributed over ranks.

    pattern: of dotted call names, shell style. slot: pattern of slots ("output.0", "param.*"). how:
    "replicated", "cat", "sum", "zigzag" (rank r of n has pieces r and 2n-1-r) or "striped". axis:
    the axis that is cut. where: its name in errors ("map.yaml line 3").
    """

    pattern: str
    how: str
    axis: int = -1
    slot: str = "*"
    where: str = ""

    def __str__(self) -> str:
        along = "" if self.how in ("replicated", "sum") else f" along axis {self.axis}"
        return (
            f"{self.pattern}:{self.slot} is "
            f"{self.how}{along}{f' ({self.where})' if self.where else ''}"
        )


Layout = tuple[Level, ...]  # outermost first; neighbouring ranks differ in the innermost


def words(layout: Layout) -> str:
    """A layout in words: "replicated", "cat along axis 2", "cat along axis 0 of sums"."""
    parts = []
    for level in layout:
        order = f", {len(level.blocks) // level.size} parts cut one by one" if level.blocks else ""
        axis = "" if level.how in ("replicated", "sum") else f" along axis {level.axis}{order}"
        is_mean = level.how == "sum" and level.divisor == level.size
        share = f" divided by {level.divisor}" if level.divisor > 1 else ""
        parts.append("mean" if is_mean else f"{level.how}{axis}{share}")
    return " of ".join(parts) or "on one rank"


def node(layout: Layout, shapes: Sequence[Shape], replica: int = 0) -> Node:
    """The expression that joins the ranks' tensors r0, r1, ... replica: index of the one that is
    shown.
    """
    bound = {f"r{i}": [shape] for i, shape in enumerate(shapes)}

    def build(levels: Layout, places: Sequence[int]) -> Node:
        if not levels:
            return Name(f"r{places[0]}")
        whole = joined(levels, places)
        return Share(whole, levels[0].divisor) if levels[0].divisor > 1 else whole

    def joined(levels: Layout, places: Sequence[int]) -> Node:
        level, step = levels[0], len(places) // levels[0].size
        groups = [places[i * step : (i + 1) * step] for i in range(level.size)]
        if level.how == "replicated":
            return build(levels[1:], next((g for g in groups if replica in g), groups[0]))
        parts = tuple(build(levels[1:], g) for g in groups)
        if level.how == "sum":
            return Sum(parts)
        dims = len(parts[0].shape(bound))
        axis = -1 if level.axis == dims - 1 else level.axis
        if level.blocks:
            return Cat(tuple(_cut(parts[r], level.axis, a, b) for r, a, b in level.blocks), axis)
        if level.how == "zigzag":
            halves = [p.shape(bound)[level.axis] // 2 for p in parts]
            first = [_cut(p, level.axis, 0, h) for p, h in zip(parts, halves, strict=True)]
            second = [_cut(p, level.axis, h, 2 * h) for p, h in zip(parts, halves, strict=True)]
            return Cat((*first, *reversed(second)), axis)
        if level.how == "striped":
            names = [f"a{i}" for i in range(dims)]
            names_before, names_after = list(names), list(names)
            names_before[level.axis], names_after[level.axis] = (
                f"(r {names[level.axis]})",
                f"({names[level.axis]} r)",
            )
            return Rearrange(
                Cat(parts, axis),
                f"{' '.join(names_before)} -> {' '.join(names_after)}",
                (("r", level.size),),
            )
        return Cat(parts, axis)

    return build(layout, range(len(shapes)))


def bound_to(node: Node, records: Sequence[int]) -> tuple[Node, dict[str, tuple[int, ...]]]:
    """The names in an expression bound to records: *ranks for all in order, else each name that is
    used.
    """
    if isinstance(node, Share):
        inner, bound = bound_to(node.of, records)
        return Share(inner, node.parts), bound
    if isinstance(node, Cat | Sum) and node.parts == tuple(
        Name(f"r{i}") for i in range(len(records))
    ):
        star = (Star("ranks"),)
        return (Cat(star, node.axis) if isinstance(node, Cat) else Sum(star)), {
            "ranks": tuple(records)
        }
    used = sorted(set(names(node)), key=lambda name: int(name[1:]))
    return node, {name: (records[int(name[1:])],) for name in used}


def _cut(of: Node, axis: int, start: int, stop: int) -> Node:
    return Cut(of, (*[slice(None)] * axis, slice(start, stop)))


def candidates(shapes: Sequence[Shape]) -> list[tuple[Layout, Shape]]:
    """Layouts that these shapes allow, with the whole's shape: one level or two, simplest first."""
    n, first = len(shapes), shapes[0]
    if n == 1:
        return [((), first)]
    if len(set(shapes)) > 1:  # the last piece may be shorter
        odd = [
            k
            for k in range(len(first))
            if len({(s[:k], s[k + 1 :]) for s in shapes if len(s) == len(first)}) == 1
        ]
        if any(len(s) != len(first) for s in shapes) or len(odd) != 1:
            return []
        k = odd[0]
        return [((Level("cat", n, k),), (*first[:k], sum(s[k] for s in shapes), *first[k + 1 :]))]
    hows = [("replicated", -1), ("sum", -1), *(("cat", k) for k in range(len(first)))]
    if not first:
        hows.append((_MEAN, -1))
    out: list[tuple[Layout, Shape]] = []
    for sizes in [(n,), *((n // b, b) for b in range(2, n) if n % b == 0)]:
        for picked in product(hows, repeat=len(sizes)):
            if len(picked) == 2 and picked[0] == picked[1]:
                continue  # that layout is already given by the one level with all ranks
            whole = list(first)
            for (how, axis), size in zip(picked, sizes, strict=True):
                if how == "cat":
                    whole[axis] *= size
            out.append(
                (
                    tuple(_level(h, s, k) for (h, k), s in zip(picked, sizes, strict=True)),
                    tuple(whole),
                )
            )
    return out


_MEAN = "mean"  # of numbers, like losses


def _level(how: str, size: int, axis: int) -> Level:
    return Level("sum", size, divisor=size) if how == _MEAN else Level(how, size, max(axis, 0))


def fits(shape: Shape, partner: Shape) -> int:
    """How well a shape fits: 2 if equal; 1 if equal up to axes of extent one, merged axes or
    reversed axes; 0 if not.
    """
    if shape == partner:
        return 2
    bare, bare_partner = ([n for n in s if n != 1] for s in (shape, partner))
    return int(
        bare == bare_partner
        or bare == bare_partner[::-1]
        or (math.prod(shape) == math.prod(partner) and shape[-1:] == partner[-1:])
    )


def orders(layout: Layout, shapes: Sequence[Shape]) -> list[Layout]:
    """The layout, and variants with pieces in other orders along each of its axes but the last."""
    out = [layout]
    for i, level in enumerate(layout):
        extent = shapes[0][level.axis] if shapes[0] else 0
        if level.how == "cat" and len(set(shapes)) == 1 and level.axis < len(shapes[0]) - 1:
            others = ["striped"] * (extent > 1) + ["zigzag"] * (extent % 2 == 0 and extent > 0)
            out += [
                (*layout[:i], Level(how, level.size, level.axis), *layout[i + 1 :])
                for how in others
            ]
    return out


def distance_joined(tensor: Array, reference: Array) -> float:
    """`distance` of a joined tensor from the reference; axes of extent one, merged axes and
    reversed axes do not count.
    """
    if tensor.shape == reference.shape or tensor.size != reference.size:
        return distance(reference, tensor)
    bare = [n for n in tensor.shape if n != 1]
    turned = bare == [n for n in reference.shape if n != 1][::-1] and bare != bare[::-1]
    return distance(
        reference.reshape(-1), np.ascontiguousarray(tensor.T if turned else tensor).reshape(-1)
    )


def part_order(
    shards: Sequence[Array], whole: Sequence[Array], axis: int
) -> tuple[tuple[int, int, int], ...]:
    """Blocks (rank, start, stop) of the shards in the order of the whole, where its parts were cut
    one by one; () where they were not.

    whole: one tensor, or the parts it consists of, in order. Rows along `axis` are recognised by
    their bits; a few may differ. Within every part the ranks come in order: pieces on the wrong
    ranks are a fault, not a layout.
    """
    rows: dict[bytes, tuple[int, int]] = {}
    total = 0
    for rank, shard in enumerate(shards):
        for i, row in enumerate(_rows(shard, axis)):
            total += 1
            rows[row] = (rank, i)
    if len(rows) < 0.9 * total:
        return ()  # equal rows tell nothing
    kind = shards[0].dtype
    places = [rows.get(row) for part in whole for row in _rows(part.astype(kind), axis)]
    if len(places) != total or sum(p is not None for p in places) < 0.9 * total:
        return ()
    blocks: list[list[int]] = []
    for index, place in enumerate(places):
        if blocks and (place is None or (place[0] == blocks[-1][0] and place[1] == blocks[-1][2])):
            blocks[-1][2] += 1  # a row that was not recognised follows the one before it
        elif place is not None:
            blocks.append([place[0], place[1], place[1] + 1])
        elif index == 0:
            return ()
    n = len(shards)
    ranks = [b[0] for b in blocks]
    covered = sorted((r, a, b) for r, a, b in blocks)
    whole_ranks = all(
        [a for r, a, _ in covered if r == rank]
        == [0, *[b for r, _, b in covered if r == rank][:-1]]
        and [b for r, _, b in covered if r == rank][-1] == shards[rank].shape[axis]
        for rank in set(ranks)
    )
    if ranks != [*range(n)] * (len(ranks) // n) or len(ranks) == n or not whole_ranks:
        return ()
    return tuple((r, a, b) for r, a, b in blocks)


def _rows(array: Array, axis: int) -> list[bytes]:
    moved = np.ascontiguousarray(np.moveaxis(array, axis, 0))
    return [row.tobytes() for row in moved]
