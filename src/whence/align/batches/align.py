"""Brings two runs that batched, padded or cached the same sequences otherwise to one form: a stage
of alignment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from whence.align.batches.gather import SequenceGatherer, shapes_of
from whence.align.batches.sequence_tensors import ends
from whence.align.batches.sequences import (
    Asked,
    Fed,
    Match,
    Piece,
    asked,
    fed,
    followers,
    matched,
    same_batches,
)
from whence.align.batches.token_axes import SlotAxes, scored_across
from whence.align.call_sites import match_roots, selected
from whence.align.derived_run import DerivedTensors
from whence.records import Call, Run, marks
from whence.results import Joined, Parted


@dataclass(slots=True)
class _Side:
    name: str
    run: Run
    making: DerivedTensors
    gone: set[int] = field(default_factory=set)  # calls that units were made from
    made: list[list[Call]] = field(default_factory=list)
    joined: list[Joined] = field(default_factory=list)


@dataclass(slots=True)
class AlignedBatches:
    """Two runs in one form: what was done in sentences, of what calls are made, and sequences that
    part.
    """

    reference: Run
    target: Run
    notes: list[str] = field(default_factory=list)
    joined: list[Joined] = field(default_factory=list)
    parted: list[Parted] = field(default_factory=list)


def facing(reference: Run, target: Run) -> AlignedBatches:
    """Both runs in one form: rows and tokens cut and joined so that each is paired with itself.

    Only where the batches have other shapes, or rows another order; else both runs as they are.
    What a root was asked (tokens, masks, positions) is read, no other element.
    """
    faced = AlignedBatches(reference, target)
    left, right = (
        _Side("reference", reference, DerivedTensors(reference)),
        _Side("target", target, DerivedTensors(target)),
    )
    tables = match_roots(selected(reference.calls), selected(target.calls))
    ours, others = _roots(reference), _roots(target)
    for (name, scope), calls in ours.items():
        theirs = others.get((tables.get(name, name), scope), [])
        faced.notes += _root(left, right, calls, theirs, faced.parted)
    faced.reference, faced.target, faced.joined = (
        _done(left),
        _done(right),
        left.joined + right.joined,
    )
    return faced


def _roots(run: Run) -> dict[tuple[str, str], list[Call]]:
    """The outermost calls of every module that is called from outside, in order: a model, and an
    encoder of its own.

    What only follows a root (a logits processor) belongs to the root's call.
    """
    out: dict[tuple[str, str], list[Call]] = {}
    behind = followers(run.calls)
    for call in sorted(
        (c for c in run.calls if c.parent == -1 and c.phase == "forward" and c.id not in behind),
        key=lambda c: c.order,
    ):
        out.setdefault((call.root, call.scope), []).append(call)
    return out


def _root(
    left: _Side, right: _Side, mine: Sequence[Call], theirs: Sequence[Call], parted: list[Parted]
) -> list[str]:
    if len({c.rank for c in (*mine, *theirs)}) > 1 or not mine or not theirs:
        return []
    a, b = fed(left.run, mine), fed(right.run, theirs)
    if a is None or b is None or same_batches(a, b):
        return []
    ours = asked(a)
    others = asked(b, [one.tokens for one in ours])
    if any(f.flat for f in a) and not any(f.flat for f in b):
        ours = asked(a, [one.tokens for one in others])
    pairs = matched(ours, others)
    if not pairs:
        return []
    parted += _Facing(left, right, (a, ours), (b, others)).units(pairs)
    return _sentences(ours, others, pairs, a, b)


class _Facing:
    """The sequences of one root, gathered on both sides."""

    def __init__(
        self,
        left: _Side,
        right: _Side,
        ours: tuple[list[Fed], list[Asked]],
        others: tuple[list[Fed], list[Asked]],
    ) -> None:
        self.left, self.right, self._ours, self._others = left, right, ours, others
        self._gather = _gathering(left, *ours), _gathering(right, *others)
        left_slots, right_slots = (gather.slots for gather in self._gather)
        left_slots.across, right_slots.across = right_slots, left_slots
        self._flat = any(f.flat for f in (*ours[0], *others[0]))
        self._lasts = (
            left_slots.lasts | scored_across(left_slots, right_slots),
            right_slots.lasts | scored_across(right_slots, left_slots),
        )

    def units(self, matches: Sequence[Match]) -> list[Parted]:
        """Whole batches where no row of the reference is padded and every one has a partner; else
        row by row.
        """
        faced = {id(match.one): match for match in matches}
        parted = []
        for chain in _chains(self._ours[1]):
            first = self.left.run.calls[chain[0].pieces[0].call]
            found = [faced[id(one)] for one in chain if id(one) in faced]
            whole = len(found) == len(chain) and all(
                m.shared == len(m.one.tokens) and not m.one.padded for m in found
            )
            lines = [_between(m.other.pieces, m.ahead, m.ahead + m.shared) for m in found]
            parted += [p for m in found if (p := _parted(first, m)) is not None]
            if whole and not self._flat:
                self._unit([one.pieces for one in chain], lines, first.step, 0)
                continue
            for match, line in zip(found, lines, strict=True):
                self._unit(
                    [_between(match.one.pieces, 0, match.shared)],
                    [line],
                    first.step,
                    match.one.pieces[0].row,
                )
            if found:
                for one in chain:
                    if id(one) not in faced:
                        self._alone(one, first.step)
        last = max(f.call.step for f in (*self._ours[0], *self._others[0]))
        _aside(self.left, self._gather[0], self._ours[0], last + 1)
        _aside(self.right, self._gather[1], self._others[0], last + 1 + len(self._ours[0]))
        return parted

    def _alone(self, one: Asked, step: int) -> None:
        """A row without a partner, beside others that have one."""
        gather, row = self._gather[0], one.pieces[0].row
        self.left.made.append(
            gather.gathered([one.pieces], step=step, micro=row, note=_note([one.pieces]))
        )
        _used(self.left, gather, [one.pieces], step, row)

    def _unit(
        self, mine: list[list[Piece]], theirs: list[list[Piece]], step: int, micro: int
    ) -> None:
        (one, other), lasts = self._gather, self._lasts
        if not one.is_call(mine) or lasts[1]:
            self.left.made.append(
                one.gathered(
                    mine,
                    step=step,
                    micro=micro,
                    note=_note(mine),
                    lasts_across=(lasts[1], ends(theirs[0])),
                )
            )
            _used(self.left, one, mine, step, micro)
            shapes = shapes_of(self.left.made[-1], self.left.making)
        else:
            shapes = shapes_of(one.slots.tree(mine[0][0].call), self.left.making)
        note, at = _note(theirs), (lasts[0], ends(mine[0]))
        self.right.made.append(
            other.gathered(
                theirs, step=step, micro=micro, note=note, lasts_across=at, shapes=shapes
            )
        )
        _used(self.right, other, theirs, step, micro)


def _gathering(side: _Side, calls: Sequence[Fed], sequences: Sequence[Asked]) -> SequenceGatherer:
    given = {f.call.id: f for f in calls}
    rows = Counter(piece.call for one in sequences for piece in one.pieces)
    totals = _totals(sequences, given)
    return SequenceGatherer(SlotAxes(side.making, side.run.calls, given, totals, rows), given)


def _totals(sequences: Iterable[Asked], given: dict[int, Fed]) -> dict[int, int]:
    """Tokens that each root call could see, cached ones and padding included."""
    out = {call: f.width for call, f in given.items()}
    for one in sequences:
        for piece in one.pieces:
            if not given[piece.call].flat:
                out[piece.call] = piece.total
    return out


def _chains(sequences: Sequence[Asked]) -> list[list[Asked]]:
    """Sequences that went through the same calls together."""
    table: dict[tuple[int, ...], list[Asked]] = {}
    for one in sequences:
        table.setdefault(tuple(p.call for p in one.pieces), []).append(one)
    return list(table.values())


def _between(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """The pieces that hold the tokens [start, stop) of a sequence."""
    out = []
    at = 0
    for piece in pieces:
        have = piece.stop - piece.start
        skip, keep = max(start - at, 0), min(stop - at, have)
        if keep > skip:
            out.append(
                piece._replace(
                    start=piece.start + skip,
                    stop=piece.start + keep,
                    whole=piece.whole and keep == have,
                )
            )
        at += have
    return out


def _parted(first: Call, match: Match) -> Parted | None:
    """What of a sequence has no partner, None where all of it has one."""
    one, other, n, ahead = match
    if n == len(one.tokens) and not ahead:
        return None
    before = tuple(t for t in other.tokens[:ahead] if isinstance(t, int))
    row = one.pieces[0].row
    return Parted(
        first.root,
        first.step,
        row,
        n,
        len(one.tokens),
        _token(one, n),
        _token(other, ahead + n),
        before,
    )


def _token(one: Asked, at: int) -> int | None:
    found = one.tokens[at] if at < len(one.tokens) else None
    return found if isinstance(found, int) else None


def _note(lines: Sequence[Sequence[Piece]]) -> str:
    rows = f"{len(lines)} rows" if len(lines) > 1 else f"row {lines[0][0].row}"
    return marks.gathered(rows, len(lines[0]))


def _used(
    side: _Side,
    gathering: SequenceGatherer,
    lines: Sequence[Sequence[Piece]],
    step: int,
    micro: int,
) -> None:
    roots = {p.call: side.run.calls[p.call] for line in lines for p in line}
    for root in roots:
        side.gone.update(c.id for c in gathering.slots.tree(root))
    pieces = tuple((roots[p.call].step, p.row, p.start, p.stop - p.start) for p in lines[0])
    side.joined.append(Joined(side.name, next(iter(roots.values())).root, step, micro, pieces))


def _aside(side: _Side, gathering: SequenceGatherer, calls: Iterable[Fed], step: int) -> None:
    """Root calls without a partner get steps of their own, so that they take nobody's place."""
    if not side.gone:
        return
    for root in (f.call for f in calls):
        if root.id not in side.gone:
            tree = gathering.slots.tree(root.id)
            side.gone.update(c.id for c in tree)
            side.made.append([msgspec.structs.replace(c, step=step) for c in tree])
            step += 1


def _done(side: _Side) -> Run:
    """The run with its new calls in the place of those they were made from; the run itself where
    there are none.
    """
    if not side.gone:
        return side.run
    kept = [c for c in side.run.calls if c.id not in side.gone]
    groups = sorted([[c] for c in kept] + side.made, key=lambda g: min(c.order for c in g))
    place = {id(call): at for at, call in enumerate(call for group in groups for call in group)}
    alone = {c.id: place[id(c)] for c in kept}
    calls: list[Call] = []
    for group in groups:
        number = {call.id: place[id(call)] for call in group} if len(group) > 1 else {}
        for call in group:
            parent = number.get(call.parent, alone.get(call.parent, -1))
            calls.append(
                msgspec.structs.replace(call, id=len(calls), parent=parent, order=len(calls))
            )
    return side.making.done(calls)


def _sentences(
    ours: Sequence[Asked],
    others: Sequence[Asked],
    pairs: Sequence[Match],
    a: Sequence[Fed],
    b: Sequence[Fed],
) -> list[str]:
    def form(calls: Sequence[Fed]) -> str:
        shapes = list(dict.fromkeys(str(f.shape) for f in calls))
        return (
            f"{len(calls)} {'call' if len(calls) == 1 else 'calls'} on "
            f"{', '.join(shapes[:3])}{' …' if len(shapes) > 3 else ''}"
        )

    out = [
        f"{len(pairs)} of {len(ours)} sequences face each other row by row and token by token: "
        f"{form(a)} against {form(b)}"
    ]
    for name, all_, calls, met in (
        ("reference", ours, a, {id(m.one) for m in pairs}),
        ("target", others, b, {id(m.other) for m in pairs}),
    ):
        steps = {f.call.id: f.call.step for f in calls}
        free = [
            f"step {steps[one.pieces[0].call]} row {one.pieces[0].row}"
            for one in all_
            if id(one) not in met
        ]
        if free:
            more = f" and {len(free) - 3} more" if len(free) > 3 else ""
            out.append(
                f"{len(free)} sequences of the {name} have no partner: {', '.join(free[:3])}{more}"
            )
    return out
