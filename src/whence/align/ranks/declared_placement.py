"""How tensors lie on the ranks where the program itself said it (DTensors)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, product

from whence.align.ranks.shards import Layout, Level, Shape, candidates
from whence.records import Placement

_KNOWN = ("replicate", "sum", "shard")


def is_known(placement: Placement) -> bool:
    """Is each place a copy, a piece or a summand? Others (a mean) cannot be joined here."""
    return all(place.split()[0] in _KNOWN for place in placement.places)


def layouts(
    placements: Sequence[Placement], ranks: Sequence[int], shapes: Sequence[Shape]
) -> list[tuple[Layout, Shape]]:
    """The layouts that the placements of a tensor allow, with the shape of the whole; [] where they
    do not say it.

    placements, shapes: of each rank. One layout where one mesh holds all ranks; where ranks form
    several meshes (tensor parallel groups of a data parallel program), how these lie to each other
    is left open.
    """
    first = placements[0]
    if not all(
        is_known(p)
        and p.places == first.places
        and p.mesh == first.mesh
        and p.nested == first.nested
        for p in placements
    ):
        return []
    meshes = [p.ranks for p in placements]
    if any(rank not in mesh for rank, mesh in zip(ranks, meshes, strict=True)):
        return []
    inside = [i for i, rank in enumerate(ranks) if rank in first.ranks]
    mesh_ranks = [ranks[i] for i in inside]
    if sorted(first.ranks) != mesh_ranks:
        return []
    layout = _of_mesh(first, [shapes[i] for i in inside])
    if layout is None:
        return []
    if len(mesh_ranks) == len(ranks):
        return [(layout, first.shape)]
    return _of_meshes(layout, first.shape, [sorted(mesh) for mesh in meshes], ranks)


def _of_mesh(placement: Placement, shapes: Sequence[Shape]) -> Layout | None:
    """Levels over a mesh's ranks in ascending order; None where these are no nested grid."""
    grid = _ascending(placement)
    if grid is None:
        return None
    nested, size = dict(placement.nested), dict(enumerate(placement.mesh))
    levels: list[Level] = []
    for place, dims in groupby((d for d in grid if size[d] > 1), key=lambda d: placement.places[d]):
        along = list(dims)
        kind, _, axis = place.partition(" ")
        if kind != "shard":
            levels += [
                Level("replicated" if kind == "replicate" else "sum", size[d]) for d in along
            ]
            continue
        cut = [
            d
            for d, same_place in enumerate(placement.places)
            if same_place == place and size[d] > 1
        ]
        if sorted(cut) != sorted(along):
            return None  # the same axis is cut again, by ranks that are no neighbours of these
        order = [d for d in nested.get(int(axis), tuple(cut)) if d in cut]
        if order == along:
            levels += [Level("cat", size[d], int(axis)) for d in along]
        else:
            levels.append(_reordered(along, order, size, int(axis), levels, shapes))
    return tuple(levels)


def _ascending(placement: Placement) -> list[int] | None:
    """The mesh's dimensions, the widest steps first; None where the ranks are no regular grid."""
    mesh, ranks = placement.mesh, placement.ranks
    step = math.prod(mesh)
    strides: dict[int, int] = {}
    for dim, size in enumerate(mesh):
        step //= size
        strides[dim] = ranks[step] - ranks[0] if size > 1 else 0
    order = sorted(range(len(mesh)), key=lambda d: -strides[d])
    expected = sorted(ranks)
    places = dict(zip(product(*map(range, mesh)), ranks, strict=True))
    walked = [
        places[tuple(dict(zip(order, coordinates, strict=True))[d] for d in range(len(mesh)))]
        for coordinates in product(*(range(mesh[d]) for d in order))
    ]
    return order if walked == expected else None


def _reordered(
    along: Sequence[int],
    order: Sequence[int],
    size: dict[int, int],
    axis: int,
    outer: Sequence[Level],
    shapes: Sequence[Shape],
) -> Level:
    """One level for neighbouring dimensions that cut one axis, the finer cut first."""
    n = math.prod(size[d] for d in along)
    inner = len(shapes) // n // math.prod(level.size for level in outer)
    number = {
        coordinates: i for i, coordinates in enumerate(product(*(range(size[d]) for d in along)))
    }
    blocks = []
    for walk in product(*(range(size[d]) for d in order)):
        coordinates = dict(zip(order, walk, strict=True))
        rank = number[tuple(coordinates[d] for d in along)]
        blocks.append((rank, 0, shapes[rank * inner][axis]))
    return Level("cat", n, axis, tuple(blocks))


def _of_meshes(
    layout: Layout, shape: Shape, meshes: Sequence[Sequence[int]], ranks: Sequence[int]
) -> list[tuple[Layout, Shape]]:
    """Several meshes of one form: their layout with every layout of the wholes."""
    groups = sorted({tuple(m) for m in meshes})
    if sorted(r for g in groups for r in g) != list(ranks) or len({len(g) for g in groups}) > 1:
        return []
    if [r for g in groups for r in g] == list(ranks):
        return [((*level, *layout), whole) for level, whole in candidates([shape] * len(groups))]
    if [r for line in zip(*groups, strict=True) for r in line] == list(ranks):
        return [((*layout, *level), whole) for level, whole in candidates([shape] * len(groups))]
    return []
