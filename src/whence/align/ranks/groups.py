"""Groups of calls of one name on several ranks, and how their tensors are distributed over the
ranks.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, product
from typing import Any

from msgspec.structs import replace

from whence import dtypes
from whence.align.derived_run import Derived
from whence.align.module_names import starred
from whence.align.ranks import shards
from whence.align.ranks.shards import Layout, Level, Shape, Shard, candidates
from whence.dtypes import Array, is_half_roundoff
from whence.errors import ElementsMissing, UsageError
from whence.records import Call, Placement, Record, Ref, Run
from whence.records.slots import is_input, is_output, is_param, slot_kind
from whence.records.training import BACKWARD, LOSS, is_left, is_taken

# relative distance of replicas that rounding explains, for 16-bit floats and for wider ones
_ROUNDING = {True: 2e-2, False: 1e-4}

Key = tuple[Any, ...]  # of a call, without its rank
Place = tuple[str, tuple[int, ...]]  # a side, and the records of its ranks that hold one tensor


class Side:
    """The calls of one run. groups: key without rank -> rank -> call. stage: pipeline stage of each
    rank.
    """

    def __init__(self, name: str, run: Run) -> None:
        self.name, self.run = name, run
        self.calls: list[Call] = list(run.calls)
        self.ranks = sorted({c.rank for c in self.calls})
        self.scope = {c.id: c.scope for c in self.calls}
        self.stage = dict.fromkeys(self.ranks, 0)
        self.group()

    def group(self) -> None:
        self.groups: dict[Key, dict[int, Call]] = {}
        self.key_of: dict[int, Key] = {}
        for call in self.calls:
            key: Key = (
                call.root,
                call.step,
                call.micro,
                call.phase,
                self.scope[call.id],
                call.op,
                call.occurrence,
                0,
            )
            while call.rank in self.groups.get(key, ()):
                key = (*key[:-1], key[-1] + 1)
            self.groups.setdefault(key, {})[call.rank] = call
            self.key_of[call.id] = key
        self._homes = self._most_ranks() if len(self.ranks) > 1 else {}
        self.loss_records = self._find_loss_records()

    def _find_loss_records(self) -> frozenset[int]:
        """Records that a root returns, or that the code of a loss reads or makes."""
        return frozenset(
            ref.record
            for call in self.calls
            if call.phase == "forward" and (call.op == LOSS or (call.parent == -1 and not call.op))
            for ref in call.refs
            if call.op == LOSS or is_output(ref.slot)
        )

    def _most_ranks(self) -> dict[int, tuple[Key, str]]:
        """By record, the call and slot that the most ranks have for it."""
        homes: dict[int, tuple[Key, str]] = {}
        for key in sorted(self.groups, key=lambda k: -len(self.groups[k])):
            for call in self.groups[key].values():
                for ref in call.refs:
                    homes.setdefault(ref.record, (key, ref.slot))
        return homes

    def view(self, rank: int, whole: Mapping[tuple[Key, str], Record]) -> Run:
        """The calls of one rank as a run without elements. whole: records that stand for tensors in
        pieces.
        """
        calls = [c for c in self.calls if c.rank == rank]
        place = {c.id: i for i, c in enumerate(calls)}
        first = len(self.run.records)
        records = [replace(r, id=first + i) for i, r in enumerate(whole.values())]
        number = {where: r.id for where, r in zip(whole, records, strict=True)}
        new_ids = {
            r: n
            for where, n in number.items()
            if is_output(where[1])
            for r in self.holders(*where)[1]
        }

        def record_of(call: Call, ref: Ref) -> int:
            read = new_ids.get(ref.record, ref.record) if is_input(ref.slot) else ref.record
            return number.get((self.key_of[call.id], ref.slot), read)

        viewed = [
            replace(
                c,
                id=i,
                rank=0,
                parent=place.get(c.parent, -1),
                scope=self.scope[c.id],
                refs=tuple(Ref(r.slot, record_of(c, r), r.edge) for r in c.refs)
                if whole
                else c.refs,
            )
            for i, c in enumerate(calls)
        ]
        self.viewed = calls
        return Derived(self.run, (), records, viewed)

    def holders(self, key: Key, slot: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ranks, records) that hold a slot of a joined call. A call that spans all stages of a
        pipeline has the inputs of the first stage and the outputs of the last.
        """
        group = self.groups[key]
        holding = {
            rank: r.record
            for rank, call in sorted(group.items())
            for r in call.refs
            if r.slot == slot
        }
        kind = slot_kind(slot)
        home = self._home(key, slot, holding)
        if home != (key, slot):
            return self.holders(*home)
        if holding and kind != "param" and len({self.stage[r] for r in group}) > 1:
            end = min if kind == "input" else max
            stage = end(self.stage[rank] for rank in holding)
            holding = {rank: r for rank, r in holding.items() if self.stage[rank] == stage}
        return tuple(holding), tuple(holding.values())

    def _home(self, key: Key, slot: str, holding: Mapping[int, int]) -> tuple[Key, str]:
        """The call and slot that hold a tensor on the most ranks: an input of a backward pass
        around one rank's child is read by all ranks that run the same code.
        """
        group = self.groups[key]
        if key[3] != BACKWARD or not holding or not is_input(slot) or len(group) == len(self.ranks):
            return key, slot
        home, home_slot = self._homes[next(iter(holding.values()))]
        around = self.groups[home]
        is_wider = len(around) > len(group) and len({self.stage[rank] for rank in around}) == 1
        return (home, home_slot) if is_wider else (key, slot)

    def slots(self, key: Key) -> list[str]:
        return list(
            dict.fromkeys(r.slot for _, call in sorted(self.groups[key].items()) for r in call.refs)
        )

    def tensors(self, key: Key) -> list[RankTensor]:
        """The tensors of a joined call."""
        return [RankTensor(self, key, slot) for slot in self.slots(key)]

    def parent(self, key: Key) -> Key | None:
        call = next(iter(self.groups[key].values()))
        return self.key_of[call.parent] if call.parent >= 0 else None

    def placements(self, key: Key, slot: str) -> list[Placement]:
        """The placements that the program states for a tensor, by rank; [] where a rank has
        none.
        """
        held = {
            rank: r.record for rank, c in self.groups[key].items() for r in c.refs if r.slot == slot
        }
        key, slot = self._home(key, slot, held)
        group, ranks = self.groups[key], self.holders(key, slot)[0]
        placements = [group[rank].placements.get(slot) for rank in ranks]
        return [p for p in placements if p is not None] if all(placements) else []


class RankTensor:
    """A tensor that several ranks of a run hold together: a slot of a joined call."""

    def __init__(self, side: Side, key: Key, slot: str) -> None:
        self.side, self.key, self.slot = side, key, slot

    def __str__(self) -> str:
        return f"{self.key[4] or self.key[0]}:{self.slot}"

    @cached_property
    def _holders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.side.holders(self.key, self.slot)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold the tensor or a piece of it."""
        return self._holders[0]

    @property
    def records(self) -> tuple[int, ...]:
        """The records of these ranks."""
        return self._holders[1]

    @property
    def place(self) -> Place:
        return self.side.name, self.records

    @property
    def where(self) -> tuple[str, Key, str]:
        """Tells it from the same records in another call or slot."""
        return self.side.name, self.key, self.slot

    @cached_property
    def shapes(self) -> list[Shape]:
        return [self.side.run.records[r].shape for r in self.records]

    @property
    def family(self) -> tuple[object, ...]:
        """Identifies siblings that are distributed over the ranks in the same way."""
        return starred(str(self.key[4])), self.slot, tuple(self.shapes)

    @property
    def placements(self) -> list[Placement]:
        """The placements that the program states, by rank; [] where a rank has none."""
        return self.side.placements(self.key, self.slot)

    @property
    def is_left(self) -> bool:
        """Whether this is a gradient that a backward pass leaves."""
        return is_left(self.key[3], self.key[5], self.slot)

    @property
    def is_taken(self) -> bool:
        """Whether this is a gradient that an optimiser takes."""
        return is_taken(self.key[3], self.key[5], self.slot)

    @property
    def is_gradient(self) -> bool:
        return self.is_left or self.is_taken

    @property
    def is_loss(self) -> bool:
        """Whether this is a scalar that a model, or the code of a loss after it, returns, where a
        backward pass can begin.
        """
        if not is_output(self.slot) or not self.records or self.shapes[0]:
            return False
        if self.key[5] == LOSS:
            return True
        return self.key[3] == "forward" and self.records[0] in self.side.loss_records

    def arrays(self) -> list[Array]:
        """The elements that each rank holds. Raises ElementsMissing."""
        return [self.side.run.array(record) for record in self.records]


class RankGroups:
    """Two sides whose ranks are being joined.

    layouts: how tensors are distributed over the ranks. layouts_at: the layout at one slot of a
    call, where it differs. first: where each tensor was first found. partner: its partner on the
    other side. sum_of: the record that holds the sum of summands. differing: distance between
    copies. unplaced: names of tensors whose layout is unknown. families: layouts that elements
    confirmed, by siblings. losses: layouts of the losses of roots. shown_rank: the rank that stands
    for all where copies differ.
    """

    def __init__(self, reference: Side, target: Side, declared: Sequence[Shard]) -> None:
        self.sides, self.declared = (reference, target), tuple(declared)
        self.notes: list[str] = []
        self.layouts: dict[Place, Layout] = {}
        self.layouts_at: dict[tuple[str, Key, str], Layout] = {}
        self.differing: dict[Place, float] = {}
        self.partner: dict[Place, Place] = {}
        self.first: dict[Place, RankTensor] = {}
        self.unplaced: dict[Place, str] = {}
        self.families: dict[tuple[Any, ...], Counter[tuple[Layout, Layout]]] = defaultdict(Counter)
        self.sum_of: dict[Place, int] = {}
        self.losses: dict[tuple[str, str], Layout] = {}
        self._distances: dict[tuple[str, int, int], float] = {}
        self.shown_rank = {s.name: s.ranks[0] if s.ranks else 0 for s in (reference, target)}

    def copies(self, place: Place, layout: Layout) -> bool:
        """Whether ranks that would hold copies in this layout hold the same tensor, up to
        rounding.
        """
        distances = self._distances_along(place, layout, "replicated")
        return all(distance <= self.rounding(place) for distance in distances)

    def summable(self, place: Place, layout: Layout) -> bool:
        """Whether ranks that would hold summands in this layout hold different tensors: copies are
        not summed.
        """
        distances = self._distances_along(place, layout, "sum")
        return not any(distance <= self.rounding(place) for distance in distances)

    def _distances_along(self, place: Place, layout: Layout, how: str) -> Iterator[float]:
        """Distances of the tensors of ranks that differ in one level of this kind only."""
        for near, level in neighbours(layout, len(place[1])):
            for i, j in near if level.how == how else ():
                yield self.distance_between(place[0], place[1][i], place[1][j])

    def rounding(self, place: Place) -> float:
        return _ROUNDING[is_half_roundoff(record_and_roundoff(self.run(place[0]), place[1][0])[1])]

    def run(self, side: str) -> Run:
        return self.sides[0].run if side == self.sides[0].name else self.sides[1].run

    def distance_between(self, side: str, a: int, b: int) -> float:
        """Relative distance of two records of a run; inf where their statistics rule it out or
        elements are missing.
        """
        distance = self._distances.get((side, a, b))
        if distance is None:
            run = self.run(side)
            x, y = run.records[a], run.records[b]
            content, content_b = (x.hash, x.shape, x.dtype), (y.hash, y.shape, y.dtype)
            if a == b or (x.hash and content == content_b):
                distance = 0.0
            elif x.shape != y.shape or _unlike(x, y):
                distance = math.inf
            else:
                try:
                    distance = shards.distance_joined(run.array(b), run.array(a))
                except ElementsMissing:
                    distance = math.inf
            self._distances[side, a, b] = distance
        return distance

    def note_differing(self, place: Place, layout: Layout) -> None:
        distance = max(self._distances_along(place, layout, "replicated"), default=0.0)
        if distance:
            self.differing[place] = distance

    def options(self, tensor: RankTensor) -> list[tuple[Layout, Any]]:
        """The layouts of a tensor, with the shape of the whole: those declared by the user or
        stated by the program, else those that the shapes allow. Raises UsageError for contradictory
        declarations.
        """
        matching, shapes = self._declared(tensor), tensor.shapes
        if not matching or len(shapes) < 2:
            return self._placed(tensor) or shards.candidates(shapes)
        ways = {(d.how, d.axis if d.how not in ("replicated", "sum") else 0) for d in matching}
        if len(ways) > 1:
            raise UsageError(
                f"{tensor}: two declarations contradict each other: {matching[0]}; {matching[1]}"
            )
        chosen, dims = matching[0], len(shapes[0])
        if chosen.how in ("replicated", "sum"):
            if len(set(shapes)) > 1:
                raise UsageError(
                    f"{chosen}: every rank must hold the same shape, and the ranks hold "
                    f"{', '.join(map(str, dict.fromkeys(shapes)))}"
                )
            return [((Level(chosen.how, len(shapes)),), shapes[0])]
        if not -dims <= chosen.axis < dims:
            raise UsageError(f"{chosen}: {tensor} of shape {shapes[0]} has no axis {chosen.axis}")
        axis = chosen.axis % dims
        if len({(s[:axis], s[axis + 1 :]) for s in shapes}) > 1:
            raise UsageError(
                f"{chosen}: {', '.join(map(str, dict.fromkeys(shapes)))} do not fit together "
                f"along axis {chosen.axis}"
            )
        if chosen.how == "zigzag" and shapes[0][axis] % 2:
            raise UsageError(
                f"{chosen}: axis {chosen.axis} of {tensor} has "
                f"{shapes[0][axis]} indices, which are not two halves"
            )
        whole = (*shapes[0][:axis], sum(s[axis] for s in shapes), *shapes[0][axis + 1 :])
        return [((Level(chosen.how, len(shapes), axis),), whole)]

    def _placed(self, tensor: RankTensor) -> list[tuple[Layout, Any]]:
        placements = tensor.placements if len(tensor.records) > 1 else []
        return layouts(placements, tensor.ranks, tensor.shapes) if placements else []

    def is_declared(self, tensor: RankTensor) -> bool:
        """Whether a declaration or the program leaves only one layout."""
        return bool(self._declared(tensor)) or len(self._placed(tensor)) == 1

    def cannot_join(self, tensor: RankTensor) -> bool:
        """Whether the program states a placement that cannot be joined here, such as a mean, and no
        declaration of the user's another layout.
        """
        return not self._declared(tensor) and not all(map(is_known, tensor.placements))

    def _declared(self, tensor: RankTensor) -> list[Shard]:
        name = tensor.key[4] or tensor.key[0]
        return [
            d
            for d in self.declared
            if fnmatch.fnmatchcase(name, d.pattern) and fnmatch.fnmatchcase(tensor.slot, d.slot)
        ]

    def blocks_of(self, side: Side, key: Key) -> tuple[tuple[int, int, int], ...]:
        """The blocks in which a call's parameters are distributed over the ranks along their first
        axis.
        """
        for tensor in side.tensors(key):
            if is_param(tensor.slot):
                layout = self.layouts.get(tensor.place, ())
                if len(layout) == 1 and layout[0].blocks and layout[0].axis == 0:
                    return layout[0].blocks
        return ()


def is_sum(layout: Layout) -> bool:
    """Whether ranks hold summands."""
    return any(level.how == "sum" for level in layout)


def neighbours(layout: Layout, n: int) -> Iterator[tuple[list[tuple[int, int]], Level]]:
    """For each level, pairs of ranks that differ in this level only: the first of each line with
    every other rank of the line.
    """
    inner = n
    for level in layout:
        outer, inner = inner, inner // level.size
        lines = [base + off for base in range(0, n, outer) for off in range(inner)]
        yield [(first, first + inner * i) for first in lines for i in range(1, level.size)], level


def between(
    layout: Layout, arrays: Sequence[Array], second: Layout, across: Sequence[Array]
) -> float:
    """Distance of the tensors of both sides, each joined by its layout."""
    return shards.distance_joined(joined_array(layout, arrays), joined_array(second, across))


def joined_array(layout: Layout, arrays: Sequence[Array]) -> Array:
    """The tensors of all ranks, joined."""
    bound = {f"r{i}": [a] for i, a in enumerate(arrays)}
    return shards.node(layout, [a.shape for a in arrays]).apply(bound)


def record_and_roundoff(run: Run, record: int) -> tuple[Record, float]:
    """(record, unit roundoff of its dtype; 0 for exact dtypes)."""
    entry = run.records[record]
    kind = dtypes.DTYPES.get(entry.dtype)
    return entry, (kind.unit_roundoff or 0.0) if kind is not None else 0.0


def _unlike(first: Record, second: Record) -> bool:
    """Whether the norms alone show that these are different tensors."""
    a, b = (r.statistics.norm if r.statistics is not None else None for r in (first, second))
    return a is not None and b is not None and abs(a - b) > 0.2 * max(a, b)


# How tensors are distributed over the ranks where the program states it (DTensors).

_KNOWN = ("replicate", "sum", "shard")


def is_known(placement: Placement) -> bool:
    """Whether every placement is a copy, a piece or a summand. Others (a mean) cannot be joined
    here.
    """
    return all(place.split()[0] in _KNOWN for place in placement.places)


def layouts(
    placements: Sequence[Placement], ranks: Sequence[int], shapes: Sequence[Shape]
) -> list[tuple[Layout, Shape]]:
    """The layouts that the placements of a tensor allow, with the shape of the whole; [] where they
    do not determine it.

    placements, shapes: of each rank. There is one layout where one mesh holds all ranks. Where
    ranks form several meshes (tensor parallel groups of a data parallel program), the layout
    between the meshes is left open.
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
    """The levels over a mesh's ranks in ascending order; None where these are not a nested grid."""
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
            return None  # the same axis is cut again, by ranks that are not adjacent
        order = [d for d in nested.get(int(axis), tuple(cut)) if d in cut]
        if order == along:
            levels += [Level("cat", size[d], int(axis)) for d in along]
        else:
            levels.append(_reordered(along, order, size, int(axis), levels, shapes))
    return tuple(levels)


def _ascending(placement: Placement) -> list[int] | None:
    """The mesh's dimensions, those with the largest rank distance first; None where the ranks are
    not a regular grid.
    """
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
    """One level for adjacent dimensions that cut one axis, the finer cut first."""
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
    """For several meshes of one form: their layout, combined with every layout between the
    meshes.
    """
    groups = sorted({tuple(m) for m in meshes})
    if sorted(r for g in groups for r in g) != list(ranks) or len({len(g) for g in groups}) > 1:
        return []
    if [r for g in groups for r in g] == list(ranks):
        return [((*level, *layout), whole) for level, whole in candidates([shape] * len(groups))]
    if [r for line in zip(*groups, strict=True) for r in line] == list(ranks):
        return [((*layout, *level), whole) for level, whole in candidates([shape] * len(groups))]
    return []
