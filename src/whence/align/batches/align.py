"""Brings runs that batched, padded or cached the same sequences differently to one form."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from whence.align.batches.batch import Batch, batches_of, is_position
from whence.align.batches.positions import WITH_PLAIN
from whence.align.batches.sequences import (
    Match,
    Piece,
    TokenSequence,
    followers,
    matched,
    same_batches,
    sequences_of,
)
from whence.align.call_sites import coarser_input, match_roots, selected
from whence.align.derived_run import DerivedTensors
from whence.align.dims import Cat, Cut, Name, Node, Pad, Star, Take, Unfit
from whence.align.dims import names as names_in
from whence.align.module_names import normal_scope
from whence.display import listed
from whence.records import Call, Ref, Run, in_order, marks
from whence.records.slots import is_cache, is_mutated, is_output, is_param, is_written
from whence.records.training import OPTIMIZER
from whence.results import Joined, Parted


@dataclass(slots=True)
class _Side:
    """One run while new calls are gathered from pieces of its calls."""

    name: str
    run: Run
    derived: DerivedTensors
    removed_calls: set[int] = field(default_factory=set)  # calls that new ones replace
    new_calls: list[list[Call]] = field(default_factory=list)
    joined: list[Joined] = field(default_factory=list)
    gathered: dict[tuple[int, int], list[Call]] = field(default_factory=dict)
    """By rank and order of a removed call: the new calls that hold pieces of its tensors."""


@dataclass(slots=True)
class AlignedBatches:
    """Two runs with equal batches. joined: pieces of new calls; parted: sequences that diverge."""

    reference: Run
    target: Run
    notes: list[str] = field(default_factory=list)
    joined: list[Joined] = field(default_factory=list)
    parted: list[Parted] = field(default_factory=list)


def align_batches(reference: Run, target: Run) -> AlignedBatches:
    """Both runs with rows and tokens cut and joined so that equal sequences are paired.

    This is done only if batches differ in shape or in the order of rows; otherwise both runs are
    returned as they are. Only the inputs of roots (tokens, masks, positions) are read.
    """
    sides = (
        _Side("reference", reference, DerivedTensors(reference)),
        _Side("target", target, DerivedTensors(target)),
    )
    notes: list[str] = []
    parted: list[Parted] = []
    tables = match_roots(selected(reference.calls), selected(target.calls))
    target_roots = _roots(target)
    for (name, scope), calls in _roots(reference).items():
        target_calls = target_roots.get((tables.get(name, name), scope), [])
        notes += _align_root(*sides, calls, target_calls, parted)
    return AlignedBatches(
        _done(sides[0]), _done(sides[1]), notes, sides[0].joined + sides[1].joined, parted
    )


def _roots(run: Run) -> dict[tuple[str, str], list[Call]]:
    """By (root, scope), the outermost calls of every module that the script calls, in order: a
    model, for example, and a separate encoder.

    Calls that only follow a root (a logits processor) belong to the root's call; operators of the
    script between two calls belong to none.
    """
    out: dict[tuple[str, str], list[Call]] = {}
    following = followers(run.calls)
    outermost = (c for c in run.calls if c.parent == -1 and c.kind != "region")
    for call in sorted(
        (c for c in outermost if c.phase == "forward" and c.id not in following),
        key=lambda c: c.order,
    ):
        out.setdefault((call.root, call.scope), []).append(call)
    return out


def _align_root(
    reference: _Side,
    target: _Side,
    calls: list[Call],
    target_calls: list[Call],
    parted: list[Parted],
) -> list[str]:
    """Align the calls of one root. Returns sentences on what was done; adds to `parted`."""
    if len({c.rank for c in (*calls, *target_calls)}) > 1 or not calls or not target_calls:
        return []
    coarse = coarser_input(((reference.run, calls), (target.run, target_calls)))
    a, b = batches_of(reference.run, calls, coarse), batches_of(target.run, target_calls, coarse)
    learn = [any(c.phase == OPTIMIZER for c in side.run.calls) for side in (reference, target)]
    if a is None or b is None or same_batches(a, b, in_this_order=any(learn)):
        return []
    in_reference = sequences_of(a)
    in_target = sequences_of(b, [s.tokens for s in in_reference])
    if any(batch.flat for batch in a) and not any(batch.flat for batch in b):
        in_reference = sequences_of(a, [s.tokens for s in in_target])
    # the parameters of a training are others in each step
    of_step = _first_step if all(learn) else (lambda side, sequence: 0)
    pairs = [
        pair
        for step in sorted({of_step(reference, s) for s in in_reference})
        for pair in matched(
            [s for s in in_reference if of_step(reference, s) == step],
            [s for s in in_target if of_step(target, s) == step],
        )
    ]
    if not pairs:
        return []
    sides = _RootSide(reference, a, in_reference), _RootSide(target, b, in_target)
    parted += _RootAlignment(*sides).units(pairs)
    return _sentences(*sides, pairs)


def _first_step(side: _Side, sequence: TokenSequence) -> int:
    """The step in which a run begins a sequence."""
    return side.run.calls[sequence.pieces[0].call].step


class _RootSide:
    """The calls of one root in one run: batches, sequences, and the calls gathered from them."""

    def __init__(
        self, side: _Side, batches: Sequence[Batch], sequences: Sequence[TokenSequence]
    ) -> None:
        self.side, self.batches, self.sequences = side, batches, sequences
        by_call = {batch.call.id: batch for batch in batches}
        rows = Counter(piece.call for s in sequences for piece in s.pieces)
        totals = _totals(sequences, by_call)
        self.slots = SlotAxes(side.derived, side.run.calls, by_call, totals, rows)
        self._gatherer = SequenceGatherer(self.slots, by_call)

    def is_call(self, rows: Sequence[Line]) -> bool:
        """Whether these rows are exactly one call of the root."""
        return self._gatherer.is_call(rows)

    def shapes(self, calls: Sequence[Call]) -> dict[SlotKey, Shape]:
        """The shapes of the calls' tensors, by slot key."""
        return shapes_of(calls, self.side.derived)

    def gather(
        self,
        rows: Sequence[Line],
        step: int,
        micro: int,
        lasts_across: tuple[set[SlotKey], Sequence[int]] = (set(), ()),
        shapes: Mapping[SlotKey, Shape] | None = None,
    ) -> list[Call]:
        """Replace the root calls that processed these rows by new calls of these rows alone.
        Returns the new calls. Options: see `SequenceGatherer.gathered`.
        """
        name = f"{len(rows)} rows" if len(rows) > 1 else f"row {rows[0][0].row}"
        calls = self._gatherer.gathered(
            rows,
            step=step,
            micro=micro,
            note=marks.gathered(name, len(rows[0])),
            lasts_across=lasts_across,
            shapes=shapes,
        )
        side = self.side
        side.new_calls.append(calls)
        roots = {p.call: side.run.calls[p.call] for row in rows for p in row}
        by_place = dict(_places(calls))
        for root in roots:
            tree = self.slots.tree(root)
            side.removed_calls.update(c.id for c in tree)
            for place, call in _places(tree):
                if place in by_place:
                    side.gathered.setdefault((call.rank, call.order), []).append(by_place[place])
        pieces = tuple((roots[p.call].step, p.row, p.start, p.stop - p.start) for p in rows[0])
        side.joined.append(Joined(side.name, next(iter(roots.values())).root, step, micro, pieces))
        return calls

    def set_aside(self, step: int) -> None:
        """Move unpaired root calls to steps of their own, from `step` on."""
        side = self.side
        if not side.removed_calls:
            return
        for root in (batch.call for batch in self.batches):
            if root.id not in side.removed_calls:
                tree = self.slots.tree(root.id)
                side.removed_calls.update(c.id for c in tree)
                side.new_calls.append([replace(c, step=step) for c in tree])
                step += 1


class _RootAlignment:
    """Gathers the paired sequences of one root on both sides."""

    def __init__(self, reference: _RootSide, target: _RootSide) -> None:
        self.reference, self.target = reference, target
        a, b = reference.slots, target.slots
        a.across, b.across = b, a
        self._flat = any(batch.flat for batch in (*reference.batches, *target.batches))
        self._lasts = a.lasts | scored_across(a, b), b.lasts | scored_across(b, a)

    def units(self, matches: Sequence[Match]) -> list[Parted]:
        """Gather whole batches if every row has a partner, else single rows. Returns the sequences
        that diverge.
        """
        reference, target = self.reference, self.target
        by_sequence = {id(match.reference): match for match in matches}
        parted = []
        for chain in _chains(reference.sequences):
            first = reference.side.run.calls[chain[0].pieces[0].call]
            paired = [by_sequence[id(s)] for s in chain if id(s) in by_sequence]
            whole = len(paired) == len(chain) and all(
                m.shared == len(m.reference.tokens) and not m.reference.padded for m in paired
            )
            rows = [_between(m.target.pieces, m.ahead, m.ahead + m.shared) for m in paired]
            parted += [p for m in paired if (p := _parted(first, m)) is not None]
            if whole and not self._flat:
                self._unit([s.pieces for s in chain], rows, first.step, 0)
                continue
            for match, row in zip(paired, rows, strict=True):
                pieces = match.reference.pieces
                self._unit([_between(pieces, 0, match.shared)], [row], first.step, pieces[0].row)
            for s in chain if paired else ():
                if id(s) not in by_sequence:  # beside rows that have a partner
                    reference.gather([s.pieces], first.step, s.pieces[0].row)
        step = max(batch.call.step for batch in (*reference.batches, *target.batches)) + 1
        reference.set_aside(step)
        target.set_aside(step + len(reference.batches))
        return parted

    def _unit(
        self, rows: list[list[Piece]], target_rows: list[list[Piece]], step: int, micro: int
    ) -> None:
        """Gather rows of the reference, unless they are exactly one call, and their partners."""
        reference, (lasts, target_lasts) = self.reference, self._lasts
        if not reference.is_call(rows) or target_lasts:
            calls = reference.gather(rows, step, micro, (target_lasts, ends(target_rows[0])))
        else:
            calls = reference.slots.tree(rows[0][0].call)
        across, shapes = (lasts, ends(rows[0])), reference.shapes(calls)
        self.target.gather(target_rows, step, micro, across, shapes)


def _totals(sequences: Iterable[TokenSequence], batches: dict[int, Batch]) -> dict[int, int]:
    """By root call, the number of tokens that it could see, including cached ones and padding."""
    out = {call: f.width for call, f in batches.items()}
    for sequence in sequences:
        for piece in sequence.pieces:
            if not batches[piece.call].flat:
                out[piece.call] = piece.total
    return out


def _chains(sequences: Sequence[TokenSequence]) -> list[list[TokenSequence]]:
    """Groups of sequences that were processed by the same calls."""
    table: dict[tuple[int, ...], list[TokenSequence]] = {}
    for sequence in sequences:
        table.setdefault(tuple(p.call for p in sequence.pieces), []).append(sequence)
    return list(table.values())


def _between(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """The pieces that hold the tokens [start, stop) of a sequence."""
    out = []
    position = 0
    for piece in pieces:
        have = piece.stop - piece.start
        skip, keep = max(start - position, 0), min(stop - position, have)
        if keep > skip:
            out.append(
                piece._replace(
                    start=piece.start + skip,
                    stop=piece.start + keep,
                    whole=piece.whole and keep == have,
                )
            )
        position += have
    return out


def _parted(first: Call, match: Match) -> Parted | None:
    """Where a sequence diverges from its partner; None if all of its tokens are paired."""
    reference, target, n, ahead = match
    if n == len(reference.tokens) and not ahead:
        return None
    tokens_ahead = tuple(t for t in target.tokens[:ahead] if isinstance(t, int))
    row = reference.pieces[0].row
    return Parted(
        first.root,
        first.step,
        row,
        n,
        len(reference.tokens),
        _token(reference, n),
        _token(target, ahead + n),
        tokens_ahead,
    )


def _token(sequence: TokenSequence, position: int) -> int | None:
    token = sequence.tokens[position] if position < len(sequence.tokens) else None
    return token if isinstance(token, int) else None


def _done(side: _Side) -> Run:
    """The run with its new calls in place of the removed ones; the run itself if there are none."""
    if not side.removed_calls:
        return side.run
    unchanged = _without_uncut(side)
    groups = sorted(
        [[c] for c in unchanged] + side.new_calls, key=lambda g: min(c.order for c in g)
    )
    place = {
        id(call): position
        for position, call in enumerate(call for group in groups for call in group)
    }
    unchanged_ids = {c.id: place[id(c)] for c in unchanged}
    # A backward pass belongs to the new call of its forward call, if that is only one.
    orders = {(c.rank, c.order): place[id(c)] for c in unchanged}
    orders |= {old: place[id(new[0])] for old, new in side.gathered.items() if len(new) == 1}
    calls: list[Call] = []
    for group in groups:
        number = {call.id: place[id(call)] for call in group} if len(group) > 1 else {}
        for call in group:
            parent = number.get(call.parent, unchanged_ids.get(call.parent, -1))
            calls.append(
                replace(
                    call,
                    id=len(calls),
                    parent=parent,
                    order=len(calls),
                    forward=orders.get((call.rank, call.forward), -1),
                )
            )
    return side.derived.done(calls)


def _places(tree: Iterable[Call]) -> Iterator[tuple[tuple[object, ...], Call]]:
    """(key, call) of the calls in a tree; the key is the name and a count of earlier namesakes."""
    counts: Counter[tuple[object, ...]] = Counter()
    for call in in_order(tree):
        name = call.scope, call.phase, call.op
        yield (*name, counts[name]), call
        counts[name] += 1


def _without_uncut(side: _Side) -> list[Call]:
    """The calls that stay. Operators of the script that read a batch which was cut are left out,
    since their results have the axes of the old batch; rows are compared where they are computed.
    """
    calls = side.run.calls
    cut = {
        ref.record
        for number in side.removed_calls
        for ref in calls[number].refs
        if is_written(ref.slot)
    }
    return [
        call
        for call in calls
        if call.id not in side.removed_calls
        and not (
            call.kind == "operator"
            and call.phase == "forward"
            and any(r.record in cut for r in call.slots("input"))
        )
    ]


def _sentences(reference: _RootSide, target: _RootSide, pairs: Sequence[Match]) -> list[str]:
    out = [
        f"{len(pairs)} of {len(reference.sequences)} sequences are paired row by row and "
        f"token by token: {_form(reference.batches)} against {_form(target.batches)}"
    ]
    paired = {id(m.reference) for m in pairs}, {id(m.target) for m in pairs}
    for root, with_partner in zip((reference, target), paired, strict=True):
        steps = {batch.call.id: batch.call.step for batch in root.batches}
        free = [
            f"step {steps[s.pieces[0].call]} row {s.pieces[0].row}"
            for s in root.sequences
            if id(s) not in with_partner
        ]
        if free:
            out.append(
                f"{len(free)} sequences of the {root.side.name} have no partner: {listed(free, 3)}"
            )
    return out


def _form(batches: Sequence[Batch]) -> str:
    """Number and shapes of the calls, in words."""
    shapes = list(dict.fromkeys(str(batch.shape) for batch in batches))
    return (
        f"{len(batches)} {'call' if len(batches) == 1 else 'calls'} on "
        f"{', '.join(shapes[:3])}{' …' if len(shapes) > 3 else ''}"
    )


# Gathers the rows and tokens of one sequence from pieces of several calls into new calls.


class SequenceGatherer:
    """Gathers new calls of one run from pieces of others, which they replace."""

    def __init__(self, slots: SlotAxes, batches: Mapping[int, Batch]) -> None:
        self.slots, self._batches = slots, batches
        self._tensors = SequenceTensors(slots.derived, batches)
        self._shapes: Mapping[SlotKey, Shape] = {}
        self._calls: dict[int, dict[tuple[Any, ...], Call]] = {}

    def is_call(self, lines: Sequence[Line]) -> bool:
        """Whether these are all rows and all tokens of a single call."""
        batch = self._batches[lines[0][0].call]
        return (
            all(len(line) == 1 for line in lines)
            and not batch.flat
            and self._tensors.all_rows(lines)
            and (lines[0][0].start, lines[0][0].stop) == (0, batch.width)
        )

    def gathered(
        self,
        lines: Sequence[Line],
        *,
        step: int,
        micro: int,
        note: str,
        lasts_across: tuple[set[SlotKey], Sequence[int]] = (set(), ()),
        shapes: Mapping[SlotKey, Shape] | None = None,
    ) -> list[Call]:
        """The new calls of one unit. lines: for each row of its batch, the pieces in order. The new
        calls keep the ids of the call with the longest piece.

        lasts_across: (slots for which the other run has only the last token of each call, numbers
        of these tokens in the sequence). shapes: of the other run's tensors, by slot key.
        """
        self._shapes = shapes or {}
        longest = max(
            range(len(lines[0])), key=lambda i: (lines[0][i].stop - lines[0][i].start, -i)
        )
        calls = []
        for call in self.slots.tree(lines[0][longest].call):
            refs = []
            for ref in call.refs:
                record = (
                    ref.record
                    if is_param(ref.slot) or ref.record in self.slots.held
                    else self._record(call, ref.slot, lines, lasts_across)
                )
                if record is not None:
                    refs.append(Ref(ref.slot, record, ref.edge))
            is_lost = (
                call.leaf and call.slots("output") and not any(is_output(r.slot) for r in refs)
            )
            if is_lost:  # unpaired then: it is replayed as part of its parent
                continue
            calls.append(
                replace(call, refs=tuple(refs), step=step, micro=micro, notes=(*call.notes, note))
            )
        return calls

    def _record(
        self,
        call: Call,
        slot: str,
        lines: Sequence[Line],
        lasts_across: tuple[set[SlotKey], Sequence[int]],
    ) -> int | None:
        """The record of a slot's tensor, joined from all pieces; None if that is not possible."""
        axes = self.slots.of(call, slot)
        if axes is None:
            return None
        if is_written(slot) and not axes.has_tokens:
            if not all(line[-1].whole for line in lines):
                return None
            lines = [line[-1:] for line in lines]  # a state, as the last token leaves it
        keys, tokens = lasts_across
        key = slot_key(call, slot)
        tokens_across = tokens if keys and (axes.last is not None or key in keys) else None
        records: dict[int, int] = {}
        for piece in (p for line in lines for p in line):
            source = self._calls_of(piece.call).get((call.scope, call.op, call.occurrence))
            refs = source.refs if source is not None else ()
            record = next((r.record for r in refs if r.slot == slot), None)
            if record is None or record in self.slots.held:  # its axes are other ones
                return None
            records[piece.call] = record
        try:
            return self._tensors.assembled(
                axes, lines, records, tokens_across, self._shapes.get(key)
            )
        except Unfit:
            return None

    def _calls_of(self, root: int) -> dict[tuple[Any, ...], Call]:
        calls = self._calls.get(root)
        if calls is None:
            calls = {(c.scope, c.op, c.occurrence): c for c in self.slots.tree(root)}
            self._calls[root] = calls
        return calls


def shapes_of(calls: Iterable[Call], derived: DerivedTensors) -> dict[SlotKey, Shape]:
    """The shapes of all tensors of these calls, by slot key."""
    return {slot_key(c, r.slot): derived.record(r.record).shape for c in calls for r in c.refs}


# Joins tensors of one sequence from the pieces that several calls processed.

Line = Sequence[Piece]
Shape = tuple[int, ...]


class SequenceTensors:
    """Joins tensors from pieces of several calls' tensors."""

    def __init__(self, derived: DerivedTensors, batches: Mapping[int, Batch]) -> None:
        self.derived, self._batches = derived, batches

    def assembled(
        self,
        axes: Axes,
        lines: Sequence[Line],
        records: Mapping[int, int],
        tokens_across: Sequence[int] | None,
        shape_across: Shape | None,
    ) -> int | None:
        """The record of a slot's tensor for all lines; None if it cannot be joined.

        records: by root call, the record of the slot. tokens_across: numbers of the tokens that the
        other run has in this slot, None for all; shape_across: the other run's shape.
        """
        last_tokens = ends(lines[0])
        if axes.last is not None:
            # Each call has only its last token; keep those that both runs have.
            shared_ends = {t for t in last_tokens if tokens_across is None or t in tokens_across}
            lines = [
                [
                    self._last(p)
                    for p, end in zip(line, _ends(line), strict=True)
                    if p.whole and end in shared_ends
                ]
                for line in lines
            ]
            if not lines[0]:
                return None
            return self._joined(Axes(axes.batch, axes.last), lines, records, shape_across)
        if tokens_across is not None and axes.token is not None:
            record = self._joined(axes, lines, records, None)
            if record is None:
                return None
            return self.derived.add(
                Take(Name("x"), tuple(tokens_across), axes.token), {"x": [record]}
            )
        return self._joined(axes, lines, records, shape_across)

    def _last(self, piece: Piece) -> Piece:
        """The piece that selects a call's last token of this row."""
        position = piece.row if self._batches[piece.call].flat else 0
        return piece._replace(start=position, stop=position + 1)

    def _joined(
        self,
        axes: Axes,
        lines: Sequence[Line],
        records: Mapping[int, int],
        shape_across: Shape | None,
    ) -> int | None:
        calls = list(dict.fromkeys(p.call for line in lines for p in line))
        stacked = next(
            (axis for axis in (axes.batch, axes.flat, axes.token) if axis is not None), None
        )
        if stacked is None and axes.visible is None:
            return self._as_it_is(lines[0][0], records, shape_across)
        names = {call: "x" if len(calls) == 1 else f"s{i}" for i, call in enumerate(calls)}
        if len(lines) == 1:
            return self._add(
                self._line(axes, lines[0], names, records, cut_row=True), names, records
            )
        if self.all_rows(lines) and (axes.batch is not None or self._whole(lines)):
            return self._add(
                self._line(axes, lines[0], names, records, cut_row=False), names, records
            )
        shared = self._line(axes, lines[0], names, records, cut_row=True)
        if stacked is None:
            return self._add(shared, names, records)
        every = Cat(
            tuple(self._line(axes, line, names, records, cut_row=True) for line in lines), stacked
        )
        bound = {names[call]: [self.derived.record(records[call]).shape] for call in calls}
        if shape_across is not None and every.shape(bound) == shape_across:
            return self._add(every, names, records)
        if (
            (shape_across is not None and shared.shape(bound) == shape_across)
            or axes.batch is None
            or self._shared(axes, lines, records)
        ):
            return self._add(shared, names, records)
        return self._add(every, names, records)

    def _as_it_is(
        self, piece: Piece, records: Mapping[int, int], shape_across: Shape | None
    ) -> int | None:
        """The record of a tensor without axes of rows or tokens; None if the other run's shape
        differs, as for tokens sorted by expert.
        """
        record = records[piece.call]
        return (
            record
            if shape_across is None or self.derived.record(record).shape == shape_across
            else None
        )

    def _add(self, node: Node, names: Mapping[int, str], records: Mapping[int, int]) -> int:
        used = set(names_in(node))
        bound = {name: [records[call]] for call, name in names.items() if name in used}
        node = _starred(node, bound)
        if isinstance(node, Cat) and any(isinstance(p, Star) for p in node.parts):
            bound = {"steps": [ids[0] for ids in bound.values()]}
        return self.derived.add(node, bound)

    def _shared(self, axes: Axes, lines: Sequence[Line], records: Mapping[int, int]) -> bool:
        """Whether rows from separate calls all have the same tensor, such as positions, which then
        needs no batch.
        """
        tensors = [self.derived.record(records[line[0].call]) for line in lines]
        own_calls = len({line[0].call for line in lines}) == len(lines)
        single_rows = all(r.shape[axes.batch or 0] == 1 for r in tensors)
        return (
            own_calls
            and single_rows
            and bool(tensors[0].hash)
            and len({r.hash for r in tensors}) == 1
        )

    def _whole(self, lines: Sequence[Line]) -> bool:
        """Whether these are all tokens of their calls, one piece per line."""
        return (
            all(
                (p.start, p.stop) == (0, self._batches[p.call].width)
                for line in lines
                for p in line
            )
            and len(lines[0]) == 1
        )

    def all_rows(self, lines: Sequence[Line]) -> bool:
        """Whether these are all rows of their calls, in order, with the same tokens of each."""
        return (
            all(
                len({(p.call, p.start, p.stop) for p in pieces}) == 1
                and [p.row for p in pieces] == list(range(self._batches[pieces[0].call].size))
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
        """The expression that joins one row from its pieces. cut_row: whether to cut the row out of
        its batch.
        """
        first, last = line[0], line[-1]
        if axes.token is None and axes.flat is None and axes.visible is not None:
            # A cache: the last state also holds all earlier tokens.
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
        if axes.visible is not None:
            to = last.total - first.start
            parts = [
                Pad(p, axes.visible, to, "lowest") if piece.total < last.total else p
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
        shape = self.derived.record(records[piece.call]).shape
        keys: list[Any] = [slice(None)] * len(shape)
        if axes.batch is not None and cut_row and shape[axes.batch] > 1:
            keys[axes.batch] = slice(piece.row, piece.row + 1)
        if axes.token is not None and (piece.start, piece.stop) != (0, shape[axes.token]):
            keys[axes.token] = slice(piece.start, piece.stop)
        if axes.flat is not None and cut_row and shape[axes.flat] != piece.stop - piece.start:
            offset = piece.row * self._batches[piece.call].width
            keys[axes.flat] = slice(offset + piece.start, offset + piece.stop)
        if axes.visible is not None and (pad, stop or piece.total) != (0, shape[axes.visible]):
            keys[axes.visible] = slice(pad, stop or piece.total)
        name = Name(names[piece.call])
        return Cut(name, tuple(keys)) if any(k != slice(None) for k in keys) else name


def ends(line: Line) -> list[int]:
    """For one row, the numbers in its sequence of the tokens that are the last of a call."""
    return [end for piece, end in zip(line, _ends(line), strict=True) if piece.whole]


def _ends(line: Line) -> list[int]:
    return [total - 1 for total in itertools.accumulate(p.stop - p.start for p in line)]


def _starred(node: Node, bound: Mapping[str, Sequence[int]]) -> Node:
    """`cat(s0, s1, s2, axis=1)` written as `cat(*steps, axis=1)`."""
    if (
        isinstance(node, Cat)
        and len(node.parts) > 1
        and tuple(Name(n) for n in bound) == node.parts
    ):
        return Cat((Star("steps"),), node.axis)
    return node


# Infers which axis of a tensor is the batch and which the tokens, from extents that vary like those
# of the root's input tokens over all calls of the module.

SlotKey = tuple[str, str, int, str]


class SeenTokens(NamedTuple):
    """One observation of a slot: its shape, and the extents of the root's input in that call.

    batch: rows of the batch, None if it is flattened; width: tokens of a row; total: visible
    tokens, including cached ones; rows: number of rows, flattened or not. fronts: possible extents
    of an axis in front of batch and tokens, as positions of several axes and tensors computed from
    them have.
    """

    shape: tuple[int, ...]
    batch: int | None
    width: int
    total: int
    rows: int = 1
    fronts: frozenset[int] = frozenset()

    def has_front(self) -> bool:
        """Whether the tensor has an axis of positions in front of batch and tokens."""
        if len(self.shape) < 2 or self.shape[0] not in self.fronts:
            return False
        if self.batch is None:
            return self.shape[1] == self.width
        return (
            len(self.shape) > 2 and self.shape[1] in (1, self.batch) and self.shape[2] == self.width
        )


@dataclass(frozen=True, slots=True)
class Axes:
    """The numbers of a tensor's axes of rows (`batch`), new tokens (`token`) and visible tokens
    (`visible`); None for an axis that it lacks.

    last: the axis of new tokens if it holds only the last one of a call, such as the scores of a
    generation (in a flattened batch, the last one of every row). flat: an axis of all tokens of all
    rows.
    """

    batch: int | None = None
    token: int | None = None
    visible: int | None = None
    last: int | None = None
    flat: int | None = None

    def __len__(self) -> int:
        return sum(
            axis is not None
            for axis in (self.batch, self.token, self.visible, self.last, self.flat)
        )

    @property
    def has_tokens(self) -> bool:
        """Whether there is an axis of tokens of any kind."""
        return len(self) > (self.batch is not None)


def fits(axes: Axes, sights: Sequence[SeenTokens]) -> bool:
    """Whether these axes agree with all observed extents of a slot."""
    if axes.last is not None or axes.flat is not None:
        return False
    return all(
        axis is None or (axis < len(s.shape) and s.shape[axis] == extent)
        for s in sights
        for axis, extent in ((axes.batch, s.batch), (axes.token, s.width), (axes.visible, s.total))
    )


def axes(
    slot: str, boolean: bool, sights: Sequence[SeenTokens], across: Sequence[SeenTokens] = ()
) -> Axes | None:
    """The axes of a slot, inferred from all observations of it; None if an extent varies otherwise
    than the root's input. across: the observations of the other run.

    The batch is the axis that varies with it, else one of the first two. Attention masks have an
    axis of new tokens and one of visible tokens, caches only the latter.
    """
    dims = {len(s.shape) for s in sights}
    if len(dims) != 1:
        return None
    count = dims.pop()
    if all(s.has_front() for s in sights):
        return _behind_front(sights)
    varied = [k for k in range(count) if len({s.shape[k] for s in sights}) > 1]
    if count and _are_flat(sights):
        # Rows and tokens share one axis, as in routers of experts, so no other axis is either.
        return Axes(flat=0) if varied in ([], [0]) else None
    batch = _batch_axis(count, sights, [s for s in across if len(s.shape) == count])
    is_mask = boolean or "mask" in slot or "bias" in slot
    token, visible = _token_axes(count, batch, varied, is_mask, sights)
    if (
        token is None
        and visible is None
        and all(s.batch is None for s in sights)
        and any(s.width > s.rows for s in sights)
    ):
        last = _first_axis(count - 1, None, sights, lambda s: s.rows)
        if last is not None:
            return Axes(last=last) if set(varied) <= {last} else None
    is_kept = count > 2 and (is_cache(slot) or is_mutated(slot))
    if any(k not in (batch, token, visible) for k in varied) or (
        is_kept and token is None and visible is None
    ):
        return None  # a cache of fixed length holds the latest tokens only
    has_last = token is None and visible is None and count > 2 and any(s.width > 1 for s in sights)
    single = _first_axis(count - 1, batch, sights, lambda s: 1)
    return Axes(batch, token, visible, single if has_last else None)


def _are_flat(sights: Sequence[SeenTokens]) -> bool:
    """Whether the first axis holds all tokens of all rows, with several rows and tokens."""
    return any((s.batch or 1) > 1 and s.width > 1 for s in sights) and all(
        s.shape[0] == (s.batch or 1) * s.width for s in sights
    )


def _axes_of_extent(
    count: int,
    batch: int | None,
    sights: Sequence[SeenTokens],
    extent: Callable[[SeenTokens], int | None],
) -> list[int]:
    """The axes, other than the batch, that have this extent in all observations."""
    return [k for k in range(count) if k != batch and all(s.shape[k] == extent(s) for s in sights)]


def _first_axis(
    count: int,
    batch: int | None,
    sights: Sequence[SeenTokens],
    extent: Callable[[SeenTokens], int | None],
) -> int | None:
    return next(iter(_axes_of_extent(count, batch, sights, extent)), None)


def _batch_axis(
    count: int, sights: Sequence[SeenTokens], across: Sequence[SeenTokens]
) -> int | None:
    """The axis that follows the number of rows, where this varies in either run; else the one of
    the first two that has its extent.
    """
    every = [*sights, *across]
    if len({s.batch for s in every}) > 1 and all(s.batch is not None for s in every):
        following = _axes_of_extent(count, None, every, lambda s: s.batch)
        if len(following) == 1:
            return following[0]
    axis = _first_axis(min(2, count), None, sights, lambda s: s.batch)
    if axis == 1 and not (
        any(s.width > 1 for s in sights) and all(s.shape[0] == s.width for s in sights)
    ):
        return None  # heads, as many as rows by chance, since no axis of tokens precedes
    return axis


def _token_axes(
    count: int,
    batch: int | None,
    varied: Sequence[int],
    is_mask: bool,
    sights: Sequence[SeenTokens],
) -> tuple[int | None, int | None]:
    """(axis of new tokens, axis of visible tokens), None for one that is missing."""
    new = _axes_of_extent(count, batch, sights, lambda s: s.width)
    total = _axes_of_extent(count, batch, sights, lambda s: s.total)
    visible = next((k for k in total if k in varied and k not in new), None)
    token = next(iter(new), None) if visible is None or is_mask else None
    if visible is None and token is not None:
        # Masks have this axis even if its extent never varies, attention weights only if it does.
        visible = next((k for k in total if k != token and (is_mask or k in varied)), None)
    return token, visible


def _behind_front(sights: Sequence[SeenTokens]) -> Axes | None:
    """The axes of a tensor with an axis of positions in front of batch and tokens."""
    flat = any(s.batch is None for s in sights)
    token, batch = (
        (1, None) if flat else (2, 1 if all(s.shape[1] == s.batch for s in sights) else None)
    )
    varied = [k for k in range(len(sights[0].shape)) if len({s.shape[k] for s in sights}) > 1]
    return Axes(batch, token) if all(k in (batch, token) for k in varied) else None


class SlotAxes:
    """The axes of one run's tensors, by slot, and the calls below each root."""

    def __init__(
        self,
        derived: DerivedTensors,
        calls: Sequence[Call],
        batches: Mapping[int, Batch],
        totals: Mapping[int, int],
        rows: Mapping[int, int],
    ) -> None:
        self.derived, self._batches, self._totals, self._rows = derived, batches, totals, rows
        self.across: SlotAxes | None = None  # of the other run
        self._trees = _trees(calls, batches)
        self._axes: dict[tuple[Any, ...], Axes | None] = {}
        self._by_key: dict[SlotKey, Axes | None] = {}

    def roots(self) -> Iterable[int]:
        """The ids of root calls with input tokens."""
        return self._batches

    def tree(self, root: int) -> list[Call]:
        """A root call, all calls below it and those that follow it, in execution order."""
        return self._trees[root]

    @functools.cached_property
    def lasts(self) -> set[SlotKey]:
        """The slots that hold the last token of each call only."""
        calls = [call for root in self._batches for call in self.tree(root)]
        slots = {
            (c.root, c.scope, c.op, c.occurrence, r.slot): (c, r.slot)
            for c in calls
            for r in c.refs
        }
        return {
            slot_key(call, slot)
            for call, slot in slots.values()
            if not is_param(slot)
            and (axes := self.of(call, slot)) is not None
            and axes.last is not None
        }

    def of(self, call: Call, slot: str) -> Axes | None:
        """The axes of a slot; those of the other run's slot if they fit and are more, since its
        lengths may vary more.
        """
        key = (call.root, call.scope, call.op, call.occurrence, slot)
        if key not in self._axes:
            record = next(r.record for r in call.refs if r.slot == slot)
            sights = self._sights[key]
            name = slot_key(call, slot)
            seen = self.across.seen.get(name, ()) if self.across is not None else ()
            slot_axes = axes(slot, self.derived.record(record).dtype == "bool", sights, seen)
            across = self.across.named(name) if self.across is not None else None
            if (
                slot_axes is not None
                and across is not None
                and fits(across, sights)
                and len(across) > len(slot_axes)
            ):
                slot_axes = across
            self._axes[key] = slot_axes
        return self._axes[key]

    @functools.cached_property
    def held(self) -> set[int]:
        """Records of parameters and of tensors that operators compute from parameters alone; none
        of their axes depends on the tokens.
        """
        calls = in_order(c for tree in self._trees.values() for c in tree)
        held = {r.record for c in calls for r in c.slots("param")}
        for call in calls:
            read = call.slots("input") if call.kind == "operator" else ()
            if read and all(r.record in held for r in read):
                held.update(r.record for r in call.slots("output"))
        return held

    def width(self, ref: Ref) -> int:
        """The number of channels (last axis) of a tensor, 0 for vectors and scalars."""
        shape = self.derived.record(ref.record).shape
        return shape[-1] if len(shape) > 1 else 0

    def named(self, key: SlotKey) -> Axes | None:
        """The axes of a slot by its key, from this run's own observations."""
        if key not in self._by_key:
            sights = self.seen.get(key)
            self._by_key[key] = axes(key[-1], False, sights) if sights else None
        return self._by_key[key]

    @functools.cached_property
    def seen(self) -> dict[SlotKey, list[SeenTokens]]:
        """All observations of every slot, by the key that both runs have in common."""
        return {
            (normal_scope(scope), op, occurrence, slot): sights
            for (_, scope, op, occurrence, slot), sights in self._sights.items()
        }

    @functools.cached_property
    def _sights(self) -> dict[tuple[Any, ...], list[SeenTokens]]:
        """All observations of every slot in the trees of root calls with input tokens."""
        out: dict[tuple[Any, ...], list[SeenTokens]] = defaultdict(list)
        for root, batch in self._batches.items():
            size = None if batch.flat else batch.size
            fronts = self._fronts(root)
            for call in self.tree(root):
                for ref in call.refs:
                    if not is_param(ref.slot) and ref.record not in self.held:
                        record = self.derived.record(ref.record)
                        positions = fronts and _says_positions(call, ref.slot, record.dtype)
                        out[call.root, call.scope, call.op, call.occurrence, ref.slot].append(
                            SeenTokens(
                                record.shape,
                                size,
                                batch.width,
                                self._totals[root],
                                self._rows.get(root, 1),
                                fronts if positions else fronts - {size},
                            )
                        )
        return out

    def _fronts(self, root: int) -> frozenset[int]:
        """Possible numbers of components in a token's position: the extent of an axis in front of
        batch and tokens.
        """
        batch = self._batches[root]
        extents = [(batch.width,)] if batch.flat else [(n, batch.width) for n in {1, batch.size}]
        slots = (r for c in self.tree(root) for r in c.slots("input") if is_position(r.slot))
        shapes = {self.derived.record(r.record).shape for r in slots}
        counts = {s[0] for s in shapes if s and s[1:] in extents}
        # Below the call that takes the plain position from the front, one axis less.
        return frozenset(counts | {n - 1 for n in counts if n == WITH_PLAIN})


def scored_across(slots: SlotAxes, across: SlotAxes) -> set[SlotKey]:
    """The slots of the other run that hold scores of all tokens, while this run's hold those of the
    last token only, in a call that follows the root.

    These are outputs of the other run's root with the width of this run's scores, and all slots of
    the leaf call that computes them.
    """
    calls, (root, *below) = (
        slot_axes.tree(next(iter(slot_axes.roots()))) for slot_axes in (slots, across)
    )
    widths = {
        slots.width(r)
        for c in calls
        if c.parent == -1
        for r in c.slots("output")
        if c.scope and slot_key(c, r.slot) in slots.lasts
    }
    widths -= {slots.width(r) for r in calls[0].slots("output")}
    returned = [
        r
        for r in root.slots("output")
        if across.width(r) in widths and slot_key(root, r.slot) not in across.lasts
    ]
    scores = {r.record for r in returned}
    makers = [c for c in below if c.leaf and any(r.record in scores for r in c.slots("output"))]
    return {slot_key(root, r.slot) for r in returned} | {
        slot_key(c, r.slot) for c in makers for r in c.refs if not is_param(r.slot)
    }


def _trees(calls: Sequence[Call], batches: Mapping[int, Batch]) -> dict[int, list[Call]]:
    """By root call with input tokens, the calls of its tree in execution order."""
    trees: dict[int, list[Call]] = {root: [] for root in batches}
    roots: dict[int, int] = {}
    leaders = followers(calls)
    for call in in_order(calls):
        roots[call.id] = (
            leaders.get(call.id, call.id) if call.parent == -1 else roots.get(call.parent, -1)
        )
        if roots[call.id] in trees:
            trees[roots[call.id]].append(call)
    return trees


def _says_positions(call: Call, slot: str, dtype: str) -> bool:
    """Whether dtype or names suggest positions or tensors computed from them; extents alone may be
    ambiguous.
    """
    name = f"{call.scope.rpartition('.')[2]}:{slot}"
    return dtype in ("int64", "int32") or any(
        word in name for word in ("position", "rotary", "rope")
    )


def slot_key(call: Call, slot: str) -> SlotKey:
    """A key of a slot that is the same in both runs."""
    return (normal_scope(call.scope), call.op, call.occurrence, slot)
