"""Runs of several ranks brought to one form: calls of the ranks become one call, their tensors one tensor, before anything is compared.

How a tensor lies on the ranks is proposed by shapes against the other side, by what the ranks share, and confirmed on elements.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from whence import dtypes
from whence.align import shards
from whence.align.derived import Derived, Making
from whence.align.expressions import Unfit
from whence.align.names import starred
from whence.align.plan import plan
from whence.align.shards import Layout, Level
from whence.dtypes import Array
from whence.errors import ElementsMissing, UsageError
from whence.records import Call, Record, Ref, Run

SHOWN = "of the ranks' replicas, shown is that of rank "
"""How the note of a joined call begins whose tensors every rank should hold alike and does not."""

PIECES = "joined of the pieces that "
"""How the note of a joined call begins that worked on pieces of its tensors."""

ON_RANKS = " on the ranks"
"""How the reason of a tensor ends that was joined of the ranks' pieces."""

_ROUNDING = {True: 2e-2, False: 1e-4}  # replicas that far apart, of 16-bit floats or wider ones, differ by rounding
_MIXED = 8  # unit roundoffs by which replicas may part before a call that reads all of them is no longer one call
_CLEARLY = 0.5  # a layout is better than another when its distance is below this share of the other's
_FITS = 0.3  # relative distance up to which a layout is confirmed by elements
_CONFIRMED = 2  # members of a family (layers.*.mlp) whose layout was confirmed settle the others of the same shape
_STAGES = 0.02  # ranks of two pipeline stages share at most this share of their leaf modules

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """What a user declares of tensors: how they lie on the ranks.

    pattern: of dotted call names, shell style. slot: of slots ("output.0", "param.*"). how: "replicated", "cat", "sum", "zigzag"
    (rank r of n has pieces r and 2n-1-r) or "striped". axis: along which. where: what errors call it ("map.yaml line 3").
    """

    pattern: str
    how: str
    axis: int = -1
    slot: str = "*"
    where: str = ""

    def __str__(self) -> str:
        along = "" if self.how in ("replicated", "sum") else f" along axis {self.axis}"
        return f"{self.pattern}:{self.slot} is {self.how}{along}{f' ({self.where})' if self.where else ''}"


def joined(reference: Run, target: Run, declared: Sequence[Shard] = ()) -> tuple[Run, Run, tuple[str, ...]]:
    """Both runs with the calls of their ranks joined, and sentences on what was done. Runs of one rank are as they were.

    Ranks that hold the same tensors on both sides stay apart and face each other one by one. Raises UsageError for declarations that
    contradict each other or do not fit a tensor.
    """
    for shard in declared:
        if shard.how not in shards.HOW:
            raise UsageError(f"{shard}: {shard.how!r} is not known; there are {', '.join(shards.HOW)}")
    left, right = ({c.rank for c in run.calls} for run in (reference, target))
    if len(left) < 2 and len(right) < 2:
        return (reference, target, ()) if left == right or not left or not right else (reference, *_renumbered(target, min(left)))
    if left == right and not declared and _same_shapes(reference, target):
        return reference, target, ()
    sides = _Side("reference", reference), _Side("target", target)
    joining = _Joining(*sides, declared)
    joining.decide()
    runs = [side.run if len(side.ranks) < 2 else joining.build(side) for side in sides]
    rank = min(sides[0].ranks if len(sides[0].ranks) == 1 else sides[1].ranks if len(sides[1].ranks) == 1 else [0])
    if len(sides[0].ranks) > 1 or len(sides[1].ranks) > 1:
        runs = [_renumbered(run, rank)[0] for run in runs]
    return runs[0], runs[1], tuple(joining.notes)


def _renumbered(run: Run, rank: int) -> tuple[Run, tuple[str, ...]]:
    """A run of one rank under another number: numbers say nothing where there is only one."""
    own = next((c.rank for c in run.calls), rank)
    if own == rank:
        return run, ()
    calls = [msgspec.structs.replace(c, rank=rank) for c in run.calls]
    return Making(run).done(calls), (f"target: rank {own} faces rank {rank}",)


def _same_shapes(reference: Run, target: Run) -> bool:
    """Does every call that both have by its key, rank included, hold tensors of the same shapes?"""
    theirs = {c.key(): c for c in target.calls}
    met = False
    for call in reference.calls:
        other = theirs.get(call.key())
        if other is None:
            continue
        met = True
        slots = {r.slot: r.record for r in other.refs}
        for ref in call.refs:
            if ref.slot in slots and reference.records[ref.record].shape != target.records[slots[ref.slot]].shape:
                return False
    return met


class _Side:
    """The calls of a run by key without the rank. groups: key -> rank -> call. stage: of each rank in a pipeline, 0 without one."""

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
            key: Key = (call.root, call.step, call.micro, call.phase, self.scope[call.id], call.op, call.occurrence, 0)
            while call.rank in self.groups.get(key, ()):
                key = (*key[:-1], key[-1] + 1)
            self.groups.setdefault(key, {})[call.rank] = call
            self.key_of[call.id] = key

    def view(self, rank: int) -> Run:
        """The calls of one rank as a run of its own."""
        mine = [c for c in self.calls if c.rank == rank]
        place = {c.id: i for i, c in enumerate(mine)}
        calls = [
            msgspec.structs.replace(c, id=i, rank=0, parent=place.get(c.parent, -1), scope=self.scope[c.id]) for i, c in enumerate(mine)
        ]  # fmt: skip
        self.viewed = mine
        return Derived(self.run, (), (), calls)

    def holders(self, key: Key, slot: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ranks, records) of a slot of a joined call. A call of all stages of a pipeline is given what the first is, and returns what
        the last does.
        """
        group = self.groups[key]
        found = {rank: r.record for rank, call in sorted(group.items()) for r in call.refs if r.slot == slot}
        kind = slot.partition(".")[0]
        if found and kind != "param" and len({self.stage[r] for r in group}) > 1:
            stage = min(map(self.stage.__getitem__, found)) if kind == "input" else max(map(self.stage.__getitem__, found))
            found = {rank: record for rank, record in found.items() if self.stage[rank] == stage}
        return tuple(found), tuple(found.values())

    def slots(self, key: Key) -> list[str]:
        return list(dict.fromkeys(r.slot for _, call in sorted(self.groups[key].items()) for r in call.refs))

    def parent(self, key: Key) -> Key | None:
        call = next(iter(self.groups[key].values()))
        return self.key_of[call.parent] if call.parent >= 0 else None

    def name_of(self, key: Key, slot: str) -> str:
        return f"{key[4] or key[0]}:{slot}"


class _Joining:
    """Decides how every tensor lies on the ranks of both sides, then makes the joined runs.

    layouts: by side and records of the ranks. stands: records that hold the sum of such summands.
    parted: tensors that every rank should hold alike, and by how much they differ.
    """

    def __init__(self, left: _Side, right: _Side, declared: Sequence[Shard]) -> None:
        self.sides, self.declared = (left, right), tuple(declared)
        self.notes: list[str] = []
        self.layouts: dict[tuple[str, tuple[int, ...]], Layout] = {}
        self.parted: dict[tuple[str, tuple[int, ...]], float] = {}
        self.other: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]] = {}
        self.first: dict[tuple[str, tuple[int, ...]], tuple[Key, str]] = {}
        self.unplaced: dict[str, dict[str, None]] = {left.name: {}, right.name: {}}
        self.families: dict[tuple[Any, ...], Counter[tuple[Layout, Layout]]] = defaultdict(Counter)
        self.stands: dict[tuple[str, tuple[int, ...]], int] = {}
        self._apart: dict[tuple[str, int, int], float] = {}
        self.shown = {left.name: left.ranks[0] if left.ranks else 0, right.name: right.ranks[0] if right.ranks else 0}

    # ---- who faces whom

    def facing(self) -> list[tuple[Key, Key, tuple[tuple[str, str], ...]]]:
        """Groups of calls that face each other, with their pairs of slots, in the order of the reference."""
        left, right = self.sides
        found: dict[Key, tuple[Key, Key, tuple[tuple[str, str], ...]]] = {}
        seen: set[Key] = set()
        for a in left.ranks:
            for b in right.ranks:
                open_left = any(a in ranks and key not in found for key, ranks in left.groups.items())
                open_right = any(b in ranks and key not in seen for key, ranks in right.groups.items())
                if not (open_left and open_right):
                    continue
                one, two = left.view(a), right.view(b)
                for pair in plan(one, two).pairs:
                    mine, theirs = left.key_of[left.viewed[pair.reference].id], right.key_of[right.viewed[pair.target].id]
                    if mine not in found and theirs not in seen:
                        found[mine] = (mine, theirs, tuple((s.reference_slot, s.target_slot) for s in pair.slots))
                        seen.add(theirs)
        order = {key: min(c.order for c in ranks.values()) for key, ranks in left.groups.items()}
        return sorted(found.values(), key=lambda item: order[item[0]])

    def renumber(self) -> None:
        """Layers and experts that a rank counts from 0 again get the numbers that the other side gives to the same parameters."""
        for mine, theirs in ((self.sides[0], self.sides[1]), (self.sides[1], self.sides[0])):
            if len(mine.ranks) < 2:
                continue
            known: dict[tuple[str, str], set[tuple[int, ...]]] = defaultdict(set)
            for call in theirs.calls:
                for ref in call.slots("param"):
                    if print_ := _fingerprint(theirs.run.records[ref.record]):
                        known[starred(call.scope), print_].add(_numbers(call.scope))
            for rank in mine.ranks:
                votes: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
                for call in mine.calls:
                    numbers = _numbers(call.scope)
                    for ref in call.slots("param") if call.rank == rank and numbers else ():
                        print_ = _fingerprint(mine.run.records[ref.record])
                        places = known.get((starred(call.scope), print_), set()) if print_ else set()
                        if len(places) == 1:
                            for i, (a, b) in enumerate(zip(next(iter(places)), numbers, strict=True)):
                                votes[_prefix(starred(call.scope), i), i][a - b] += 1
                for (prefix, i), counted in votes.items():
                    offset, count = counted.most_common(1)[0]
                    if offset and count > 0.6 * counted.total():
                        self._shift(mine, rank, prefix, i, offset)
            mine.group()

    def _shift(self, side: _Side, rank: int, prefix: str, place: int, offset: int) -> None:
        for call in side.calls:
            if call.rank == rank and _prefix(starred(call.scope), place) == prefix:
                side.scope[call.id] = _with_number(side.scope[call.id], place, offset)
        self.notes.append(f"{side.name}: rank {rank} counts {prefix} from 0 again: {offset:+d}")

    def find_stages(self) -> None:
        """Ranks that share no leaf module are stages of a pipeline, in the order in which the other side calls these modules."""
        for mine, theirs in ((self.sides[0], self.sides[1]), (self.sides[1], self.sides[0])):
            leaves = {rank: {mine.scope[c.id] for c in mine.calls if c.leaf and c.rank == rank} for rank in mine.ranks}
            clusters: list[list[int]] = []
            for rank in mine.ranks:
                for cluster in clusters:
                    shared = leaves[rank] & leaves[cluster[0]]
                    fewest = min(len(leaves[rank]), len(leaves[cluster[0]]))
                    if len(shared) > max(fewest > 3, _STAGES * fewest):  # one may be shared by both ends: a tied embedding
                        cluster.append(rank)
                        break
                else:
                    clusters.append([rank])
            if len(clusters) < 2 or not any(len(g) > 1 for g in mine.groups.values()):
                continue  # ranks without a common root are no pipeline
            order = {theirs.scope[c.id]: c.order for c in reversed(theirs.calls)}
            firsts = [min((order[s] for s in leaves[cluster[0]] if s in order), default=math.inf) for cluster in clusters]
            ranked = sorted(range(len(clusters)), key=lambda i: (firsts[i], clusters[i][0]))
            for stage, i in enumerate(ranked):
                mine.stage.update(dict.fromkeys(clusters[i], stage))
            said = ", then ".join(_ranks(clusters[i]) for i in ranked)
            self.notes.append(f"{mine.name}: stages of a pipeline: {said}")

    def parts_of(self, pair: tuple[Key, Key, tuple[tuple[str, str], ...]], faced: dict[str, dict[Key, Key]]) -> bool:
        """Is one of two calls only a part of what the other fuses, of equal extents because that one lies on several ranks?"""
        for i, side in enumerate(self.sides):
            other = self.sides[1 - i]
            for slots in pair[2]:
                slot = slots[i]
                _, records = side.holders(pair[i], slot)
                _, theirs = other.holders(pair[1 - i], slots[1 - i])
                shapes = {side.run.records[r].shape for r in records}
                if not slot.startswith("param") or len(records) < 2 or shapes != {other.run.records[r].shape for r in theirs}:
                    continue
                if any(len(s) != 2 for s in shapes) or any(self.apart(side.name, records[0], r) == 0.0 for r in records[1:]):
                    continue
                without = {side.name: faced[side.name], other.name: {k: v for k, v in faced[other.name].items() if k != pair[1 - i]}}
                if self._fused(side, other, pair[i], slot, (side.name, records), without):
                    return True
        return False

    # ---- how tensors lie

    def decide(self) -> None:
        self.renumber()
        self.find_stages()
        left, right = self.sides
        facing = self.facing()
        faced = {left.name: {f[0]: f[1] for f in facing}, right.name: {f[1]: f[0] for f in facing}}
        facing = [f for f in facing if not self.parts_of(f, faced)]
        for mine, theirs, slots in facing:
            for a, b in sorted(slots, key=lambda pair: not pair[0].startswith("param")):
                self.pair((left, mine, a), (right, theirs, b))
        faced = {left.name: {f[0]: f[1] for f in facing}, right.name: {f[1]: f[0] for f in facing}}
        for side, other in ((left, right), (right, left)):
            if len(side.ranks) > 1:
                self.alone(side, other, faced)
        for side in self.sides:
            self.unreduced(side)
            self.choose(side)
            self.tell(side)

    def pair(self, one: tuple[_Side, Key, str], two: tuple[_Side, Key, str]) -> None:
        """Decide the layouts of two tensors that face each other."""
        held = [side.holders(key, slot) for side, key, slot in (one, two)]
        places = [(side.name, records) for (side, _, _), (_, records) in zip((one, two), held, strict=True)]
        if not all(records for _, records in held) or all(place in self.layouts for place in places):
            return
        records = [[side.run.records[r] for r in found] for (side, _, _), (_, found) in zip((one, two), held, strict=True)]
        shapes = [[r.shape for r in found] for found in records]
        for i, (_, key, slot) in enumerate((one, two)):
            self.first.setdefault(places[i], (key, slot))
            self.other.setdefault(places[i], places[1 - i])
        options = [
            [c for c in self.options(side, key, slot, found, shapes[i]) if self.layouts.get(places[i], c[0]) == c[0]]
            for i, ((side, key, slot), (_, found)) in enumerate(zip((one, two), held, strict=True))
        ]
        combos = [(a, b, shards.fits(s, t)) for a, s in options[0] for b, t in options[1]]
        best = max((fit for _, _, fit in combos), default=0)
        pairs = [(a, b) for a, b, fit in combos if fit == best > 0]
        if not pairs:
            return
        if one[2].startswith("param"):
            pairs = [p for p in pairs if not any(level.how == "sum" for part in p for level in part)] or pairs
        pairs = [p for p in pairs if all(self.summable(places[i], p[i]) for i in (0, 1))] or pairs
        # Where both sides hold pieces, pieces put together along a wrong axis agree too: the simplest layouts that agree are meant.
        pairs.sort(key=_complexity)
        family = (starred(one[1][4]), one[2], starred(two[1][4]), two[2], tuple(shapes[0]), tuple(shapes[1]))
        picked = self.pick(pairs, places, shapes, family, (one, two))
        for place, layout in zip(places, picked, strict=True):
            self.layouts.setdefault(place, layout)
            self.note_parted(place, self.layouts[place])

    def options(self, side: _Side, key: Key, slot: str, held: Sequence[int], shapes: list[Any]) -> list[tuple[Layout, Any]]:
        """Layouts that the shapes of one side allow; the declared one where there is one."""
        name = key[4] or key[0]
        said = [d for d in self.declared if fnmatch.fnmatchcase(name, d.pattern) and fnmatch.fnmatchcase(slot, d.slot)]
        found = shards.candidates(shapes)
        if not said or len(held) < 2:
            return found
        if len({(d.how, d.axis if d.how not in ("replicated", "sum") else 0) for d in said}) > 1:
            raise UsageError(f"{side.name_of(key, slot)}: two declarations contradict each other: {said[0]}; {said[1]}")
        chosen, dims = said[0], len(shapes[0])
        if chosen.how in ("replicated", "sum"):
            if len(set(shapes)) > 1:
                raise UsageError(f"{chosen}: the ranks hold {', '.join(map(str, dict.fromkeys(shapes)))}, which are not one shape")
            return [((Level(chosen.how, len(shapes)),), shapes[0])]
        if not -dims <= chosen.axis < dims:
            raise UsageError(f"{chosen}: {side.name_of(key, slot)} of shape {shapes[0]} has no axis {chosen.axis}")
        axis = chosen.axis % dims
        if len({(s[:axis], s[axis + 1 :]) for s in shapes}) > 1:
            raise UsageError(f"{chosen}: {', '.join(map(str, dict.fromkeys(shapes)))} do not fit together along axis {chosen.axis}")
        if chosen.how == "zigzag" and shapes[0][axis] % 2:
            raise UsageError(
                f"{chosen}: axis {chosen.axis} of {side.name_of(key, slot)} has {shapes[0][axis]} indices, which are not two halves"
            )
        whole = (*shapes[0][:axis], sum(s[axis] for s in shapes), *shapes[0][axis + 1 :])
        return [((Level(chosen.how, len(shapes), axis),), whole)]

    def is_declared(self, key: Key, slot: str) -> bool:
        name = key[4] or key[0]
        return any(fnmatch.fnmatchcase(name, d.pattern) and fnmatch.fnmatchcase(slot, d.slot) for d in self.declared)

    def copies(self, place: tuple[str, tuple[int, ...]], layout: Layout) -> bool:
        """Do ranks that would hold the same tensor hold it, up to rounding?"""
        return all(
            self.apart(place[0], place[1][i], place[1][j]) <= self.rounding(place)
            for near, level in _neighbours(layout, len(place[1])) if level.how == "replicated" for i, j in near
        )  # fmt: skip

    def summable(self, place: tuple[str, tuple[int, ...]], layout: Layout) -> bool:
        """Do ranks that would hold summands hold different tensors? Copies are never to be summed."""
        return not any(
            self.apart(place[0], place[1][i], place[1][j]) <= self.rounding(place)
            for near, level in _neighbours(layout, len(place[1])) if level.how == "sum" for i, j in near
        )  # fmt: skip

    def rounding(self, place: tuple[str, tuple[int, ...]]) -> float:
        return _ROUNDING[(_record(self.run(place[0]), place[1][0])[1]) > 1e-5]

    def run(self, side: str) -> Run:
        return self.sides[0].run if side == self.sides[0].name else self.sides[1].run

    def apart(self, side: str, a: int, b: int) -> float:
        """Relative distance of two records of a run; inf where their figures already say that they have nothing in common."""
        known = self._apart.get((side, a, b))
        if known is None:
            run = self.run(side)
            one, two = run.records[a], run.records[b]
            if a == b or (one.hash and one.hash == two.hash and one.shape == two.shape and one.dtype == two.dtype):
                known = 0.0
            elif one.shape != two.shape or _unlike(one, two):
                known = math.inf
            else:
                try:
                    known = shards.distance(run.array(b), run.array(a))
                except ElementsMissing:
                    known = math.inf
            self._apart[side, a, b] = known
        return known

    def pick(
        self, pairs: list[tuple[Layout, Layout]], places: Sequence[tuple[str, tuple[int, ...]]], shapes: Sequence[list[Any]],
        family: tuple[Any, ...], where: Sequence[tuple[_Side, Key, str]],
    ) -> tuple[Layout, Layout]:  # fmt: skip
        """The pair of layouts whose joined elements are closest; what siblings were confirmed to have where that does not decide."""
        if all(self.is_declared(key, slot) or len(place[1]) == 1 for (_, key, slot), place in zip(where, places, strict=True)):
            return pairs[0]
        if len(pairs) == 1 and all(level.how == "replicated" for part in pairs[0] for level in part):
            return pairs[0]
        votes = self.families[family]
        settled, count = votes.most_common(1)[0] if votes else (pairs[0], 0)
        if count >= _CONFIRMED and len(votes) == 1 and not any(level.how in ("sum", "replicated") for p in pairs for s in p for level in s):
            return settled
        try:
            arrays = [[self.run(name).array(r) for r in records] for name, records in places]
        except ElementsMissing:
            likely = (p for p in pairs if all(self.copies(place, part) for place, part in zip(places, p, strict=True)))
            return settled if votes else next(likely, settled)
        tried: list[tuple[float, tuple[Layout, Layout]]] = []
        for left, right in pairs:
            for one in shards.orders(left, shapes[0]):
                tried += [(_between(one, arrays[0], two, arrays[1]), (one, two)) for two in shards.orders(right, shapes[1])]
        if where[0][2].startswith("param") and all(error > 0 for error, _ in tried):
            tried += self.by_parts(pairs, arrays)
        if where[0][2].startswith("output"):
            tried += [(_between(p[0], arrays[0], p[1], arrays[1]), p) for p in self.as_parameters(pairs, where)]
        best = tried[0]
        for item in tried[1:]:
            if item[0] < _CLEARLY * best[0]:
                best = item
        if best[0] <= _FITS:
            votes[best[1]] += 1
            return best[1]
        return settled

    def by_parts(self, pairs: Sequence[tuple[Layout, Layout]], arrays: Sequence[Sequence[Array]]) -> list[Any]:
        """Parameters whose parts were cut one by one."""
        found = []
        for pair in pairs:
            for i in (0, 1):
                if len(pair[i]) == 1 and pair[i][0].how == "cat" and not pair[1 - i] and len({a.shape for a in arrays[i]}) == 1:
                    axis = pair[i][0].axis
                    if arrays[1 - i][0].ndim != arrays[i][0].ndim:
                        continue
                    blocks = shards.part_order(arrays[i], arrays[1 - i], axis)
                    if blocks:
                        cut = (Level("cat", len(arrays[i]), axis, blocks),)
                        made = (cut, pair[1]) if i == 0 else (pair[0], cut)
                        found.append((_between(made[0], arrays[0], made[1], arrays[1]), made))
        return found

    def as_parameters(self, pairs: Sequence[tuple[Layout, Layout]], where: Sequence[tuple[_Side, Key, str]]) -> Iterator[Any]:
        """Outputs in parts as their call's weight is."""
        for pair in pairs:
            for i, (side, key, _) in enumerate(where):
                blocks = self.blocks_of(side, key)
                if blocks and len(pair[i]) == 1 and pair[i][0].how == "cat":
                    cut = (Level("cat", pair[i][0].size, pair[i][0].axis, blocks),)
                    yield (cut, pair[1]) if i == 0 else (pair[0], cut)

    def blocks_of(self, side: _Side, key: Key) -> tuple[tuple[int, int, int], ...]:
        """The parts in which a call's parameters lie on the ranks along their first axis."""
        for slot in side.slots(key):
            if slot.startswith("param"):
                layout = self.layouts.get((side.name, side.holders(key, slot)[1]), ())
                if len(layout) == 1 and layout[0].blocks and layout[0].axis == 0:
                    return layout[0].blocks
        return ()

    def note_parted(self, place: tuple[str, tuple[int, ...]], layout: Layout) -> None:
        apart = 0.0
        for near, level in _neighbours(layout, len(place[1])):
            if level.how == "replicated":
                apart = max([apart, *(self.apart(place[0], place[1][i], place[1][j]) for i, j in near)])
        if apart:
            self.parted[place] = apart

    # ---- what nothing faces

    def alone(self, side: _Side, other: _Side, faced: dict[str, dict[Key, Key]]) -> None:
        """Layouts of what no tensor of the other side faces: equal on all ranks, cut as its call's weight is, or not known."""
        for key in side.groups:
            for slot in sorted(side.slots(key), key=lambda s: not s.startswith("param")):
                _, records = side.holders(key, slot)
                place = (side.name, records)
                if not records or place in self.layouts:
                    continue
                self.first.setdefault(place, (key, slot))
                shapes = [side.run.records[r].shape for r in records]
                layout = self._alone(side, other, key, slot, place, shapes, faced)
                if layout is None:
                    self.unplaced[side.name][side.name_of(key, slot)] = None
                    layout = (Level("replicated", len(records)),) if len(records) > 1 else ()
                self.layouts[place] = layout

    def _alone(
        self, side: _Side, other: _Side, key: Key, slot: str, place: tuple[str, tuple[int, ...]], shapes: list[Any],
        faced: dict[str, dict[Key, Key]],
    ) -> Layout | None:  # fmt: skip
        n = len(place[1])
        if n == 1:
            return ()
        if any(self.is_declared(key, slot) for _ in self.declared):
            return self.options(side, key, slot, place[1], shapes)[0][0]
        if all(self.apart(side.name, place[1][0], r) == 0.0 for r in place[1][1:]):
            return (Level("replicated", n),)
        if slot.startswith("param"):
            blocks = self._fused(side, other, key, slot, place, faced) if len(set(shapes)) == 1 else ()
            return (Level("cat", n, 0, blocks),) if blocks else None
        weight = next((s for s in side.slots(key) if s.startswith("param") and "weight" in s), "")
        lies = self.layouts.get((side.name, side.holders(key, weight)[1])) if weight else None
        if slot.startswith("output") and lies and len(lies) == 1 and lies[0].how == "cat" and lies[0].axis == 0 and shapes[0]:
            return (Level("cat", n, len(shapes[0]) - 1, lies[0].blocks),)
        layout = (Level("replicated", n),)
        if self.copies(place, layout):
            self.note_parted(place, layout)
            return layout
        return None

    def _fused(
        self, side: _Side, other: _Side, key: Key, slot: str, place: tuple[str, tuple[int, ...]], faced: dict[str, dict[Key, Key]]
    ) -> tuple[tuple[int, int, int], ...]:
        """The parts of a fused parameter (q, k, v in one), found in the parameters of the other side's calls under the same parent."""
        above = side.parent(key)
        across = faced[side.name].get(above) if above is not None else None
        if across is None or not side.run.records[place[1][0]].shape:
            return ()
        taken = set(faced[other.name])
        parts: list[Array] = []
        try:
            ours = [side.run.array(r) for r in place[1]]
            for theirs in sorted(other.groups, key=lambda k: min(c.order for c in other.groups[k].values())):
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

    # ---- sums that nobody adds up, and replicas that differ

    def unreduced(self, side: _Side) -> None:
        """Partial sums that nobody adds up: each rank goes on with its own, so the tensor is what one rank has."""
        sums = [p for p, layout in self.layouts.items() if p[0] == side.name and p in self.first and _is_sum(layout)]
        if not sums:
            return
        readers: dict[tuple[str, tuple[int, ...]], list[Key]] = defaultdict(list)
        for key in side.groups:
            if all(call.leaf for call in side.groups[key].values()):
                for slot in side.slots(key):
                    if slot.startswith("input"):
                        readers[side.name, side.holders(key, slot)[1]].append(key)
        for place in sums:
            key, slot = self.first[place]
            if self.is_declared(key, slot) or self._added_up(side, key, place, readers):
                self._stand_in(side, key, place, readers)
                continue
            whole = tuple(Level("replicated", level.size) if level.how == "sum" else level for level in self.layouts[place])
            self.layouts[place] = whole
            self.note_parted(place, whole)
            self.notes.append(f"{side.name}: each rank holds a partial sum of {side.name_of(key, slot)}, and no call adds them up")

    def _added_up(
        self, side: _Side, key: Key, place: tuple[str, tuple[int, ...]], readers: dict[tuple[str, tuple[int, ...]], list[Key]]
    ) -> bool:  # fmt: skip
        """Does what is made of these summands come out whole on all ranks: of the modules that read them, else of the calls around?"""
        for reader in readers.get(place, ()):
            for made in self._outputs(side, reader, place):
                if not (self._added_up(side, reader, made, readers) if _is_sum(self.layouts[made]) else self._is_whole(made)):
                    return False
        if place in readers:
            return True
        above = side.parent(key)
        while above is not None:
            found = [p for p in self._outputs(side, above, place) if not _is_sum(self.layouts[p])]
            if found:
                return all(map(self._is_whole, found))
            above = side.parent(above)
        return False

    def _stand_in(
        self, side: _Side, key: Key, place: tuple[str, tuple[int, ...]], readers: dict[tuple[str, tuple[int, ...]], list[Key]]
    ) -> None:
        """The sum as the ranks made it, where that is the sum of these summands but for the rounding of adding them up."""
        if len(self.layouts[place]) != 1:
            return
        around: list[tuple[str, tuple[int, ...]]] = []
        above = side.parent(key)
        while above is not None and not around:
            around = self._outputs(side, above, place)
            above = side.parent(above)
        made = [p for reader in readers.get(place, ()) for p in self._outputs(side, reader, place)]
        run = side.run
        record, u = _record(run, place[1][0])
        for other in (*made, *around):
            if self.parted.get(other) or {level.how for level in self.layouts[other]} != {"replicated"}:
                continue
            if run.records[other[1][0]].shape != record.shape:
                continue
            try:
                parts = np.stack([run.array(r).astype(np.float64) for r in place[1]])
                error = np.abs(run.array(other[1][0]).astype(np.float64) - parts.sum(0))
            except ElementsMissing:
                return
            if u and np.all(error <= len(parts) * u * np.abs(parts).sum(0)):
                self.stands[place] = other[1][0]
                return

    def _outputs(self, side: _Side, key: Key, but: tuple[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
        """What a call returns, but for one tensor."""
        found = [(side.name, side.holders(key, slot)[1]) for slot in side.slots(key) if slot.startswith("output")]
        return [p for p in found if p != but and p in self.layouts]

    def _is_whole(self, place: tuple[str, tuple[int, ...]]) -> bool:
        """Have all ranks the same, or pieces of what the other side has?"""
        if any(level.how != "replicated" for level in self.layouts[place]) and place in self.other:
            name, records = self.other[place]
            try:
                mine, theirs = ([self.run(n).array(r) for r in ids] for n, ids in (place, (name, records)))
                return _between(self.layouts[place], mine, self.layouts[name, records], theirs) <= _FITS
            except (ElementsMissing, KeyError):
                return True
        return self.parted.get(place, 0.0) <= self.rounding(place)

    def choose(self, side: _Side) -> None:
        """Which rank stands for all where they should be alike: the first, or the one that is furthest off where only some are."""
        beyond = [p for p, apart in self.parted.items() if p[0] == side.name and apart > self.rounding(p) and p in self.first]
        rounded = [(p, apart) for p, apart in self.parted.items() if p[0] == side.name and 0 < apart <= self.rounding(p)]
        if rounded:
            largest = max(apart for _, apart in rounded)
            count = f"{len(rounded)} tensors" if len(rounded) > 1 else "1 tensor"
            self.notes.append(f"{side.name}: replicas of {count} are not bit-equal: they differ by up to {largest:.2g}, as by rounding")
        if not beyond:
            return

        def begun(place: tuple[str, tuple[int, ...]]) -> tuple[int, bool]:
            key, slot = self.first[place]
            return min(c.order for c in side.groups[key].values()), not slot.startswith("input")

        made = [p for p in beyond if not self.first[p][1].startswith("input")] or beyond
        leaves = [p for p in made if next(iter(side.groups[self.first[p][0]].values())).leaf] or made
        place = min(leaves, key=begun)
        key, slot = self.first[place]
        ranks, _ = side.holders(key, slot)
        errors = self._from_other(place)
        if errors and max(errors) > 2 * min(errors):
            self.shown[side.name] = ranks[max(range(len(ranks)), key=errors.__getitem__)]
        else:
            self.shown[side.name] = ranks[0]
        try:
            size = max(shards.distance(side.run.array(r), side.run.array(place[1][0])) for r in place[1][1:])
            apart = f" (rel_l2 {size:.2g})"
        except ElementsMissing:
            apart = ""
        self.notes.append(
            f"{side.name}: replicas differ from {side.name_of(key, slot)} on{apart}: rank {self.shown[side.name]} stands for all"
        )  # fmt: skip

    def _from_other(self, place: tuple[str, tuple[int, ...]]) -> list[float]:
        """How far each rank's replica is from what faces it."""
        if place not in self.other:
            return []
        name, records = self.other[place]
        try:
            theirs = [self.run(name).array(r) for r in records]
            made = _apply(self.layouts[name, records], theirs)
            return [shards.distance(self.run(place[0]).array(r), made) for r in place[1]]
        except (ElementsMissing, KeyError):
            return []

    def tell(self, side: _Side) -> None:
        if len(side.ranks) < 2:
            return
        counted = Counter(shards.words(layout) for (name, records), layout in self.layouts.items() if name == side.name and layout)
        said = ", ".join(f"{count} {what}" for what, count in counted.most_common())
        self.notes.insert(0, f"{side.name}: {len(side.ranks)} ranks joined{f': {said}' if said else ''}")
        if unknown := list(self.unplaced[side.name]):
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            self.notes.append(
                f"{side.name}: how {', '.join(unknown[:3])}{more} lie on the ranks is not known: the ranks differ and nothing faces them; "
                f"rank {self.shown[side.name]}'s is shown"
            )  # fmt: skip

    # ---- the joined run

    def build(self, side: _Side) -> Run:
        """One run of one rank."""
        making, shown = Making(side.run), self.shown[side.name]
        lead = {key: group.get(shown) or group[min(group)] for key, group in side.groups.items()}
        keys = sorted(side.groups, key=_position(side, lead).__getitem__)
        place = {key: i for i, key in enumerate(keys)}
        calls = []
        for key in keys:
            call, parent = lead[key], side.parent(key)
            refs, pieces, parted = self._refs(side, making, key, call)
            notes = (*call.notes, *([f"{PIECES}{len(side.groups[key])} ranks hold"] if pieces else []))
            if parted and shown in side.groups[key]:
                notes = (*notes, f"{SHOWN}{shown}")
            calls.append(
                msgspec.structs.replace(
                    call,
                    id=place[key],
                    order=place[key],
                    rank=0,
                    scope=key[4],
                    refs=refs,
                    notes=notes,
                    parent=place[parent] if parent is not None else -1,
                    leaf=all(c.leaf for c in side.groups[key].values()),
                )
            )
        return making.done(calls)

    def _refs(self, side: _Side, making: Making, key: Key, lead: Call) -> tuple[tuple[Ref, ...], bool, bool]:
        edges = {r.slot: r.edge for r in lead.refs}
        refs: list[tuple[Ref, Layout, float]] = []
        for slot in side.slots(key):
            ranks, records = side.holders(key, slot)
            place = (side.name, records)
            layout = self.layouts.get(place, ())
            record = self.stands[place] if place in self.stands else self._made(side, making, ranks, records, layout)
            refs.append((Ref(slot, record, edges.get(slot, "")), layout, self.parted.get(place, 0.0)))
        # A call whose ranks worked on different inputs and left pieces is not one call on one input.
        pieces = any(level.how != "replicated" for _, layout, _ in refs for level in layout)
        limit = _MIXED * max((_record(side.run, r.record)[1] for _, call in side.groups[key].items() for r in call.refs), default=0.0)
        kept = tuple(r for r, _, apart in refs if not (pieces and apart > limit and r.slot.startswith("input")))
        return kept, pieces, any(apart > limit for _, _, apart in refs)

    def _made(self, side: _Side, making: Making, ranks: Sequence[int], records: Sequence[int], layout: Layout) -> int:
        if len(records) == 1 or not layout:
            return records[0]
        shown = self.shown[side.name]
        node = shards.node(layout, [side.run.records[r].shape for r in records], ranks.index(shown) if shown in ranks else 0)
        expression, bound = shards.bound_to(node, records)
        try:
            return making.add(expression, bound, f"{shards.words(layout)}{ON_RANKS}")
        except Unfit as error:  # ranks of different dtypes
            self.notes.append(f"{side.name}: {error}; rank {ranks[0]}'s is shown")
            return records[0]


def _position(side: _Side, lead: dict[Key, Call]) -> dict[Key, tuple[Any, ...]]:
    """Where each joined call stands: as on the rank that is shown; what only others have, behind the last call they share with it."""
    found: dict[Key, tuple[Any, ...]] = {}
    by_rank: dict[int, list[Call]] = defaultdict(list)
    for call in sorted(side.calls, key=lambda c: c.order):
        by_rank[call.rank].append(call)
    main = lead[next(iter(side.groups))].rank
    roots: dict[Key, int] = {}
    for rank in sorted(by_rank, key=lambda r: (r != main, side.stage[r], r)):
        root, last = -1, -1
        for k, call in enumerate(by_rank[rank]):
            key = side.key_of[call.id]
            if call.parent < 0:
                root = roots.setdefault(key, call.order if rank == main else max([*roots.values(), root], default=-1) + 1)
            if key in found:
                last = found[key][3]
            else:
                found[key] = (
                    root,
                    call.parent >= 0,
                    side.stage[rank],
                    call.order if rank == main else last,
                    rank if rank != main else -1,
                    k,
                )
    return found


def _is_sum(layout: Layout) -> bool:
    return any(level.how == "sum" for level in layout)


def _complexity(pair: tuple[Layout, Layout]) -> tuple[int, ...]:
    levels = [level.how for part in pair for level in part]
    return levels.count("sum"), len(levels), len(levels) - levels.count("replicated")


def _neighbours(layout: Layout, n: int) -> Iterator[tuple[list[tuple[int, int]], Level]]:
    """For each level, places of ranks that differ in that level only: the first of each line with every other of it."""
    inner = n
    for level in layout:
        outer, inner = inner, inner // level.size
        lines = [base + off for base in range(0, n, outer) for off in range(inner)]
        yield [(at, at + inner * i) for at in lines for i in range(1, level.size)], level


def _between(one: Layout, left: Sequence[Array], two: Layout, right: Sequence[Array]) -> float:
    return shards.distance(_apply(one, left), _apply(two, right))


def _apply(layout: Layout, arrays: Sequence[Array]) -> Array:
    bound = {f"r{i}": [a] for i, a in enumerate(arrays)}
    return shards.node(layout, [a.shape for a in arrays]).apply(bound)


def _record(run: Run, record: int) -> tuple[Record, float]:
    found = run.records[record]
    kind = dtypes.DTYPES.get(found.dtype)
    return found, (kind.unit_roundoff or 0.0) if kind is not None else 0.0


def _unlike(one: Record, two: Record) -> bool:
    """Do the norms alone say that these are two tensors?"""
    a, b = (r.statistics.norm if r.statistics is not None else None for r in (one, two))
    return a is not None and b is not None and abs(a - b) > 0.2 * max(a, b)


def _fingerprint(record: Record) -> str:
    return record.hash and f"{record.hash} {record.shape}" if record.count > 1 and not _constant(record) else ""


def _constant(record: Record) -> bool:
    """Parameters that are one value throughout (norms that were never trained) tell no layer from another."""
    return record.statistics is not None and record.statistics.min == record.statistics.max


def _numbers(scope: str) -> tuple[int, ...]:
    return tuple(int(part) for part in scope.split(".") if part.isdigit())


def _prefix(scope: str, place: int) -> str:
    """The starred scope up to its number at `place`; "" when it has none."""
    parts = scope.split(".")
    stars = [i for i, part in enumerate(parts) if part == "*"]
    return ".".join(parts[: stars[place] + 1]) if place < len(stars) else ""


def _with_number(scope: str, place: int, offset: int) -> str:
    parts = scope.split(".")
    at = [i for i, part in enumerate(parts) if part.isdigit()][place]
    parts[at] = str(int(parts[at]) + offset)
    return ".".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = list(range(ranks[0], ranks[-1] + 1)) == list(ranks) and len(ranks) > 2
    return f"ranks {ranks[0]} to {ranks[-1]}" if listed else f"ranks {', '.join(map(str, ranks))}"
