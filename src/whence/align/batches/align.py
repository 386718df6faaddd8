"""Brings runs that batched, padded or cached the same sequences differently to one form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from whence.align.batches.batch import Batch, batches_of
from whence.align.batches.gather import SequenceGatherer, shapes_of
from whence.align.batches.sequence_tensors import Line, Shape, ends
from whence.align.batches.sequences import (
    Match,
    Piece,
    TokenSequence,
    followers,
    matched,
    same_batches,
    sequences_of,
)
from whence.align.batches.token_axes import SlotAxes, SlotKey, scored_across
from whence.align.call_sites import match_roots, selected
from whence.align.derived_run import DerivedTensors
from whence.display import listed
from whence.records import Call, Run, marks
from whence.records.slots import is_written
from whence.results import Joined, Parted


@dataclass(slots=True)
class _Side:
    """One run while calls of it are gathered anew."""

    name: str
    run: Run
    derived: DerivedTensors
    removed_calls: set[int] = field(default_factory=set)  # calls that units were made from
    new_calls: list[list[Call]] = field(default_factory=list)
    joined: list[Joined] = field(default_factory=list)
    gathered: dict[tuple[int, int], list[Call]] = field(default_factory=dict)
    """By rank and order of a removed call: the new calls that its tensors went to."""


@dataclass(slots=True)
class AlignedBatches:
    """Two runs in one form. joined: what new calls are made of; parted: sequences that part."""

    reference: Run
    target: Run
    notes: list[str] = field(default_factory=list)
    joined: list[Joined] = field(default_factory=list)
    parted: list[Parted] = field(default_factory=list)


def align_batches(reference: Run, target: Run) -> AlignedBatches:
    """Both runs in one form: rows and tokens cut and joined so that each is paired with itself.

    Only where the batches have other shapes, or rows another order; else both runs as they are.
    What a root was asked (tokens, masks, positions) is read, no other element.
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
    """The outermost calls of every module that is called from outside, in order: a model, and an
    encoder of its own.

    What only follows a root (a logits processor) belongs to the root's call; operators of the
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
    """Align the calls of one root; sentences on what was done. parted: gets sequences that part."""
    if len({c.rank for c in (*calls, *target_calls)}) > 1 or not calls or not target_calls:
        return []
    a, b = batches_of(reference.run, calls), batches_of(target.run, target_calls)
    if a is None or b is None or same_batches(a, b):
        return []
    in_reference = sequences_of(a)
    in_target = sequences_of(b, [s.tokens for s in in_reference])
    if any(batch.flat for batch in a) and not any(batch.flat for batch in b):
        in_reference = sequences_of(a, [s.tokens for s in in_target])
    pairs = matched(in_reference, in_target)
    if not pairs:
        return []
    sides = _RootSide(reference, a, in_reference), _RootSide(target, b, in_target)
    parted += _RootAlignment(*sides).units(pairs)
    return _sentences(*sides, pairs)


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
        """Are these rows one call of the root as it is?"""
        return self._gatherer.is_call(rows)

    def shapes(self, calls: Sequence[Call]) -> dict[SlotKey, Shape]:
        """The shapes of the tensors of calls, by the name of their slot."""
        return shapes_of(calls, self.side.derived)

    def gather(
        self,
        rows: Sequence[Line],
        step: int,
        micro: int,
        lasts_across: tuple[set[SlotKey], Sequence[int]] = (set(), ()),
        shapes: Mapping[SlotKey, Shape] | None = None,
    ) -> list[Call]:
        """Replace the root calls that these rows went through by calls of these rows alone."""
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
        """Give root calls without a partner steps of their own, away from those with partners."""
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
        """Gather whole batches where every row has a partner, else row by row; what parts."""
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
        """Gather rows of the reference, unless they are a call as it is, and their partners."""
        reference, (lasts, target_lasts) = self.reference, self._lasts
        if not reference.is_call(rows) or target_lasts:
            calls = reference.gather(rows, step, micro, (target_lasts, ends(target_rows[0])))
        else:
            calls = reference.slots.tree(rows[0][0].call)
        across, shapes = (lasts, ends(rows[0])), reference.shapes(calls)
        self.target.gather(target_rows, step, micro, across, shapes)


def _totals(sequences: Iterable[TokenSequence], batches: dict[int, Batch]) -> dict[int, int]:
    """Tokens that each root call could see, cached ones and padding included."""
    out = {call: f.width for call, f in batches.items()}
    for sequence in sequences:
        for piece in sequence.pieces:
            if not batches[piece.call].flat:
                out[piece.call] = piece.total
    return out


def _chains(sequences: Sequence[TokenSequence]) -> list[list[TokenSequence]]:
    """Sequences that went through the same calls together."""
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
    """Where a sequence diverges from its partner; None where all of it is paired."""
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
    """The run with its new calls in place of those they are made of; the run itself without any."""
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
    # A backward pass belongs to the call that its forward call went to, where that is one.
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
    """The calls below a root, each by its name and how many of that name came before."""
    counts: Counter[tuple[object, ...]] = Counter()
    for call in sorted(tree, key=lambda c: c.order):
        name = call.scope, call.phase, call.op
        yield (*name, counts[name]), call
        counts[name] += 1


def _without_uncut(side: _Side) -> list[Call]:
    """The calls that stay as they are. What operators of the script made of a whole batch lies in
    the axes of that batch; its rows are compared where they are made.
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
