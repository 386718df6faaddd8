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

from whence.align.batches.batch import Batch, Row
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
    at_end: bool


def unpadded(
    run: Run, batches: Sequence[Batch], padding_ids: Collection[int] = ()
) -> tuple[list[Batch], str]:
    """(a root's batches without padding, why the last real token is not known or "").

    padding_ids: what the model's settings call padding. Batches with a mask, positions or flattened
    rows stay as they are.
    """
    out = list(batches)
    series = _series(batches)
    if not series:
        return out, ""
    padding = _replaced_padding([ids for _, ids in series]) or _stated_padding(
        [ids for _, ids in series], padding_ids
    )
    for indices, ids in series:
        lengths = _given_lengths(run, batches[indices[0]])
        if lengths is not None:
            for index in indices:
                rows = _given_lengths(run, batches[index])
                out[index] = (
                    _cut(batches[index], rows, at_end=True) if rows is not None else batches[index]
                )
        elif padding is not None:
            for index, rows in zip(indices, _real_lengths(ids, padding), strict=True):
                out[index] = _cut(batches[index], rows, at_end=padding.at_end)
        else:
            why = next(
                (
                    doubt
                    for k, number in enumerate(indices)
                    if (doubt := _doubtful(batches[number], ids[k]))
                ),
                "",
            )
            if why:
                return out, why
    return out, ""


def _series(batches: Sequence[Batch]) -> list[tuple[list[int], Ids]]:
    """(indices, ids (calls, batch, length)) of successive calls whose padding is not known."""
    out: list[tuple[list[int], Ids]] = []
    for index, batch in enumerate(batches):
        whole = (
            not batch.flat and not batch.cached and not batch.padding_from and batch.width >= _LEAST
        )
        tokens = [row[0] for row in batch.rows]
        if (
            not whole
            or _longer(batches, index)
            or any(
                len(row) != batch.width or not all(isinstance(t, int) for t in row)
                for row in tokens
            )
        ):
            continue
        ids = np.array(tokens, np.int64)[None]
        if out and out[-1][0][-1] == index - 1 and out[-1][1].shape[1:] == ids.shape[1:]:
            out[-1] = ([*out[-1][0], index], np.concatenate([out[-1][1], ids]))
        else:
            out.append(([index], ids))
    return out


def _longer(batches: Sequence[Batch], index: int) -> bool:
    """Is this call's text given again, longer, or with a cache? Then its last column is real."""
    batch = batches[index]
    for earlier, later in ((index, index + 1), (index - 1, index)):
        if (
            earlier < 0
            or later >= len(batches)
            or batches[earlier].flat
            or batches[later].flat
            or batches[earlier].size != batches[later].size
        ):
            continue
        a, b = batches[earlier], batches[later]
        if a.width < b.width and all(
            y[0][: a.width] == x[0] for x, y in zip(a.rows, b.rows, strict=True)
        ):
            return True
        if earlier == index and batch.width > b.width == 1:
            return True
    return False


# ---- what the padding is


def _replaced_padding(series: Sequence[Ids]) -> Padding | None:
    """The padding whose place new tokens take from call to call, None where none or several do."""
    counts: Counter[Padding] = Counter()
    for ids in series:
        for now, then in itertools.pairwise(ids):
            for at_end in (True, False):
                token = _replaced(now, then, at_end=at_end)
                if token is not None:
                    counts[Padding(token, at_end)] += 1
    if not counts:
        return None
    (best, count), *others = counts.most_common()
    return (
        best if all(padding.token == best.token or 2 * n < count for padding, n in others) else None
    )


def _replaced(now: Ids, then: Ids, *, at_end: bool) -> int | None:
    """The id that new tokens replaced in every changed row, None for several or too few."""
    tokens: set[int] = set()
    longest = 0
    for a, b in zip(now, then, strict=True):
        if np.array_equal(a, b):
            continue
        filled = a[_first_apart(a, b) :] if at_end else a[: _moved(a, b)]
        if not 0 < len(filled) < len(a) or (filled != filled[0]).any():
            return None
        tokens.add(int(filled[0]))
        longest = max(longest, len(filled) if at_end else _run(a, int(filled[0]), at_end=False))
    return tokens.pop() if len(tokens) == 1 and longest >= _SURE else None


def _first_apart(a: Ids, b: Ids) -> int:
    """The first place at which two rows differ."""
    return int(np.argmax(a != b))


def _moved(a: Ids, b: Ids) -> int:
    """By how many places a row moved to the front, before new tokens; 0 where it did not."""
    return next((n for n in range(1, min(len(a) // 2, 9)) if np.array_equal(a[n:], b[:-n])), 0)


def _stated_padding(series: Sequence[Ids], padding_ids: Collection[int]) -> Padding | None:
    """The padding that the settings name, on the side on which rows have it."""
    counts: Counter[Padding] = Counter()
    for ids in series:
        for token in padding_ids:
            for at_end in (True, False):
                counts[Padding(token, at_end)] += int(
                    np.count_nonzero(ids[:, :, -1 if at_end else 0] == token)
                )
    best = next(iter(counts.most_common(1)), None)
    return best[0] if best is not None and best[1] else None


def _run(row: Ids, token: int, *, at_end: bool) -> int:
    """How often a row repeats an id at its end, or at its beginning."""
    breaks = np.flatnonzero((row[::-1] if at_end else row) != token)
    return int(breaks[0]) if len(breaks) else len(row)


def _doubtful(batch: Batch, ids: Ids) -> str:
    """Why rows' last real token is not known: one ends in a repeated id; "" for none."""
    runs = [_run(row, int(row[-1]), at_end=True) for row in ids]
    if max(runs) < _REPEATED:
        return ""
    row = runs.index(max(runs))
    return (
        f"{batch.call.root} was given {list(ids.shape)} ids without a mask, and row {row} of "
        f"step {batch.call.step} ends in "
        f"{max(runs)} times {int(ids[row, -1])}: whether that is padding, and so which logits "
        "belong to the last real token, is not known; "
        "give the model its mask or lengths, or capture two steps of one generation"
    )


# ---- what is real


def _real_lengths(ids: Ids, padding: Padding) -> list[list[int]]:
    """How many tokens of each row are real, by call. ids: (calls, batch, length)."""
    calls, batch, length = ids.shape
    stripped = [
        [max(length - _run(row, padding.token, at_end=padding.at_end), 1) for row in call]
        for call in ids
    ]
    if not padding.at_end:
        return stripped
    real = [list(rows) for rows in stripped]
    for row in range(batch):
        surely = False  # is the length at the next call known from what was written there later?
        for index in range(calls - 2, -1, -1):
            now, then = ids[index, row], ids[index + 1, row]
            if not np.array_equal(now, then):
                place = _first_apart(now, then)
                surely = place > 0 and bool((now[place:] == padding.token).all())
                if surely:
                    real[index][row] = max(place, stripped[index][row])
            elif surely and _grows(ids[index], ids[index + 1], padding, row):
                # a token that is the padding's own id
                real[index][row] = max(real[index + 1][row] - 1, stripped[index][row])
    return real


def _grows(now: Ids, then: Ids, padding: Padding, but: int) -> bool:
    """Did another row get a new token? A row alone may have got one that looks like padding."""
    others = [row for row in range(len(now)) if row != but]
    return not others or any(not np.array_equal(now[row], then[row]) for row in others)


def _given_lengths(run: Run, batch: Batch) -> list[int] | None:
    """What an input with the lengths of the rows says, None where there is none."""
    for ref in batch.call.slots("input"):
        record = run.records[ref.record]
        if (
            "len" not in ref.slot
            or record.dtype not in _INTEGERS
            or record.count != batch.size
            or len(record.shape) > 2
        ):
            continue
        with contextlib.suppress(ElementsMissing):
            lengths = [int(n) for n in run.array(ref.record).reshape(-1)]
            if all(1 <= n <= batch.width for n in lengths):
                return lengths
    return None


def _cut(batch: Batch, lengths: Sequence[int], *, at_end: bool) -> Batch:
    """What a call was given, without padding."""
    rows = []
    for (tokens, _, places), length in zip(batch.rows, lengths, strict=True):
        start = 0 if at_end else batch.width - length
        rows.append(Row(tokens[start : start + length], start, places[start : start + length]))
    return dataclasses.replace(batch, rows=tuple(rows), padding_from="ids")
