"""Batches and tokens: the rows of one run's batches found in the other's, whatever they were
batched, padded or cached like.

A *sequence* is what one row of a batch is asked: its tokens, or for inputs that are no tokens the
row itself. It may lie in one call of the root, padded or not, or in a chain of them (a prompt, then
one token a step with a cache; or the whole prompt again at every step, of which each adds its last
token). Where the batches of both runs have the same shapes and rows, nothing is done.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from whence.align.batches.positions import Course, Place, places_of, rows_of
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Ref, Run
from whence.records.slots import input_name

_DECODER = "decoder_input_ids"
_TOKENS = (_DECODER, "input_ids", "ids", "tokens", "token_ids", "input_tokens", "0")
_POSITIONS = ("position_ids", "positions", "cache_position", "pos", "input_pos")
_CACHES = ("past_key_values", "past_key_value", "cache", "kv_cache", "kv_caches", "past")
_ENOUGH = 0.5  # of the shorter of two sequences must agree for them to be one


class Piece(NamedTuple):
    """Tokens [start, stop) of a row of one root call, in the call's own token axis. total: tokens
    it can see, with those cached.

    row: in a flattened batch the how manieth from the front. whole: do they reach to the call's
    last token?
    """

    call: int
    row: int
    start: int
    stop: int
    total: int
    whole: bool = True


class Row(NamedTuple):
    """The tokens of one row, where they start in the token axis, and the position of each; no
    places where nothing tells them.
    """

    tokens: tuple[object, ...]
    start: int
    places: tuple[Place, ...] = ()


@dataclass(slots=True)
class Asked:
    """One sequence: its tokens (or the bytes of its row) and where they went through the model.
    padded: rows beside it hold more.

    course: of its positions so far, None where they are not known.
    """

    tokens: tuple[object, ...]
    pieces: list[Piece] = field(default_factory=list)
    padded: bool = False
    course: Course | None = None

    def goes_on(self, places: Sequence[Place]) -> bool:
        """Could tokens at these positions be the next ones?"""
        return bool(
            self.tokens and places and self.course is not None and self.course.follows(places[0])
        )

    def add(self, tokens: tuple[object, ...], piece: Piece, places: Sequence[Place]) -> None:
        """The sequence goes on with these tokens."""
        self.tokens = (*self.tokens, *tokens)
        self.pieces.append(piece)
        if places:
            if self.course is None:
                self.course = Course(places[0])
            self.course.go(places)


@dataclass(frozen=True, slots=True)
class Fed:
    """What one root call was given. shape: of the tokens, (batch, tokens) or (tokens,) when rows
    are flattened into one axis.

    rows: the tokens of every row, their start in the token axis and their positions; seen: tokens
    before these, 0 for none, None where nothing tells. known_by: what told which tokens are padding
    ("mask", "ids"), "" where none are.
    """

    call: Call
    shape: tuple[int, ...]
    rows: tuple[Row, ...]
    seen: int | None
    cached: bool
    known_by: str = ""

    @property
    def flat(self) -> bool:
        """Are the rows of the batch behind each other in one axis?"""
        return len(self.shape) == 1

    @property
    def width(self) -> int:
        """Extent of the token axis, padding included."""
        return self.shape[-1]

    @property
    def batch(self) -> int:
        """Rows of the batch as its tensors have them; 1 when they are flattened."""
        return 1 if self.flat else self.shape[0]


def is_told_apart(slot: str, dtype: str) -> bool:
    """Is this an integer input beside the tokens: positions, a mask, token types?"""
    return dtype in ("int64", "int32", "bool") and input_name(slot) not in _TOKENS


def is_position_or_mask(slot: str) -> bool:
    """Does an input tell where tokens stand or which are seen, by its name? It follows from the
    tokens; another one asks nothing else.
    """
    name = input_name(slot)
    return name in _POSITIONS or "mask" in name


def is_position(slot: str) -> bool:
    """Does an input tell where tokens stand, by its name?"""
    return input_name(slot) in _POSITIONS


def is_cache(slot: str) -> bool:
    """Are these keys and values of a cache, by the slot's name
    ("output.past_key_values.layers.0.keys")?
    """
    return slot.split(".")[1] in _CACHES if "." in slot else False


def fed(run: Run, roots: Sequence[Call]) -> list[Fed] | None:
    """What each call of a root was given; None where that cannot be told of one of them."""
    out = []
    places = _position_slots(run, roots)
    for call in roots:
        found = _fed(run, call, places)
        if found is None:
            return None
        out.append(found)
    return out


def _position_slots(run: Run, roots: Sequence[Call]) -> list[str]:
    """Names of the input that holds positions: a usual one, or an integer beside the tokens that
    somewhere counts up along them.
    """
    for call in roots:
        inputs = {input_name(r.slot): r for r in call.slots("input")}
        tokens = _token_input(run, inputs)
        if tokens is None:
            continue
        shape = run.records[tokens.record].shape
        for name, ref in inputs.items():
            record = run.records[ref.record]
            if (
                ref.record == tokens.record
                or record.dtype not in ("int64", "int32")
                or record.shape[-1:] != shape[-1:]
                or shape[-1] < 2
            ):
                continue
            with contextlib.suppress(ElementsMissing):
                steps = np.diff(run.array(ref.record), axis=-1)
                if 2 * np.count_nonzero(steps == 1) > steps.size:
                    return [*_POSITIONS, name]
    return list(_POSITIONS)


def _fed(run: Run, call: Call, places: Sequence[str]) -> Fed | None:
    inputs = {input_name(r.slot): r for r in call.slots("input")}
    ref = _token_input(run, inputs)
    try:
        if ref is not None and _DECODER in inputs and any(n in inputs for n in _TOKENS[1:]):
            return _both(run, call, inputs)
        if ref is not None:
            return _tokens(run, call, ref, inputs, places)
        return _rows(run, call, inputs)
    except ElementsMissing:
        return None


def _token_input(run: Run, inputs: dict[str, Ref]) -> Ref | None:
    def fits(ref: Ref) -> bool:
        record = run.records[ref.record]
        return (
            record.dtype in ("int64", "int32") and len(record.shape) in (1, 2) and record.count > 0
        )

    for name in _TOKENS:
        if name in inputs and fits(inputs[name]):
            return inputs[name]
    return None


def _tokens(run: Run, call: Call, ref: Ref, inputs: dict[str, Ref], names: Sequence[str]) -> Fed:
    ids = run.array(ref.record)
    if ref.slot == f"input.{_DECODER}":  # a mask without that word is the encoder's
        inputs = {
            n.removeprefix("decoder_"): r
            for n, r in inputs.items()
            if n.startswith("decoder_") or "mask" not in n
        }
    positions = next((run.array(inputs[n].record) for n in names if n in inputs), None)
    seen = _cached(run, inputs)
    cached = any(name.split(".")[0] in _CACHES for name in inputs)
    places = places_of(positions, ids.shape)
    if ids.ndim == 1:
        return Fed(call, ids.shape, tuple(_flat_rows(ids, _placed(places, 0))), seen, cached)
    mask = _mask(run, inputs, ids.shape)
    if mask is not None and mask.shape[1] > ids.shape[1]:
        seen = mask.shape[1] - ids.shape[1]
        mask = mask[:, seen:]
    rows = []
    for b, row in enumerate(ids):
        start, stop = _real(mask[b]) if mask is not None else (0, len(row))
        rows.append(Row(tuple(map(int, row[start:stop])), start, _placed(places, b)[start:stop]))
    return Fed(call, ids.shape, tuple(rows), seen, cached, "mask" if mask is not None else "")


def _placed(places: Array | None, row: int) -> tuple[Place, ...]:
    return tuple(map(tuple, places[row].tolist())) if places is not None else ()


def _flat_rows(ids: Array, places: tuple[Place, ...]) -> list[Row]:
    """The rows of a flattened batch, told apart by their positions; one row where these are not
    known.
    """
    spans = rows_of(places) if places else [(0, len(ids))]
    return [
        Row(tuple(map(int, ids[start:stop])), start, places[start:stop]) for start, stop in spans
    ]


def _both(run: Run, call: Call, inputs: dict[str, Ref]) -> Fed | None:
    """Encoder and decoder asked at once: two axes of tokens, so that a row is one unit; None where
    one of them is padded.
    """
    parts = []
    for name in (_DECODER, next(n for n in _TOKENS[1:] if n in inputs)):
        own = {
            n.removeprefix("decoder_"): r
            for n, r in inputs.items()
            if n.startswith("decoder_") == (name == _DECODER)
        }
        found = _tokens(run, call, inputs[name], own, ())
        if found.flat or any(len(tokens) != found.width for tokens, *_ in found.rows):
            return None
        parts.append(found.rows)
    if len(parts[0]) != len(parts[1]):
        return None
    return Fed(
        call,
        (len(parts[0]), 1),
        tuple(Row(((a[0], b[0]),), 0) for a, b in zip(*parts, strict=True)),
        None,
        False,
    )


def _rows(run: Run, call: Call, inputs: dict[str, Ref]) -> Fed | None:
    """Inputs that are no tokens: a row is one unit, known by its bytes; with a mask beside it,
    every position is one.
    """
    several = {
        name: r
        for name, r in inputs.items()
        if len(run.records[r.record].shape) > 1 and run.records[r.record].count
    }
    # Positions and masks say where the rows of another input lie, whichever comes first.
    asking = {name: r for name, r in several.items() if not is_position_or_mask(f"input.{name}")}
    ref = next(iter((asking or several).values()), None)
    if ref is None:
        return None
    array = run.array(ref.record)
    mask = _mask(run, inputs, array.shape[:2]) if array.ndim > 2 else None
    if mask is None or mask.shape != array.shape[:2]:
        return Fed(
            call, (array.shape[0], 1), tuple(Row((row.tobytes(),), 0) for row in array), None, False
        )
    rows = []
    for b, row in enumerate(array):
        start, stop = _real(mask[b])
        rows.append(Row(tuple(position.tobytes() for position in row[start:stop]), start))
    return Fed(call, array.shape[:2], tuple(rows), None, False)


def _real(mask: Array) -> tuple[int, int]:
    """Where a row's real tokens start and stop. Padding in the middle is no padding: the row is
    taken whole.
    """
    real = np.flatnonzero(mask)
    return (
        (int(real[0]), int(real[-1]) + 1)
        if len(real) and len(real) == real[-1] - real[0] + 1
        else (0, len(mask))
    )


def _mask(run: Run, inputs: dict[str, Ref], shape: tuple[int, ...]) -> Array | None:
    """Which tokens are real, (batch, tokens or more); None where nothing says so."""
    for name, ref in inputs.items():
        record = run.records[ref.record]
        if (
            "mask" not in name
            or len(record.shape) != 2
            or record.shape[0] != shape[0]
            or record.shape[1] < shape[1]
        ):
            continue
        array = run.array(ref.record)
        if array.dtype.kind not in "biu" or not np.isin(array, (0, 1)).all():
            continue
        # "padding_mask" is true where nothing is to be seen.
        return np.asarray(array == 0 if "pad" in name else array != 0)
    return None


def _cached(run: Run, inputs: dict[str, Ref]) -> int | None:
    """Tokens that a growing cache among the inputs holds: the second last axis of keys and values
    (batch, heads, tokens, features).
    """
    extents = {
        run.records[ref.record].shape[-2]
        for name, ref in inputs.items()
        if name.split(".")[0] in _CACHES and len(run.records[ref.record].shape) == 4
    }
    return extents.pop() if len(extents) == 1 else None


def asked(calls: Sequence[Fed], known: Sequence[tuple[object, ...]] = ()) -> list[Asked]:
    """The sequences of a root, each with its pieces in order.

    known: sequences of the other run. They decide which of several as long a row of a flattened
    batch goes on with.
    """
    done: list[Asked] = []
    open_: list[Asked] = []
    before: Fed | None = None
    for call in calls:
        if call.flat:
            open_ = _flat_step(call, open_, done, known)
        else:
            how = _continues(before, call, open_) if before is not None and not before.flat else ""
            if not how:
                open_ = [Asked((), [], False) for _ in call.rows]
                done += open_
            for row, (asked_, (tokens, start, places)) in enumerate(
                zip(open_, call.rows, strict=True)
            ):
                had = len(asked_.tokens) if how == "again" else 0
                seen = max((p.total for p in asked_.pieces), default=0) if how == "cache" else 0
                piece = Piece(
                    call.call.id, row, start + had, start + len(tokens), seen + call.width
                )
                asked_.add(tokens[had:], piece, places[had:])
                asked_.padded = asked_.padded or len(tokens) != call.width
        before = call
    return done


def _continues(before: Fed, call: Fed, open_: Sequence[Asked]) -> str:
    """How a call goes on with the rows of the one before: "cache" (only new tokens), "again" (all
    tokens and new ones) or "".
    """
    if call.batch != before.batch or len(open_) != len(call.rows):
        return ""
    if _grown(before, call, open_):
        return "again"
    total = max(p.total for a in open_ for p in a.pieces)
    if call.seen is not None:
        return "cache" if call.seen == total else "cache" if call.cached and call.width == 1 else ""
    if all(row.places for row in call.rows):
        return (
            "cache"
            if all(a.goes_on(row.places) for a, row in zip(open_, call.rows, strict=True)) and total
            else ""
        )
    return "cache" if call.cached and call.width == 1 else ""


def _grown(before: Fed, call: Fed, open_: Sequence[Asked]) -> bool:
    """Do all rows begin with what there was and go on? In rows of a fixed length some may have come
    to their end.
    """
    rows = [(len(a.tokens), tokens) for a, (tokens, _, _) in zip(open_, call.rows, strict=True)]
    if any(tokens[:had] != a.tokens for a, (had, tokens) in zip(open_, rows, strict=True)):
        return False
    longer = [len(tokens) > had for had, tokens in rows]
    fixed = call.width == before.width and call.known_by and call.known_by == before.known_by
    return (
        any(longer)
        if fixed and call.known_by == "ids"
        else all(longer) and bool(fixed or call.width > before.width)
    )


def _flat_step(
    call: Fed, open_: Sequence[Asked], done: list[Asked], known: Sequence[tuple[object, ...]]
) -> list[Asked]:
    """Rows of a flattened batch: one whose first position follows a sequence's last goes on with
    it, another is new.
    """
    free = list(open_)
    now: list[Asked] = []
    todo = list(call.rows)[::-1]
    while todo:
        tokens, start, places = todo.pop()
        found = _goes_on([a for a in free if a.goes_on(places)], tokens, known)
        if found is None:
            found = Asked(())
            done.append(found)
        else:
            # Requests keep their order: positions of two of them may follow on each other by
            # chance.
            after = next((a for a in free[free.index(found) + 1 :]), None)
            cut = next(
                (
                    n
                    for n in range(1, len(places))
                    if after is not None and after.goes_on(places[n:])
                ),
                None,
            )
            if cut is not None:
                todo.append(Row(tokens[cut:], start + cut, places[cut:]))
                tokens, places = tokens[:cut], places[:cut]
            free.remove(found)
        had = len(found.tokens)
        found.add(
            tokens,
            Piece(call.call.id, len(now), start, start + len(tokens), had + len(tokens)),
            places,
        )
        now.append(found)
    return now + free


def _goes_on(
    fits: Sequence[Asked], tokens: tuple[object, ...], known: Sequence[tuple[object, ...]]
) -> Asked | None:
    """The one that these tokens follow in the other run, else one that is not at its end there,
    else the first: requests keep order.
    """
    if len(fits) < 2 or not known:
        return next(iter(fits), None)
    length = len(fits[0].tokens) + 1
    ahead = {sequence[:length] for sequence in known}
    likely = [a for a in fits if (*a.tokens, *tokens[:1]) in ahead] or [
        a for a in fits if a.tokens not in known
    ]
    return (likely or fits)[0]


def same_batches(left: Sequence[Fed], right: Sequence[Fed]) -> bool:
    """Are both asked in one form, call by call? Rows that differ are then a difference of inputs,
    unless rows lie elsewhere.
    """
    pairs = list(zip(left, right))
    if any(a.shape != b.shape for a, b in pairs):
        return False
    for a, b in pairs:
        mine, theirs = [(r[0], r[1]) for r in a.rows], [(r[0], r[1]) for r in b.rows]
        if mine != theirs and (
            sorted(r[0] for r in mine) == sorted(r[0] for r in theirs) or _elsewhere(mine, theirs)
        ):
            return False
    return True


def _elsewhere(
    left: Sequence[tuple[tuple[object, ...], int]], right: Sequence[tuple[tuple[object, ...], int]]
) -> bool:
    """Is a row of one batch (tokens, padding before it) in another place of the other, or behind
    other padding?

    A single token is in two rows by chance; a row's bytes are not.
    """
    apart = [(mine, theirs) for mine, theirs in zip(left, right, strict=False) if mine != theirs]
    there = {tokens for _, (tokens, _) in apart}
    return any(
        tokens in there and (len(tokens) > 1 or isinstance(tokens[0], bytes))
        for (tokens, _), _ in apart
        if tokens
    )


class Match(NamedTuple):
    """A sequence of the reference is paired with one of the target: their first `shared` tokens,
    after `ahead` more in the target.
    """

    one: Asked
    other: Asked
    shared: int
    ahead: int = 0


def matched(left: Sequence[Asked], right: Sequence[Asked]) -> list[Match]:
    """Which sequences are paired, each once: equal ones, then those that end alike or start
    alike.
    """
    exact: dict[tuple[object, ...], list[Asked]] = defaultdict(list)
    for one in right:
        exact[one.tokens].append(one)
    out: list[Match] = []
    rest: list[Asked] = []
    for one in left:
        found = exact.get(one.tokens)
        if found:
            out.append(Match(one, found.pop(0), len(one.tokens)))
        else:
            rest.append(one)
    free = [one for found in exact.values() for one in found]
    for one in rest:
        shared = [(_shared(one.tokens, other.tokens), -i) for i, other in enumerate(free)]
        best, at = max(shared, default=(0, 0))
        behind = next(
            (i for i, other in enumerate(free) if other.tokens[-len(one.tokens) :] == one.tokens),
            None,
        )
        if behind is not None and best < len(one.tokens):
            other = free.pop(behind)
            out.append(Match(one, other, len(one.tokens), len(other.tokens) - len(one.tokens)))
        elif best and best >= _ENOUGH * min(len(one.tokens), len(free[-at].tokens)):
            out.append(Match(one, free.pop(-at), best))
    return out


def _shared(one: tuple[object, ...], other: tuple[object, ...]) -> int:
    n = 0
    for a, b in zip(one, other):
        if a != b:
            break
        n += 1
    return n


def followers(calls: Iterable[Call]) -> dict[int, int]:
    """Outermost calls of a module of a root -> the root's own call that they follow, by id.

    A module that is called before the root ever was (an encoder) is a root of its own.
    """
    out: dict[int, int] = {}
    latest: dict[tuple[object, ...], int] = {}
    ahead: set[tuple[object, ...]] = set()
    for call in sorted((c for c in calls if c.parent == -1), key=lambda c: c.order):
        root = call.rank, call.root, call.phase
        if not call.scope:
            latest[root] = call.id
        elif root not in latest:
            ahead.add((*root, call.scope))
        elif (*root, call.scope) not in ahead:
            out[call.id] = latest[root]
    return out
