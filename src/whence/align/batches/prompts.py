"""What a run generated: its prompts, the tokens that followed, and where the logits behind each of
them lie.

A prompt is known by its token ids and tied to a (call of the root, row of its batch). Rows are told
apart and followed from call to call as `sequences` does it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from whence import dtypes
from whence.align.batches.fixed_length import unpadded
from whence.align.batches.sequences import Asked, Fed, asked, fed, followers
from whence.align.environment import settings_of
from whence.dtypes import Array
from whence.records import Call, Record, Run
from whence.records.marks import Mark, has_mark


class Scored(NamedTuple):
    """Logits behind one token: call of the root, row of its batch, the record they lie in and where
    (an index of its first axes).
    """

    call: int
    row: int
    record: int
    at: tuple[int, ...]


@dataclass(slots=True)
class Prompt:
    """One sequence that a root was given. tokens: all of them; prompt: how many came with the first
    call, the others were generated.

    calls: of the root that it went through. scores: logits behind token i, which say what token i +
    1 is. beside: numbers of the prompts with the same ids in the same calls, between which a beam
    search may move rows.
    """

    call: Call
    row: int
    tokens: tuple[int, ...]
    prompt: int
    calls: tuple[int, ...]
    scores: dict[int, Scored] = field(default_factory=dict)
    beside: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt's own token ids."""
        return self.tokens[: self.prompt]


def prompts(
    run: Run, known: Sequence[tuple[int, ...]] = (), whys: list[str] | None = None
) -> list[Prompt]:
    """Every sequence of token ids that a root of this run scores, in the order of its calls; []
    where nothing is scored.

    known: sequences of the other run, which decide what rows of a flattened batch go on with
    (`sequences.asked`). Reads tokens, masks and positions, no logits. whys: gets a sentence for
    every root of which the last real tokens are not known; it has no prompts then.
    """
    out: list[Prompt] = []
    behind: dict[int, list[Call]] = defaultdict(list)
    for follower, root in followers(run.calls).items():
        behind[root].append(run.calls[follower])
    for calls in _roots(run, behind.values()):
        given = fed(run, calls)
        if given is None:
            continue
        padding = settings_of(run).get(calls[0].root, {}).get("pad")
        given, why = unpadded(
            run, [_as_batch(f) for f in given], [padding] if isinstance(padding, int) else []
        )
        found = _of_root(run, given, behind, known)
        if why and found:
            if whys is not None:
                whys.append(why)
            continue
        first = len(out)
        for one in found:
            one.beside = tuple(first + n for n in one.beside)
        out += found
    return out


def logits(run: Run, scored: Scored) -> Array:
    """The logits of one token, (vocabulary,). Raises ElementsMissing."""
    found: Array = run.array(scored.record)[scored.at]
    return found


def _roots(run: Run, behind: Iterable[Sequence[Call]]) -> list[list[Call]]:
    beside = {c.id for calls in behind for c in calls}
    table: dict[tuple[int, str, str], list[Call]] = {}
    for call in sorted(run.calls, key=lambda c: c.order):
        outermost = (
            call.parent == -1
            and call.phase == "forward"
            and not call.error
            and not has_mark(call, Mark.NOT_SELECTED)
        )
        if outermost and call.id not in beside:
            table.setdefault((call.rank, call.root, call.scope), []).append(call)
    return list(table.values())


def _as_batch(given: Fed) -> Fed:
    """A call on one row without an axis for the batch, as a batch of one."""
    if given.flat and len(given.rows) == 1 and not given.rows[0].places:
        return dataclasses.replace(given, shape=(1, *given.shape))
    return given


def _of_root(
    run: Run, given: Sequence[Fed], behind: dict[int, list[Call]], known: Sequence[tuple[int, ...]]
) -> list[Prompt]:
    made: list[Prompt] = []
    least = _vocabulary(run, given[0].call)
    scores = {f.call.id: _scores(run, f, behind.get(f.call.id, ()), least) for f in given}
    if not any(record is not None for record in scores.values()):
        return []
    fed_by = {f.call.id: f for f in given}
    together: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for one in asked(given, known):
        if not one.tokens or not all(isinstance(t, int) for t in one.tokens):
            continue
        prompt = _followed(run, one, scores, fed_by)
        together[tuple(p.call for p in one.pieces), prompt.ids].append(len(made))
        made.append(prompt)
    for alike in together.values():
        for n in alike:
            made[n].beside = tuple(alike) if len(alike) > 1 else ()
    return made if any(p.scores for p in made) else []


def _followed(
    run: Run, one: Asked, scores: dict[int, Record | None], given: dict[int, Fed]
) -> Prompt:
    alone = run.info.options.get("level") == "logits"
    tokens = tuple(t for t in one.tokens if isinstance(t, int))
    first = one.pieces[0]
    prompt = Prompt(
        given[first.call].call,
        first.row,
        tokens,
        first.stop - first.start,
        tuple(p.call for p in one.pieces),
    )
    at = 0
    for piece in one.pieces:
        call, record = given[piece.call], scores[piece.call]
        n = piece.stop - piece.start
        if record is not None:
            for j in range(n):
                where = _where(record, call, piece.row, piece.start + j, j == n - 1, alone)
                if where is not None:
                    prompt.scores[at + j] = Scored(piece.call, piece.row, record.id, where)
        at += n
    return prompt


def _where(
    record: Record, given: Fed, row: int, token: int, last: bool, alone: bool
) -> tuple[int, ...] | None:
    """Where the logits behind a token of a row lie in a call's logits; None where they were not
    made or kept.
    """
    shape = record.shape
    if given.flat:
        if shape[0] == given.width:
            return (token,)
        return (row,) if last and shape[0] == len(given.rows) else None
    if len(shape) == 2:
        if len(given.rows) == 1 and shape[0] != 1:  # without an axis for the batch
            return (token - given.width + shape[0],) if token >= given.width - shape[0] else None
        return (row,) if last and shape[0] == len(given.rows) else None
    if shape[1] == 1 and given.width > 1:
        # A capture of logits alone takes those of the last token that a mask calls real, a model
        # that keeps its last ones those of the last column.
        by_mask = alone and given.known_by != "ids"
        return (row, 0) if last and (by_mask or token == given.width - 1) else None
    at = token - given.width + shape[1]
    return (row, at) if at >= 0 else None


def _vocabulary(run: Run, root: Call) -> int:
    """Rows of the largest embedding that a call of the root holds: as many tokens as logits tell
    apart, at least. 0 for none.
    """
    calls = (
        c
        for c in run.calls
        if (c.root, c.step, c.micro) == (root.root, root.step, root.micro)
        and "Embedding" in c.op_type
    )
    shapes = (run.records[r.record].shape for c in calls for r in c.slots("param"))
    return max((shape[0] for shape in shapes if len(shape) == 2), default=0)


def _scores(run: Run, given: Fed, behind: Iterable[Call], least: int) -> Record | None:
    """The logits that a call of the root makes, or a call beside it behind it; None where none are
    as wide as its token ids.

    A field called logits, else the widest: states of a model have fewer channels than it knows
    tokens. least: entries they have.
    """
    least = max(
        least,
        1 + max((t for tokens, *_ in given.rows for t in tokens if isinstance(t, int)), default=0),
    )
    found = [
        (r.slot, run.records[r.record])
        for call in (given.call, *behind)
        for r in call.slots("output")
    ]
    fit = [(slot, record) for slot, record in found if _fits(record, given, least)]
    named = [record for slot, record in fit if slot.rpartition(".")[2] == "logits"]
    return next(iter(named), None) or max(
        (r for _, r in fit), key=lambda r: r.shape[-1], default=None
    )


def _fits(record: Record, given: Fed, least: int) -> bool:
    shape = record.shape
    if (
        len(shape) not in (2, 3)
        or not record.count
        or not dtypes.named(record.dtype).is_floating
        or shape[-1] < least
    ):
        return False
    if given.flat:
        return len(shape) == 2 and shape[0] in (given.width, len(given.rows))
    if len(given.rows) == 1 and len(shape) == 2:
        return shape[0] <= given.width
    return shape[0] == len(given.rows) and (len(shape) == 2 or shape[1] <= given.width)


class Together(NamedTuple):
    """Two prompts that are one: numbers in both runs, and how many tokens from the first on are the
    same in both.
    """

    reference: int
    target: int
    shared: int


def together(left: Sequence[Prompt], right: Sequence[Prompt]) -> list[Together]:
    """Which prompts are paired, each once: equal ids in order of their calls, then sequences
    that start alike.

    shared is that of the shortest among rows that hold one prompt in one call: a beam search moves
    them.
    """
    free: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for n, other in enumerate(right):
        free[other.ids].append(n)
    pairs: dict[int, int] = {}
    for n, one in enumerate(left):
        if free.get(one.ids):
            pairs[n] = free[one.ids].pop(0)
    rest = [n for found in free.values() for n in found]
    for n, one in enumerate(left):
        if n in pairs or not rest:
            continue
        best = max(rest, key=lambda m: (_shared(one, right[m]), -m))
        if _shared(one, right[best]) >= min(
            len(one.tokens), len(right[best].tokens), max(one.prompt, right[best].prompt)
        ):
            pairs[n] = best
            rest.remove(best)
    shared = {n: _shared(left[n], right[m]) for n, m in pairs.items()}
    return [
        Together(n, m, min((shared.get(b, shared[n]) for b in left[n].beside), default=shared[n]))
        for n, m in sorted(pairs.items())
    ]


def _shared(one: Prompt, other: Prompt) -> int:
    n = 0
    for a, b in zip(one.tokens, other.tokens):
        if a != b:
            break
        n += 1
    return n
