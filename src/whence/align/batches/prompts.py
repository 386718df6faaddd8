"""The generations of a run: its prompts, the generated tokens, and where their logits are.

A prompt is identified by its token ids and belongs to a (call of the root, row of its batch).
`sequences` separates rows and follows them from call to call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.align.batches.batch import Batch, Row, batches_of
from whence.align.batches.sequences import TokenSequence, followers, sequences_of, shared_start
from whence.align.environment import settings_of
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Record, Run, in_order
from whence.records.marks import Mark, has_mark


class TokenLogits(NamedTuple):
    """The place of the logits after one token. row: of the batch; key: indices into the first axes
    of the record.
    """

    call: int
    row: int
    record: int
    key: tuple[int, ...]


@dataclass(slots=True)
class Prompt:
    """One sequence that a root processed. prompt: number of tokens in the first call; the others
    were generated.

    calls: ids of the root calls that processed it. scores: by i, the place of the logits after
    token i, which predict token i + 1. siblings: indices of prompts with the same ids in the same
    calls, between which a beam search may exchange rows.
    """

    call: Call
    row: int
    tokens: tuple[int, ...]
    prompt: int
    calls: tuple[int, ...]
    scores: dict[int, TokenLogits] = field(default_factory=dict)
    siblings: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt's own token ids."""
        return self.tokens[: self.prompt]


def prompts(
    run: Run, hints: Sequence[tuple[int, ...]] = (), whys: list[str] | None = None
) -> list[Prompt]:
    """Every sequence of token ids for which a root of this run computes logits, in the order of
    calls. Reads tokens, masks and positions, but no logits.

    hints: token sequences of the other run (see `sequences_of`). whys: gets a sentence for every
    root whose last real tokens are not known, which then has no prompts.
    """
    out: list[Prompt] = []
    following: dict[int, list[Call]] = defaultdict(list)
    for follower, root in followers(run.calls).items():
        following[root].append(run.calls[follower])
    for calls in _roots(run, following.values()):
        batches = batches_of(run, calls)
        if batches is None:
            continue
        padding = settings_of(run).get(calls[0].root, {}).get("pad")
        batches, why = unpadded(
            run, [_as_batch(f) for f in batches], [padding] if isinstance(padding, int) else []
        )
        root_prompts = _of_root(run, batches, following, hints)
        if why and root_prompts:
            if whys is not None:
                whys.append(why)
            continue
        first = len(out)
        for prompt in root_prompts:
            prompt.siblings = tuple(first + n for n in prompt.siblings)
        out += root_prompts
    return out


def logits(run: Run, scored: TokenLogits) -> Array:
    """The logits of one token, (vocabulary,). Raises ElementsMissing."""
    vector: Array = run.array(scored.record)[scored.key]
    return vector


def _roots(run: Run, following: Iterable[Sequence[Call]]) -> list[list[Call]]:
    following_ids = {c.id for calls in following for c in calls}
    table: dict[tuple[int, str, str], list[Call]] = {}
    for call in in_order(run.calls):
        outermost = (
            call.parent == -1
            and call.phase == "forward"
            and not call.error
            and not has_mark(call, Mark.NOT_SELECTED)
        )
        if outermost and call.id not in following_ids:
            table.setdefault((call.rank, call.root, call.scope), []).append(call)
    return list(table.values())


def _as_batch(batch: Batch) -> Batch:
    """The batch; a single row without a batch axis becomes a batch of one."""
    if batch.flat and len(batch.rows) == 1 and not batch.rows[0].places:
        return dataclasses.replace(batch, shape=(1, *batch.shape))
    return batch


def _of_root(
    run: Run,
    batches: Sequence[Batch],
    following: dict[int, list[Call]],
    hints: Sequence[tuple[int, ...]],
) -> list[Prompt]:
    out: list[Prompt] = []
    least = _vocabulary(run, batches[0].call)
    scores = {f.call.id: _scores(run, f, following.get(f.call.id, ()), least) for f in batches}
    if not any(record is not None for record in scores.values()):
        return []
    by_call = {f.call.id: f for f in batches}
    together: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for sequence in sequences_of(batches, hints):
        if not sequence.tokens or not all(isinstance(t, int) for t in sequence.tokens):
            continue
        prompt = _followed(run, sequence, scores, by_call)
        together[tuple(p.call for p in sequence.pieces), prompt.ids].append(len(out))
        out.append(prompt)
    for alike in together.values():
        for n in alike:
            out[n].siblings = tuple(alike) if len(alike) > 1 else ()
    return out if any(p.scores for p in out) else []


def _followed(
    run: Run, sequence: TokenSequence, scores: dict[int, Record | None], batches: dict[int, Batch]
) -> Prompt:
    logits_only = run.info.options.get("level") == "logits"
    tokens = tuple(t for t in sequence.tokens if isinstance(t, int))
    first = sequence.pieces[0]
    prompt = Prompt(
        batches[first.call].call,
        first.row,
        tokens,
        first.stop - first.start,
        tuple(p.call for p in sequence.pieces),
    )
    position = 0
    for piece in sequence.pieces:
        call, record = batches[piece.call], scores[piece.call]
        n = piece.stop - piece.start
        if record is not None:
            for j in range(n):
                where = _where(record, call, piece.row, piece.start + j, j == n - 1, logits_only)
                if where is not None:
                    prompt.scores[position + j] = TokenLogits(
                        piece.call, piece.row, record.id, where
                    )
        position += n
    return prompt


def _where(
    record: Record, batch: Batch, row: int, token: int, last: bool, logits_only: bool
) -> tuple[int, ...] | None:
    """The index of the logits after a row's token; None if they were not computed or kept."""
    shape = record.shape
    if batch.flat:
        if shape[0] == batch.width:
            return (token,)
        return (row,) if last and shape[0] == len(batch.rows) else None
    if len(shape) == 2:
        if len(batch.rows) == 1 and shape[0] != 1:  # without an axis for the batch
            return (token - batch.width + shape[0],) if token >= batch.width - shape[0] else None
        return (row,) if last and shape[0] == len(batch.rows) else None
    if shape[1] == 1 and batch.width > 1:
        # A capture of logits alone takes those of the last token that a mask calls real, a model
        # that keeps its last ones those of the last column.
        by_mask = logits_only and batch.padding_from != "ids"
        return (row, 0) if last and (by_mask or token == batch.width - 1) else None
    column = token - batch.width + shape[1]
    return (row, column) if column >= 0 else None


def _vocabulary(run: Run, root: Call) -> int:
    """The number of rows of a root's largest embedding, 0 without one. Its logits are at least as
    wide.
    """
    calls = (
        c
        for c in run.calls
        if (c.root, c.step, c.micro) == (root.root, root.step, root.micro)
        and "Embedding" in c.op_type
    )
    shapes = (run.records[r.record].shape for c in calls for r in c.slots("param"))
    return max((shape[0] for shape in shapes if len(shape) == 2), default=0)


def _scores(run: Run, batch: Batch, following: Iterable[Call], least: int) -> Record | None:
    """The record of the logits of a root call or of a call that follows it; None if no output is
    wide enough for its token ids.

    An output named logits, else the widest one: hidden states have fewer channels than there are
    tokens. least: smallest width of the logits.
    """
    least = max(
        least,
        1 + max((t for tokens, *_ in batch.rows for t in tokens if isinstance(t, int)), default=0),
    )
    outputs = [
        (r.slot, run.records[r.record])
        for call in (batch.call, *following)
        for r in call.slots("output")
    ]
    fit = [(slot, record) for slot, record in outputs if _fits(record, batch, least)]
    named = [record for slot, record in fit if slot.rpartition(".")[2] == "logits"]
    return next(iter(named), None) or max(
        (r for _, r in fit), key=lambda r: r.shape[-1], default=None
    )


def _fits(record: Record, batch: Batch, least: int) -> bool:
    shape = record.shape
    if (
        len(shape) not in (2, 3)
        or not record.count
        or not dtypes.is_floating(record.dtype)
        or shape[-1] < least
    ):
        return False
    if batch.flat:
        return len(shape) == 2 and shape[0] in (batch.width, len(batch.rows))
    if len(batch.rows) == 1 and len(shape) == 2:
        return shape[0] <= batch.width
    return shape[0] == len(batch.rows) and (len(shape) == 2 or shape[1] <= batch.width)


class Together(NamedTuple):
    """A prompt of both runs: its index in each, and the number of tokens shared from the start."""

    reference: int
    target: int
    shared: int


def together(reference: Sequence[Prompt], target: Sequence[Prompt]) -> list[Together]:
    """Pair prompts, each once: by equal ids in the order of calls, then by a common start.

    `shared` is the minimum over siblings, since a beam search exchanges their rows.
    """
    free: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for n, target_prompt in enumerate(target):
        free[target_prompt.ids].append(n)
    pairs: dict[int, int] = {}
    for n, prompt in enumerate(reference):
        if free.get(prompt.ids):
            pairs[n] = free[prompt.ids].pop(0)
    unpaired = [n for numbers in free.values() for n in numbers]
    for n, prompt in enumerate(reference):
        if n in pairs or not unpaired:
            continue
        counts = {m: shared_start(prompt.tokens, target[m].tokens) for m in unpaired}
        best = max(unpaired, key=lambda m: (counts[m], -m))
        candidate = target[best]
        longest = max(prompt.prompt, candidate.prompt)
        if counts[best] >= min(len(prompt.tokens), len(candidate.tokens), longest):
            pairs[n] = best
            unpaired.remove(best)
    shared = {n: shared_start(reference[n].tokens, target[m].tokens) for n, m in pairs.items()}
    least = {
        n: min((shared.get(b, shared[n]) for b in reference[n].siblings), default=shared[n])
        for n in pairs
    }
    return [Together(n, m, least[n]) for n, m in sorted(pairs.items())]


# Rows of a fixed length: which of their tokens are padding, where the call was given no mask that
# says so.
#
# A predictor with one form of input is given (batch, length) ids at every step, of which only
# some are real. What tells them apart, in this order: an input with the lengths of rows; the ids
# themselves, since from one step to the next a new token takes the place of padding (behind the
# text, or in front of it, which moves on by one); the id that the model's settings call padding.
# Where none of these does and rows end in a repeated id, the last real token is not known.

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
