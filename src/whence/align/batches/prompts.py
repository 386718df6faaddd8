"""What a run generated: its prompts, the tokens that followed, and where the logits of each lie.

A prompt is known by its token ids and tied to a (call of the root, row of its batch). `sequences`
tells rows apart and follows them from call to call.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from whence import dtypes
from whence.align.batches.batch import Batch, batches_of
from whence.align.batches.fixed_length import unpadded
from whence.align.batches.sequences import TokenSequence, followers, sequences_of, shared_start
from whence.align.environment import settings_of
from whence.dtypes import Array
from whence.records import Call, Record, Run
from whence.records.marks import Mark, has_mark


class TokenLogits(NamedTuple):
    """Logits after one token. row: of the batch. key: index of the record's first axes."""

    call: int
    row: int
    record: int
    key: tuple[int, ...]


@dataclass(slots=True)
class Prompt:
    """One sequence that a root was given. prompt: how many of its tokens came with the first call;
    the others were generated.

    calls: of the root that it went through. scores: logits after token i, which say what token i +
    1 is. siblings: indices of the prompts with the same ids in the same calls, between which a
    beam search may move rows.
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
    """Every sequence of token ids that a root of this run scores, in the order of its calls. Reads
    tokens, masks and positions, no logits.

    hints: sequences of the other run, as `sequences_of` takes them. whys: gets a sentence for
    every root of which the last real tokens are not known; it has no prompts then.
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
    for call in sorted(run.calls, key=lambda c: c.order):
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
    """A call on one row without an axis for the batch, as a batch of one."""
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
    """The index of the logits after a row's token; None where they were not made or kept."""
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
    """Rows of a root's largest embedding, the least width of its logits; 0 for none."""
    calls = (
        c
        for c in run.calls
        if (c.root, c.step, c.micro) == (root.root, root.step, root.micro)
        and "Embedding" in c.op_type
    )
    shapes = (run.records[r.record].shape for c in calls for r in c.slots("param"))
    return max((shape[0] for shape in shapes if len(shape) == 2), default=0)


def _scores(run: Run, batch: Batch, following: Iterable[Call], least: int) -> Record | None:
    """The logits that a call of the root makes, or a call beside it behind it; None where none are
    as wide as its token ids.

    A field called logits, else the widest: states of a model have fewer channels than it knows
    tokens. least: entries they have.
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
    """A prompt of both runs: its index in either, and how many tokens they share at the start."""

    reference: int
    target: int
    shared: int


def together(reference: Sequence[Prompt], target: Sequence[Prompt]) -> list[Together]:
    """Pair prompts, each once: equal ids in order of their calls, then sequences that start alike.

    shared is the least of the rows that hold one prompt in one call: a beam search moves them.
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
