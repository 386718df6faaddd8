"""Rows of a fixed length: which of their tokens are padding, where the call was given no mask that
says so.

A predictor with one form of input is given (batch, length) ids at every step, of which only some
are real. What tells them apart, in this order: an input with the lengths of rows; the ids
themselves, since from one step to the next a new token takes the place of padding (behind the text,
or in front of it, which moves on by one); the id that the model's settings call padding. Where none
of these does and rows end in a repeated id, the last real token is not known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whence.align.batches.sequences import Fed, Row
from whence.errors import ElementsMissing
from whence.records import Run

Ids = npt.NDArray[np.int64]

_LEAST = 3  # tokens of a row that may be padded
_SURE = 2  # ids in a row that a padded row ends in, before that means anything
_REPEATED = 3  # ids in a row that no text ends in by chance
_INTEGERS = ("int64", "int32")


class Padding(NamedTuple):
    """The id that fills rows up, and whether it stands behind the text."""

    token: int
    behind: bool


def unpadded(run: Run, given: Sequence[Fed], known: Collection[int] = ()) -> tuple[list[Fed], str]:
    """(what the calls of a root were given without padding, why the last real token is not known or
    "").

    known: ids that the model's settings call padding. Calls with a mask, positions or flattened
    rows stay as they are.
    """
    out = list(given)
    asked = _series(given)
    if not asked:
        return out, ""
    padding = _seen_growing([ids for _, ids in asked]) or _stated([ids for _, ids in asked], known)
    for places, ids in asked:
        lengths = _given_lengths(run, given[places[0]])
        if lengths is not None:
            for at in places:
                rows = _given_lengths(run, given[at])
                out[at] = _cut(given[at], rows, behind=True) if rows is not None else given[at]
        elif padding is not None:
            for at, rows in zip(places, _real(ids, padding), strict=True):
                out[at] = _cut(given[at], rows, behind=padding.behind)
        else:
            why = next(
                (
                    doubt
                    for k, number in enumerate(places)
                    if (doubt := _doubtful(given[number], ids[k]))
                ),
                "",
            )
            if why:
                return out, why
    return out, ""


def _series(given: Sequence[Fed]) -> list[tuple[list[int], Ids]]:
    """(numbers of calls, their ids (calls, batch, length)) of calls in a row of one form, of which
    nothing tells what is real.
    """
    out: list[tuple[list[int], Ids]] = []
    for at, one in enumerate(given):
        whole = not one.flat and not one.cached and not one.known_by and one.width >= _LEAST
        tokens = [row[0] for row in one.rows]
        if (
            not whole
            or _longer(given, at)
            or any(
                len(row) != one.width or not all(isinstance(t, int) for t in row) for row in tokens
            )
        ):
            continue
        ids = np.array(tokens, np.int64)[None]
        if out and out[-1][0][-1] == at - 1 and out[-1][1].shape[1:] == ids.shape[1:]:
            out[-1] = ([*out[-1][0], at], np.concatenate([out[-1][1], ids]))
        else:
            out.append(([at], ids))
    return out


def _longer(given: Sequence[Fed], at: int) -> bool:
    """Does a call belong to a text that is given whole and gets longer, or goes on with a cache?
    Then its last column is real.
    """
    one = given[at]
    for k, other in ((at, at + 1), (at - 1, at)):
        if (
            k < 0
            or other >= len(given)
            or given[k].flat
            or given[other].flat
            or given[k].batch != given[other].batch
        ):
            continue
        a, b = given[k], given[other]
        if a.width < b.width and all(
            y[0][: a.width] == x[0] for x, y in zip(a.rows, b.rows, strict=True)
        ):
            return True
        if k == at and one.width > b.width == 1:
            return True
    return False


# ---- what the padding is


def _seen_growing(series: Sequence[Ids]) -> Padding | None:
    """The padding whose place new tokens take from call to call; None where nothing grows so, or
    not by one id on one side.
    """
    found: Counter[Padding] = Counter()
    for ids in series:
        for now, then in itertools.pairwise(ids):
            for behind in (True, False):
                token = _replaced(now, then, behind=behind)
                if token is not None:
                    found[Padding(token, behind)] += 1
    if not found:
        return None
    (best, count), *others = found.most_common()
    return best if all(other.token == best.token or 2 * n < count for other, n in others) else None


def _replaced(now: Ids, then: Ids, *, behind: bool) -> int | None:
    """The id that gave way to new tokens in every row that changed, None where rows did otherwise
    or too few ids stood there.
    """
    tokens: set[int] = set()
    most = 0
    for a, b in zip(now, then, strict=True):
        if np.array_equal(a, b):
            continue
        filled = a[_first_apart(a, b) :] if behind else a[: _moved(a, b)]
        if not 0 < len(filled) < len(a) or (filled != filled[0]).any():
            return None
        tokens.add(int(filled[0]))
        most = max(most, len(filled) if behind else _run(a, int(filled[0]), behind=False))
    return tokens.pop() if len(tokens) == 1 and most >= _SURE else None


def _first_apart(a: Ids, b: Ids) -> int:
    """The first place at which two rows differ."""
    return int(np.argmax(a != b))


def _moved(a: Ids, b: Ids) -> int:
    """By how many places a row moved to the front, so that new tokens stand behind it; 0 where it
    did not.
    """
    return next((n for n in range(1, min(len(a) // 2, 9)) if np.array_equal(a[n:], b[:-n])), 0)


def _stated(series: Sequence[Ids], known: Collection[int]) -> Padding | None:
    """The padding that the settings name, on the side on which rows have it."""
    found: Counter[Padding] = Counter()
    for ids in series:
        for token in known:
            for behind in (True, False):
                found[Padding(token, behind)] += int(
                    np.count_nonzero(ids[:, :, -1 if behind else 0] == token)
                )
    best = next(iter(found.most_common(1)), None)
    return best[0] if best is not None and best[1] else None


def _run(row: Ids, token: int, *, behind: bool) -> int:
    """How often a row repeats an id at its end, or at its beginning."""
    other = np.flatnonzero((row[::-1] if behind else row) != token)
    return int(other[0]) if len(other) else len(row)


def _doubtful(given: Fed, ids: Ids) -> str:
    """Why the last real token of a call's rows is not known, "" where nothing hints at padding:
    rows that end in one repeated id.
    """
    runs = [_run(row, int(row[-1]), behind=True) for row in ids]
    if max(runs) < _REPEATED:
        return ""
    row = runs.index(max(runs))
    return (
        f"{given.call.root} was given {list(ids.shape)} ids without a mask, and row {row} of "
        f"step {given.call.step} ends in "
        f"{max(runs)} times {int(ids[row, -1])}: whether that is padding, and so which logits "
        "belong to the last real token, is not known; "
        "give the model its mask or lengths, or capture two steps of one generation"
    )


# ---- what is real


def _real(ids: Ids, padding: Padding) -> list[list[int]]:
    """How many tokens of each row are real, by call. ids: (calls, batch, length)."""
    calls, batch, length = ids.shape
    stripped = [
        [max(length - _run(row, padding.token, behind=padding.behind), 1) for row in call]
        for call in ids
    ]
    if not padding.behind:
        return stripped
    real = [list(rows) for rows in stripped]
    for row in range(batch):
        surely = False  # is the length at the next call known from what was written there later?
        for at in range(calls - 2, -1, -1):
            now, then = ids[at, row], ids[at + 1, row]
            if not np.array_equal(now, then):
                place = _first_apart(now, then)
                surely = place > 0 and bool((now[place:] == padding.token).all())
                if surely:
                    real[at][row] = max(place, stripped[at][row])
            elif surely and _grows(ids[at], ids[at + 1], padding, row):
                # a token that is the padding's own id
                real[at][row] = max(real[at + 1][row] - 1, stripped[at][row])
    return real


def _grows(now: Ids, then: Ids, padding: Padding, but: int) -> bool:
    """Did another row get a new token here? A row alone that did not change may have got one that
    looks like padding.
    """
    others = [row for row in range(len(now)) if row != but]
    return not others or any(not np.array_equal(now[row], then[row]) for row in others)


def _given_lengths(run: Run, given: Fed) -> list[int] | None:
    """What an input with the lengths of the rows says, None where there is none."""
    for ref in given.call.slots("input"):
        record = run.records[ref.record]
        if (
            "len" not in ref.slot
            or record.dtype not in _INTEGERS
            or record.count != given.batch
            or len(record.shape) > 2
        ):
            continue
        with contextlib.suppress(ElementsMissing):
            lengths = [int(n) for n in run.array(ref.record).reshape(-1)]
            if all(1 <= n <= given.width for n in lengths):
                return lengths
    return None


def _cut(given: Fed, lengths: Sequence[int], *, behind: bool) -> Fed:
    """What a call was given, without padding."""
    rows = []
    for (tokens, _, places), length in zip(given.rows, lengths, strict=True):
        start = 0 if behind else given.width - length
        rows.append(Row(tokens[start : start + length], start, places[start : start + length]))
    return dataclasses.replace(given, rows=tuple(rows), known_by="ids")
