"""Pairs the sequences of two runs, however either was batched, padded or cached.

A *sequence* is the content of one row of a batch: its tokens, or the row itself for inputs without
tokens. It lies in one call of the root, padded or not, or in a chain of calls: a prompt, then one
token per step with a cache; or the whole text again at every step, each time with one more token.
If the batches of both runs have the same shapes and rows, nothing is done.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from whence.align.batches.batch import Batch, Row
from whence.align.batches.positions import Course, Place
from whence.records import Call, in_order
from whence.records.slots import is_cache, is_input, is_written

Tokens = tuple[object, ...]

_ENOUGH = 0.5  # least share of the shorter of two sequences that agrees if they are paired


class Piece(NamedTuple):
    """Tokens [start, stop) of a row of one root call, in the call's own token axis.

    row: index of the row in the batch, flattened or not. total: number of tokens visible to the
    piece, including cached ones. whole: whether the piece contains the row's last token.
    """

    call: int
    row: int
    start: int
    stop: int
    total: int
    whole: bool = True


@dataclass(slots=True)
class TokenSequence:
    """One sequence: its tokens (or the bytes of its row) and the pieces in which the model
    processed them. padded: whether a call was wider than its row. course: the positions so far,
    None if they are not known.
    """

    tokens: Tokens
    pieces: list[Piece] = field(default_factory=list)
    padded: bool = False
    course: Course | None = None

    def goes_on(self, places: Sequence[Place]) -> bool:
        """Whether tokens at these positions may be the next ones of the sequence."""
        return bool(
            self.tokens and places and self.course is not None and self.course.follows(places[0])
        )

    def add(self, tokens: Tokens, piece: Piece, places: Sequence[Place]) -> None:
        """Append the tokens of a piece, at these positions."""
        self.tokens = (*self.tokens, *tokens)
        self.pieces.append(piece)
        if places:
            if self.course is None:
                self.course = Course(places[0])
            self.course.go(places)


def sequences_of(batches: Sequence[Batch], hints: Sequence[Tokens] = ()) -> list[TokenSequence]:
    """The sequences of a root, each with its pieces in order.

    hints: token sequences of the other run, which decide which of several equally long sequences a
    row of a flattened batch continues.
    """
    sequences: list[TokenSequence] = []
    open_: list[TokenSequence] = []
    previous: Batch | None = None
    for batch in batches:
        if batch.flat:
            open_ = _flat_step(batch, open_, sequences, hints)
        else:
            how = "" if previous is None or previous.flat else _continues(previous, batch, open_)
            if not how:
                open_ = [TokenSequence(()) for _ in batch.rows]
                sequences += open_
            for k, (sequence, row) in enumerate(zip(open_, batch.rows, strict=True)):
                tokens, start, places = row
                skip = len(sequence.tokens) if how == "again" else 0
                past = max((p.total for p in sequence.pieces), default=0) if how == "cache" else 0
                stop, total = start + len(tokens), past + batch.width
                piece = Piece(batch.call.id, k, start + skip, stop, total)
                sequence.add(tokens[skip:], piece, places[skip:])
                sequence.padded = sequence.padded or len(tokens) != batch.width
        previous = batch
    return sequences


def _continues(previous: Batch, batch: Batch, open_: Sequence[TokenSequence]) -> str:
    """How a call continues the rows of the previous one: "cache" (with new tokens only), "again"
    (with the whole text) or "" (not at all).
    """
    if batch.size != previous.size or len(open_) != len(batch.rows):
        return ""
    if _has_grown(previous, batch, open_):
        return "again"
    if _takes_up_caches(previous.call, batch.call):
        return "cache"
    total = max(p.total for s in open_ for p in s.pieces)
    if batch.past is None and all(row.places for row in batch.rows):
        rows = zip(open_, batch.rows, strict=True)
        return "cache" if all(s.goes_on(row.places) for s, row in rows) and total else ""
    return "cache" if batch.past == total or (batch.cached and batch.width == 1) else ""


def _takes_up_caches(previous: Call, call: Call) -> bool:
    """Whether a call reads a cache that the previous call wrote. If the cache is a state, its shape
    does not show a number of tokens.
    """
    left = {ref.record for ref in previous.refs if is_written(ref.slot)}
    return any(is_input(r.slot) and is_cache(r.slot) and r.record in left for r in call.refs)


def _has_grown(previous: Batch, batch: Batch, open_: Sequence[TokenSequence]) -> bool:
    """Whether every row starts with its tokens so far and adds some. Rows of a fixed length that
    have ended need not add any.
    """
    rows = [(s.tokens, row.tokens) for s, row in zip(open_, batch.rows, strict=True)]
    if any(tokens[: len(start)] != start for start, tokens in rows):
        return False
    longer = [len(tokens) > len(start) for start, tokens in rows]
    source = batch.padding_from
    fixed = batch.width == previous.width and source and source == previous.padding_from
    if fixed and source == "ids":
        return any(longer)
    return all(longer) and bool(fixed or batch.width > previous.width)


def _flat_step(
    batch: Batch,
    open_: Sequence[TokenSequence],
    sequences: list[TokenSequence],
    hints: Sequence[Tokens],
) -> list[TokenSequence]:
    """Add the rows of a flattened batch. A row continues the sequence whose last position precedes
    its first; otherwise it starts a new sequence. Returns the sequences that may continue.
    """
    free = list(open_)
    now: list[TokenSequence] = []
    todo = list(batch.rows)[::-1]
    while todo:
        tokens, start, places = todo.pop()
        sequence = _continued([s for s in free if s.goes_on(places)], tokens, hints)
        if sequence is None:
            sequence = TokenSequence(())
            sequences.append(sequence)
        else:
            # The positions of two requests may be consecutive by chance; requests keep their order.
            behind = free[free.index(sequence) + 1 :][:1]
            starts = (
                n for n in range(1, len(places)) if any(s.goes_on(places[n:]) for s in behind)
            )
            cut = next(starts, None)
            if cut is not None:
                todo.append(Row(tokens[cut:], start + cut, places[cut:]))
                tokens, places = tokens[:cut], places[:cut]
            free.remove(sequence)
        n, total = len(tokens), len(sequence.tokens) + len(tokens)
        sequence.add(tokens, Piece(batch.call.id, len(now), start, start + n, total), places)
        now.append(sequence)
    return now + free


def _continued(
    fits: Sequence[TokenSequence], tokens: Tokens, hints: Sequence[Tokens]
) -> TokenSequence | None:
    """The sequence that these tokens continue: one that does so in the other run, else one that has
    not ended there, else the first, since requests keep their order.
    """
    if len(fits) < 2 or not hints:
        return next(iter(fits), None)
    length = len(fits[0].tokens) + 1
    starts = {sequence[:length] for sequence in hints}
    likely = [s for s in fits if (*s.tokens, *tokens[:1]) in starts]
    return (likely or [s for s in fits if s.tokens not in hints] or fits)[0]


def same_batches(
    reference: Sequence[Batch], target: Sequence[Batch], *, in_this_order: bool = False
) -> bool:
    """Whether both runs have batches of equal shapes, call by call. Rows that differ are then a
    difference of inputs, unless the other run has them in another order. in_this_order: whether
    each call depends on earlier ones, as in a training.
    """
    pairs = list(zip(reference, target))
    if any(a.shape != b.shape for a, b in pairs):
        return False
    rows = [([r[:2] for r in a.rows], [r[:2] for r in b.rows]) for a, b in pairs]
    if any(
        a != b and (sorted(r[0] for r in a) == sorted(r[0] for r in b) or _elsewhere(a, b))
        for a, b in rows
    ):
        return False
    every, across = (list(itertools.chain(*side)) for side in zip(*rows, strict=True))
    return in_this_order or not _elsewhere(every, across)


def _elsewhere(
    reference: Sequence[tuple[Tokens, int]], target: Sequence[tuple[Tokens, int]]
) -> bool:
    """Whether a row (tokens, padding before it) is at another place in the other batch, or has
    other padding before it.

    A single token may be in two rows by chance; a row's bytes are not.
    """
    unequal = [(a, b) for a, b in zip(reference, target, strict=False) if a != b]
    target_tokens = {tokens for _, (tokens, _) in unequal}
    return any(
        tokens in target_tokens and (len(tokens) > 1 or isinstance(tokens[0], bytes))
        for (tokens, _), _ in unequal
        if tokens
    )


class Match(NamedTuple):
    """A pair of sequences that share their first `shared` tokens; the target has `ahead` further
    tokens before these.
    """

    reference: TokenSequence
    target: TokenSequence
    shared: int
    ahead: int = 0


def matched(references: Sequence[TokenSequence], targets: Sequence[TokenSequence]) -> list[Match]:
    """Pair sequences, each once: equal ones first, then those with a common end or start."""
    exact: dict[Tokens, list[TokenSequence]] = defaultdict(list)
    for sequence in targets:
        exact[sequence.tokens].append(sequence)
    out: list[Match] = []
    unpaired: list[TokenSequence] = []
    for sequence in references:
        equal = exact.get(sequence.tokens)
        if equal:
            out.append(Match(sequence, equal.pop(0), len(sequence.tokens)))
        else:
            unpaired.append(sequence)
    free = [sequence for equal in exact.values() for sequence in equal]
    for sequence in unpaired:
        tokens = sequence.tokens
        shared = [shared_start(tokens, candidate.tokens) for candidate in free]
        best = max(range(len(free)), key=shared.__getitem__, default=-1)
        ending = next((i for i, c in enumerate(free) if c.tokens[-len(tokens) :] == tokens), -1)
        if ending >= 0 and shared[best] < len(tokens):
            candidate = free.pop(ending)
            ahead = len(candidate.tokens) - len(tokens)
            out.append(Match(sequence, candidate, len(tokens), ahead))
        elif best >= 0 and shared[best] >= max(
            1, _ENOUGH * min(len(tokens), len(free[best].tokens))
        ):
            out.append(Match(sequence, free.pop(best), shared[best]))
    return out


def shared_start(a: Tokens, b: Tokens) -> int:
    """The length of the common start of two token sequences."""
    unequal = (n for n, (x, y) in enumerate(zip(a, b)) if x != y)
    return next(unequal, min(len(a), len(b)))


def followers(calls: Iterable[Call]) -> dict[int, int]:
    """By id of an outermost call of a root's module, the id of the root's own call that it follows.

    A module that is first called before the root (an encoder) is a root of its own.
    """
    out: dict[int, int] = {}
    latest: dict[tuple[object, ...], int] = {}
    ahead: set[tuple[object, ...]] = set()
    for call in in_order(c for c in calls if c.parent == -1):
        root = call.rank, call.root, call.phase
        if not call.scope:
            latest[root] = call.id
        elif root not in latest:
            ahead.add((*root, call.scope))
        elif (*root, call.scope) not in ahead:
            out[call.id] = latest[root]
    return out
