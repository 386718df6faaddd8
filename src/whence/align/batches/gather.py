"""Calls gathered from pieces of several: the rows and tokens of one sequence, cut from the batches
and steps it went through.

Which axis of a tensor is the batch and which the tokens is read off its extents: they follow those
of the tokens the root was given, over all calls of the module.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from whence.align.batches.positions import WITH_PLAIN
from whence.align.batches.sequences import Fed, Piece, followers, is_cache, is_position
from whence.align.derived_run import DerivedTensors
from whence.align.dims import Cat, Cut, Name, Node, Pad, Star, Take, Unfit
from whence.align.module_names import normal_scope
from whence.records import Call, Ref
from whence.records.slots import is_mutated, is_output, is_param

Line = Sequence[Piece]
Shape = tuple[int, ...]
Place = tuple[str, str, int, str]


class SeenTokens(NamedTuple):
    """One sight of a slot: its shape, and what the root was given then. total: tokens it could see,
    with those cached.

    batch: None in a flattened batch. rows: of the batch, however it lies. fronts: extents of an
    axis in front of batch and tokens that this tensor may have: positions of several axes do, and
    what is made of them.
    """

    shape: tuple[int, ...]
    batch: int | None
    width: int
    total: int
    rows: int = 1
    fronts: frozenset[int] = frozenset()

    def has_front(self) -> bool:
        """Does this tensor lie behind an axis of positions?"""
        if len(self.shape) < 2 or self.shape[0] not in self.fronts:
            return False
        if self.batch is None:
            return self.shape[1] == self.width
        return (
            len(self.shape) > 2 and self.shape[1] in (1, self.batch) and self.shape[2] == self.width
        )


@dataclass(frozen=True, slots=True)
class Axes:
    """Where the rows, the new tokens and the tokens that can be seen lie in a tensor; None where it
    has no such axis.

    last: the axis of new tokens where only the last of a call is there (the scores of a
    generation); of a flattened batch it has the last of every row. flat: one axis of all rows'
    tokens.
    """

    batch: int | None = None
    token: int | None = None
    seen: int | None = None
    last: int | None = None
    flat: int | None = None

    def __len__(self) -> int:
        return sum(
            axis is not None for axis in (self.batch, self.token, self.seen, self.last, self.flat)
        )


def fits(axes: Axes, sights: Sequence[SeenTokens]) -> bool:
    """Could a tensor of these extents have these axes?"""
    return all(
        max(
            (k for k in (axes.batch, axes.token, axes.seen, axes.last, axes.flat) if k is not None),
            default=-1,
        )
        < len(s.shape)
        and (axes.batch is None or s.shape[axes.batch] == s.batch)
        and (axes.token is None or s.shape[axes.token] == s.width)
        and (axes.seen is None or s.shape[axes.seen] == s.total)
        and axes.last is None
        and axes.flat is None
        for s in sights
    )


def axes(slot: str, boolean: bool, sights: Sequence[SeenTokens]) -> Axes | None:
    """The axes of a slot from all sights of it; None when they do not follow what the root was
    given.

    The batch is one of the first two axes. Attention masks have both an axis of new tokens and one
    of all that can be seen, caches only the latter.
    """
    dims = {len(s.shape) for s in sights}
    if len(dims) != 1:
        return None
    count = dims.pop()
    if all(s.has_front() for s in sights):
        return _behind(sights)
    varied = [k for k in range(count) if len({s.shape[k] for s in sights}) > 1]
    both = any((s.batch or 1) > 1 and s.width > 1 for s in sights)
    if both and count and all(s.shape[0] == (s.batch or 1) * s.width for s in sights):
        # Rows and tokens in one axis, as routers of experts have them: no other axis is one of
        # these then.
        return Axes(flat=0) if varied in ([], [0]) else None
    rows = [k for k in range(min(2, count)) if all(s.shape[k] == s.batch for s in sights)]
    if rows[:1] == [1] and not (
        any(s.width > 1 for s in sights) and all(s.shape[0] == s.width for s in sights)
    ):
        rows = []  # behind one axis that is no tokens: heads, as many as rows by chance
    batch = next(iter(rows), None)
    mask = boolean or "mask" in slot or "bias" in slot
    new = [k for k in range(count) if k != batch and all(s.shape[k] == s.width for s in sights)]
    all_ = [k for k in range(count) if k != batch and all(s.shape[k] == s.total for s in sights)]
    seen = next((k for k in all_ if k in varied and k not in new), None)
    token = next(iter(new), None) if seen is None or mask else None
    if seen is None and token is not None:
        # Masks have it also where nothing varies, attention weights where it does.
        seen = next((k for k in all_ if k != token and (mask or k in varied)), None)
    if (
        token is None
        and seen is None
        and all(s.batch is None for s in sights)
        and any(s.width > s.rows for s in sights)
    ):
        last = next(
            (k for k in range(count - 1) if all(s.shape[k] == s.rows for s in sights)), None
        )
        if last is not None:
            return Axes(last=last) if set(varied) <= {last} else None
    cache = count > 2 and (is_cache(slot) or is_mutated(slot))
    if any(k not in (batch, token, seen) for k in varied) or (
        cache and token is None and seen is None
    ):
        return None  # a cache of fixed length holds what came last
    one = [k for k in range(count - 1) if k != batch and all(s.shape[k] == 1 for s in sights)]
    alone = token is None and seen is None and count > 2 and any(s.width > 1 for s in sights)
    return Axes(batch, token, seen, next(iter(one), None) if alone else None)


def _behind(sights: Sequence[SeenTokens]) -> Axes | None:
    """The axes of a tensor that has its batch and tokens behind an axis of positions."""
    flat = any(s.batch is None for s in sights)
    token, batch = (
        (1, None) if flat else (2, 1 if all(s.shape[1] == s.batch for s in sights) else None)
    )
    varied = [k for k in range(len(sights[0].shape)) if len({s.shape[k] for s in sights}) > 1]
    return Axes(batch, token) if all(k in (batch, token) for k in varied) else None


class SequenceGatherer:
    """The calls of one side, as units are gathered from them. New calls take the place of those
    they were made from.
    """

    def __init__(
        self,
        making: DerivedTensors,
        calls: Sequence[Call],
        given: Mapping[int, Fed],
        totals: Mapping[int, int],
        rows: Mapping[int, int],
    ) -> None:
        self.making, self._given, self._totals, self._rows = making, given, totals, rows
        self._trees: dict[int, list[Call]] = {root: [] for root in given}
        roots: dict[int, int] = {}
        behind = followers(calls)
        for call in sorted(calls, key=lambda c: c.order):
            roots[call.id] = (
                behind.get(call.id, call.id) if call.parent == -1 else roots.get(call.parent, -1)
            )
            if roots[call.id] in self._trees:
                self._trees[roots[call.id]].append(call)
        self._axes: dict[tuple[Any, ...], Axes | None] = {}
        self._sights: dict[tuple[Any, ...], list[SeenTokens]] | None = None
        self.other: SequenceGatherer | None = None  # the other run's
        self._by_place: dict[Place, Axes | None] | None = None
        self._lasts: set[Place] | None = None
        self._shapes: Mapping[Place, tuple[int, ...]] = {}
        self._places: dict[int, dict[tuple[Any, ...], Call]] = {}

    def is_call(self, lines: Sequence[Line]) -> bool:
        """Are these all rows and tokens of one call as it is?"""
        given = self._given[lines[0][0].call]
        return (
            all(len(line) == 1 for line in lines)
            and not given.flat
            and self._all_rows(lines)
            and (lines[0][0].start, lines[0][0].stop) == (0, given.width)
        )

    def tree(self, root: int) -> list[Call]:
        """A root call, all below it and what follows it, in the order they began."""
        return self._trees[root]

    def lasts(self) -> set[Place]:
        """The slots that hold the last token of each call only."""
        if self._lasts is None:
            calls = [call for root in self._given for call in self.tree(root)]
            found = {
                (c.root, c.scope, c.op, c.occurrence, r.slot): (c, r.slot)
                for c in calls
                for r in c.refs
            }
            self._lasts = set()
            for call, slot in found.values():
                if (
                    not is_param(slot)
                    and (axes := self._axes_of(call, slot)) is not None
                    and axes.last is not None
                ):
                    self._lasts.add(_place(call, slot))
        return self._lasts

    def scored_by(self, other: SequenceGatherer) -> set[Place]:
        """The slots of the other run that hold scores of all tokens, of which this one's have the
        last: in a call behind the root.

        They are what the other's root returns, as wide as what is behind this one's root, and the
        call that makes it.
        """
        own, (root, *below) = (g.tree(next(iter(g._given))) for g in (self, other))
        behind = {
            self._width(r)
            for c in own
            if c.parent == -1
            for r in c.slots("output")
            if c.scope and _place(c, r.slot) in self.lasts()
        }
        behind -= {self._width(r) for r in own[0].slots("output")}
        returned = [
            r
            for r in root.slots("output")
            if other._width(r) in behind and _place(root, r.slot) not in other.lasts()
        ]
        scores = {r.record for r in returned}
        made_by = [
            c for c in below if c.leaf and any(r.record in scores for r in c.slots("output"))
        ]
        return {_place(root, r.slot) for r in returned} | {
            _place(c, r.slot) for c in made_by for r in c.refs if not is_param(r.slot)
        }

    def _width(self, ref: Ref) -> int:
        """Channels of a tensor."""
        shape = self.making.record(ref.record).shape
        return shape[-1] if len(shape) > 1 else 0

    def gathered(
        self,
        lines: Sequence[Line],
        *,
        step: int,
        micro: int,
        note: str,
        other: tuple[set[Place], Sequence[int]] = (set(), ()),
        shapes: Mapping[Place, tuple[int, ...]] | None = None,
    ) -> list[Call]:
        """The calls of one unit. lines: the pieces of every row of the batch it has, in order. Ids
        are those of the longest piece's.

        other: slots of which the other run has only the last token of each call, and which tokens
        of the sequence these are. shapes: of the other run's tensors, where it has slots of these
        names.
        """
        self._shapes = shapes or {}
        longest = max(
            range(len(lines[0])), key=lambda i: (lines[0][i].stop - lines[0][i].start, -i)
        )
        out = []
        for call in self.tree(lines[0][longest].call):
            refs = []
            for ref in call.refs:
                record = (
                    ref.record if is_param(ref.slot) else self._record(call, ref.slot, lines, other)
                )
                if record is not None:
                    refs.append(Ref(ref.slot, record, ref.edge))
            lost = call.leaf and call.slots("output") and not any(is_output(r.slot) for r in refs)
            if not lost:  # else a call without a partner, which runs again as part of the one above
                out.append(
                    msgspec.structs.replace(
                        call, refs=tuple(refs), step=step, micro=micro, notes=(*call.notes, note)
                    )
                )
        return out

    def _record(
        self, call: Call, slot: str, lines: Sequence[Line], other: tuple[set[Place], Sequence[int]]
    ) -> int | None:
        """The tensor of a slot, made from all pieces; None where it cannot be."""
        found = self._axes_of(call, slot)
        if found is None:
            return None
        theirs = (
            other[1]
            if other[0] and (found.last is not None or _place(call, slot) in other[0])
            else None
        )
        place = (call.scope, call.op, call.occurrence)
        records: dict[int, int] = {}
        for piece in (p for line in lines for p in line):
            there = self._place(piece.call).get(place)
            record = (
                next((r.record for r in there.refs if r.slot == slot), None)
                if there is not None
                else None
            )
            if record is None:
                return None
            records[piece.call] = record
        try:
            return self._made(found, lines, records, theirs, self._shapes.get(_place(call, slot)))
        except Unfit:
            return None

    def _made(
        self,
        axes: Axes,
        lines: Sequence[Line],
        records: Mapping[int, int],
        theirs: Sequence[int] | None,
        wanted_shape: Shape | None,
    ) -> int | None:
        mine = ends(lines[0])
        wanted = (
            [at for at in mine if theirs is None or at in theirs]
            if axes.last is not None
            else list(theirs or ())
        )
        if axes.last is not None:
            # Of each call its last token: one token each, and those of the sequence that both runs
            # have.
            lines = [
                [
                    self._last(p)
                    for p, at in zip(line, _ends(line), strict=True)
                    if p.whole and at in wanted
                ]
                for line in lines
            ]
            if not lines[0]:
                return None
            return self._joined(Axes(axes.batch, axes.last), lines, records, wanted_shape)
        if theirs is not None and axes.token is not None:
            made = self._joined(axes, lines, records, None)
            if made is None:
                return None
            return self.making.add(Take(Name("x"), tuple(wanted), axes.token), {"x": [made]})
        return self._joined(axes, lines, records, wanted_shape)

    def _last(self, piece: Piece) -> Piece:
        """Where its last token lies among those of all rows."""
        at = piece.row if self._given[piece.call].flat else 0
        return piece._replace(start=at, stop=at + 1)

    def _joined(
        self, axes: Axes, lines: Sequence[Line], records: Mapping[int, int], wanted: Shape | None
    ) -> int | None:
        calls = list(dict.fromkeys(p.call for line in lines for p in line))
        stacked = next(
            (axis for axis in (axes.batch, axes.flat, axes.token) if axis is not None), None
        )
        if stacked is None and axes.seen is None:
            return self._as_it_is(lines[0][0], records, wanted)
        names = {call: "x" if len(calls) == 1 else f"s{i}" for i, call in enumerate(calls)}
        if len(lines) == 1:
            return self._add(
                self._line(axes, lines[0], names, records, cut_row=True), names, records
            )
        if self._all_rows(lines) and (axes.batch is not None or self._whole(lines)):
            return self._add(
                self._line(axes, lines[0], names, records, cut_row=False), names, records
            )
        shared = self._line(axes, lines[0], names, records, cut_row=True)
        if stacked is None:
            return self._add(shared, names, records)
        every = Cat(
            tuple(self._line(axes, line, names, records, cut_row=True) for line in lines), stacked
        )
        bound = {names[call]: [self.making.record(records[call]).shape] for call in calls}
        if wanted is not None and every.shape(bound) == wanted:
            return self._add(every, names, records)
        if (
            (wanted is not None and shared.shape(bound) == wanted)
            or axes.batch is None
            or self._shared(axes, lines, records)
        ):
            return self._add(shared, names, records)
        return self._add(every, names, records)

    def _as_it_is(
        self, piece: Piece, records: Mapping[int, int], wanted: Shape | None
    ) -> int | None:
        """A tensor that follows neither rows nor tokens; None where it has other extents than
        across: tokens sorted by experts.
        """
        record = records[piece.call]
        return record if wanted is None or self.making.record(record).shape == wanted else None

    def _add(self, node: Node, names: Mapping[int, str], records: Mapping[int, int]) -> int:
        used = _names(node)
        bound = {name: [records[call]] for call, name in names.items() if name in used}
        node = _starred(node, bound)
        if isinstance(node, Cat) and any(isinstance(p, Star) for p in node.parts):
            bound = {"steps": [ids[0] for ids in bound.values()]}
        return self.making.add(node, bound)

    def _shared(self, axes: Axes, lines: Sequence[Line], records: Mapping[int, int]) -> bool:
        """Rows that went through calls of their own and have one and the same tensor there, as
        positions are: no batch at all.
        """
        found = [self.making.record(records[line[0].call]) for line in lines]
        alone = all(r.shape[axes.batch or 0] == 1 for r in found) and len(
            {line[0].call for line in lines}
        ) == len(lines)
        return alone and bool(found[0].hash) and len({r.hash for r in found}) == 1

    def _whole(self, lines: Sequence[Line]) -> bool:
        """Are these all tokens of their calls?"""
        return (
            all((p.start, p.stop) == (0, self._given[p.call].width) for line in lines for p in line)
            and len(lines[0]) == 1
        )

    def _all_rows(self, lines: Sequence[Line]) -> bool:
        """Are these all rows of their calls in order, with the same tokens of each?"""
        return (
            all(
                len({(p.call, p.start, p.stop) for p in pieces}) == 1
                and [p.row for p in pieces] == list(range(self._given[pieces[0].call].batch))
                for pieces in zip(*lines, strict=True)
            )
            and len({len(line) for line in lines}) == 1
        )

    def _line(
        self,
        axes: Axes,
        line: Line,
        names: Mapping[int, str],
        records: Mapping[int, int],
        *,
        cut_row: bool,
    ) -> Node:
        """One row from its pieces."""
        first, last = line[0], line[-1]
        if axes.token is None and axes.flat is None and axes.seen is not None:
            # A cache: the last one holds what was there before.
            return self._piece(
                axes,
                last,
                names,
                records,
                first.start,
                cut_row=cut_row,
                stop=first.start + sum(p.stop - p.start for p in line),
            )
        along = axes.token if axes.token is not None else axes.flat
        if along is None:
            return self._piece(axes, first, names, records, first.start, cut_row=cut_row)
        parts = [self._piece(axes, p, names, records, first.start, cut_row=cut_row) for p in line]
        if axes.seen is not None:
            to = last.total - first.start
            parts = [
                Pad(p, axes.seen, to, "lowest") if piece.total < last.total else p
                for p, piece in zip(parts, line, strict=True)
            ]
        return parts[0] if len(parts) == 1 else Cat(tuple(parts), along)

    def _piece(
        self,
        axes: Axes,
        piece: Piece,
        names: Mapping[int, str],
        records: Mapping[int, int],
        pad: int,
        *,
        cut_row: bool,
        stop: int = 0,
    ) -> Node:
        shape = self.making.record(records[piece.call]).shape
        keys: list[Any] = [slice(None)] * len(shape)
        if axes.batch is not None and cut_row and shape[axes.batch] > 1:
            keys[axes.batch] = slice(piece.row, piece.row + 1)
        if axes.token is not None and (piece.start, piece.stop) != (0, shape[axes.token]):
            keys[axes.token] = slice(piece.start, piece.stop)
        if axes.flat is not None and cut_row and shape[axes.flat] != piece.stop - piece.start:
            before = piece.row * self._given[piece.call].width
            keys[axes.flat] = slice(before + piece.start, before + piece.stop)
        if axes.seen is not None and (pad, stop or piece.total) != (0, shape[axes.seen]):
            keys[axes.seen] = slice(pad, stop or piece.total)
        name = Name(names[piece.call])
        return Cut(name, tuple(keys)) if any(k != slice(None) for k in keys) else name

    def _place(self, root: int) -> dict[tuple[Any, ...], Call]:
        found = self._places.get(root)
        if found is None:
            found = self._places[root] = {(c.scope, c.op, c.occurrence): c for c in self.tree(root)}
        return found

    def _axes_of(self, call: Call, slot: str) -> Axes | None:
        key = (call.root, call.scope, call.op, call.occurrence, slot)
        if key not in self._axes:
            if self._sights is None:
                self._sights = self._seen()
            record = next(r.record for r in call.refs if r.slot == slot)
            own = axes(slot, self.making.record(record).dtype == "bool", self._sights[key])
            theirs = self.other.told(_place(call, slot)) if self.other is not None else None
            if (
                own is not None
                and theirs is not None
                and fits(theirs, self._sights[key])
                and len(theirs) > len(own)
            ):
                own = theirs  # where lengths vary more is known
            self._axes[key] = own
        return self._axes[key]

    def told(self, place: Place) -> Axes | None:
        """The axes of a slot by its name, from this run's own sights."""
        if self._by_place is None:
            if self._sights is None:
                self._sights = self._seen()
            self._by_place = {}
            for (_, scope, op, occurrence, slot), sights in self._sights.items():
                self._by_place[normal_scope(scope), op, occurrence, slot] = axes(
                    slot, False, sights
                )
        return self._by_place.get(place)

    def _seen(self) -> dict[tuple[Any, ...], list[SeenTokens]]:
        """Every sight of every slot below the roots that were given something."""
        out: dict[tuple[Any, ...], list[SeenTokens]] = defaultdict(list)
        for root, given in self._given.items():
            batch = None if given.flat else given.batch
            fronts = self._fronts(root)
            for call in self.tree(root):
                for ref in call.refs:
                    if not is_param(ref.slot):
                        record = self.making.record(ref.record)
                        own = (
                            fronts
                            if fronts and _says_positions(call, ref.slot, record.dtype)
                            else fronts - {batch}
                        )
                        out[call.root, call.scope, call.op, call.occurrence, ref.slot].append(
                            SeenTokens(
                                record.shape,
                                batch,
                                given.width,
                                self._totals[root],
                                self._rows.get(root, 1),
                                own,
                            )
                        )
        return out

    def _fronts(self, root: int) -> frozenset[int]:
        """How many numbers a token's position has in the calls of a root, as extents of an axis in
        front of batch and tokens.
        """
        given = self._given[root]
        behind = [(given.width,)] if given.flat else [(n, given.width) for n in {1, given.batch}]
        slots = (r for c in self.tree(root) for r in c.slots("input") if is_position(r.slot))
        shapes = {self.making.record(r.record).shape for r in slots}
        found = {s[0] for s in shapes if s and s[1:] in behind}
        # Below the call that takes the plain position from the front, one axis less.
        return frozenset(found | {n - 1 for n in found if n == WITH_PLAIN})


def _says_positions(call: Call, slot: str, dtype: str) -> bool:
    """Are these positions or what is made of them, by dtype and names? Where there are as many rows
    as axes the extents do not tell.
    """
    name = f"{call.scope.rpartition('.')[2]}:{slot}"
    return dtype in ("int64", "int32") or any(
        word in name for word in ("position", "rotary", "rope")
    )


def ends(line: Line) -> list[int]:
    """Which tokens of its sequence are the last of a call, for one row."""
    return [at for piece, at in zip(line, _ends(line), strict=True) if piece.whole]


def _ends(line: Line) -> list[int]:
    return [total - 1 for total in itertools.accumulate(p.stop - p.start for p in line)]


def shapes_of(calls: Iterable[Call], making: DerivedTensors) -> dict[Place, Shape]:
    """The shape of every tensor of the calls of one unit, by the name of its slot."""
    return {_place(c, r.slot): making.record(r.record).shape for c in calls for r in c.refs}


def _place(call: Call, slot: str) -> Place:
    return (normal_scope(call.scope), call.op, call.occurrence, slot)


def _names(node: Node) -> set[str]:
    if isinstance(node, Name | Star):
        return {node.name}
    if isinstance(node, Cut | Pad):
        return _names(node.of)
    return set().union(*(_names(p) for p in node.parts)) if isinstance(node, Cat) else set()


def _starred(node: Node, bound: Mapping[str, Sequence[int]]) -> Node:
    """`cat(s0, s1, s2, axis=1)` written as `cat(*steps, axis=1)`."""
    if (
        isinstance(node, Cat)
        and len(node.parts) > 1
        and tuple(Name(n) for n in bound) == node.parts
    ):
        return Cat((Star("steps"),), node.axis)
    return node
