"""The one tensor of each token in two dumps, whatever it is called and wherever it lies: the logits that chose the next token.

Dumps for this comparison hold nothing else of a token, so names and layouts need not agree: `0/root.lm_head/output.pth` of a torch
model is compared with `0/30_LmHeadOperation/after/outtensor0.bin` of a library. No token ids are dumped with them. Each next token is
taken to be the largest logit, and two texts are taken to part where the largest logits differ and what follows is not alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Named, Note, Program, Record, Ref, Run, Step
from whence.results import Comparison, ViewRow

_ALIKE = 0.1  # of their own spread: logits of one text are nearer to each other than this in two right runs, those of two texts are not
_ASSUMED = "no token ids are in the dumps: each next token is taken to be the largest logit of the one before"


class Found(NamedTuple):
    """The logits of one token of one rank: the call, its slot, the record."""

    call: Call
    ref: Ref


_Place = tuple[int, int]  # rank, token
Tensors = dict[_Place, Found]


class Rows(NamedTuple):
    """One token in both dumps: logits as (rows of the batch, vocabulary), or why they cannot be compared."""

    reference: Array | None
    target: Array | None
    why: str = ""


def found(reference: Run, target: Run) -> tuple[Tensors, Tensors, bool]:
    """The tensor of each token in both runs, and whether one of the runs holds nothing else, so that these are all there is to compare."""
    left, right = (_candidates(run) for run in (reference, target))
    alone = [bool(side) and all(len(several) == 1 for several in side.values()) for side in (left, right)]
    widths = [_width(run, side) for run, side in ((reference, left), (target, right))]
    one = {place: _chosen(reference, several, widths[1]) for place, several in left.items()}
    other = {place: _chosen(target, several, widths[0]) for place, several in right.items()}
    return one, other, any(alone)


def _candidates(run: Run) -> dict[_Place, list[Found]]:
    """What calls returned at each token: fields called logits where there are any, else every tensor that may be logits."""
    named: dict[_Place, list[Found]] = defaultdict(list)
    every: dict[_Place, list[Found]] = defaultdict(list)
    for call in sorted(run.calls, key=lambda c: c.order):
        for ref in call.slots("output") if call.phase == "forward" and call.kind in ("module", "operator", "tensor", "label") else ():
            record = run.records[ref.record]
            if record.shape and record.count and dtypes.is_floating(record.dtype):
                place = call.rank, call.step
                every[place].append(Found(call, ref))
                if ref.slot == "output.logits":
                    named[place].append(Found(call, ref))
    return dict(named or every)


def _width(run: Run, side: Mapping[_Place, Sequence[Found]]) -> int:
    """Entries of the logits, where it is clear which tensor they are; 0 where not."""
    extents = {run.records[several[0].ref.record].shape[-1] for several in side.values() if len(several) == 1}
    return extents.pop() if len(extents) == 1 else 0


def _chosen(run: Run, several: Sequence[Found], width: int) -> Found:
    """The logits among what a token's calls returned: as wide as the other dump's, of the model itself before the last call in it."""
    fit = [f for f in several if not width or run.records[f.ref.record].shape[-1] == width] or list(several)
    outermost = [f for f in fit if not f.call.scope]
    return outermost[0] if outermost else fit[-1]


def compared(
    reference: Run, target: Run, tensors: tuple[Tensors, Tensors], options: Any
) -> tuple[Comparison, tuple[ViewRow, ...]]:  # fmt: skip
    """Whence's answer on the logits of every token, and a row of msit's table for each."""
    from whence.api.generation import compare_logits

    left, right, notes = _of_equal_ranks(*tensors)
    pairs = {place: _rows(reference, target, left, right, place) for place in sorted({*left, *right})}
    ids = _texts(pairs)
    sides = [_Logits(run, side, pairs, ids[n], n) for n, (run, side) in enumerate(((reference, left), (target, right)))]
    result = compare_logits(*sides, options)
    verdicts: dict[_Place, list[str]] = defaultdict(list)
    if result.generation is not None:
        for token in result.generation.tokens:
            verdicts[result.generation.prompts[token.prompt].rank, token.step].append(token.verdict)
    rows = tuple(_view_row(reference, target, left.get(p), right.get(p), pair, verdicts[p]) for p, pair in pairs.items())
    reasons = list(dict.fromkeys(f"token {place[1]}: {pair.why}" for place, pair in pairs.items() if pair.why))
    more = [*reasons[:3], *([f"and {len(reasons) - 3} more tokens, see the table"] if len(reasons) > 3 else [])]
    findings = tuple(
        msgspec.structs.replace(finding, sentence=finding.sentence.partition("; capture both without")[0]) for finding in result.findings
    )
    generation = result.generation
    if generation is not None:  # which prompt it was is not known
        generation = msgspec.structs.replace(generation, prompts=tuple(msgspec.structs.replace(p, ids=(-1,)) for p in generation.prompts))
    notes = [*result.notes, *notes, *more, _ASSUMED]
    return msgspec.structs.replace(result, findings=findings, generation=generation, notes=tuple(notes)), rows


def _of_equal_ranks(left: Tensors, right: Tensors) -> tuple[Tensors, Tensors, list[str]]:
    """Both with ranks from 0, as many as both have."""
    ranks = [sorted({rank for rank, _ in side}) for side in (left, right)]
    count = min(map(len, ranks)) if len(ranks[0]) != len(ranks[1]) else len(ranks[0])
    notes = []
    if len(ranks[0]) != len(ranks[1]):
        count = min(count, 1)
        notes = [f"{len(ranks[0])} ranks against {len(ranks[1])}: the logits of the first rank of each are compared"]
    left, right = (
        {(known.index(rank), token): one for (rank, token), one in side.items() if known.index(rank) < count}
        for side, known in zip((left, right), ranks, strict=True)
    )
    return left, right, notes


def _rows(reference: Run, target: Run, left: Tensors, right: Tensors, place: _Place) -> Rows:
    """The rows of a token in both dumps, one for each row of the batch."""
    arrays: list[Array | None] = [None, None]
    for n, (run, side, words) in enumerate(((reference, left, "reference"), (target, right, "target"))):
        if place not in side:
            other = ("target", "reference")[n]
            return Rows(None, None, f"only the {other} has it")
        try:
            array = np.asarray(run.array(side[place].ref.record))
        except ElementsMissing as error:
            return Rows(None, None, f"{words}: {error}")
        arrays[n] = _last(array, _batch(run, side, place[0]))
        if arrays[n] is None:
            return Rows(None, None, f"{words}: {list(array.shape)} does not say which position is the last of each row")
    one, other_ = arrays
    assert one is not None
    assert other_ is not None
    if len(one) != len(other_):
        return Rows(None, None, f"{len(one)} rows against {len(other_)}")
    return Rows(one, other_)


def _batch(run: Run, side: Tensors, rank: int) -> int:
    """Rows of the batch: the extent of the batch's axis, or without one as many rows as the token with the fewest has."""
    shapes = [_squeezed(run.records[one.ref.record].shape) for (owner, _), one in side.items() if owner == rank]
    return min(shape[0] if len(shape) > 2 else math.prod(shape[:-1]) for shape in shapes)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 3 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _last(array: Array, batch: int) -> Array | None:
    """(rows of the batch, vocabulary): the last position of each row; None where rows of unequal length lie behind each other."""
    shape = _squeezed(array.shape)
    if len(shape) > 2:
        return array.reshape(shape[0], -1, shape[-1])[:, -1] if shape[0] == batch else None
    rows: Array = array.reshape(-1, shape[-1])
    return rows.reshape(batch, -1, shape[-1])[:, -1] if len(rows) % batch == 0 else None


def _texts(pairs: Mapping[_Place, Rows]) -> tuple[dict[int, Array], dict[int, Array]]:
    """By rank the ids that each run is taken to have gone on with, (rows, tokens + 1): a number for the row, then a token for each step."""
    out: tuple[dict[int, Array], dict[int, Array]] = ({}, {})
    for rank in sorted({rank for rank, _ in pairs}):
        steps = {token: pair for (owner, token), pair in pairs.items() if owner == rank}
        measured = [pair.reference for pair in steps.values() if pair.reference is not None]
        ids = [np.zeros((len(measured[0]) if measured else 1, max(steps) + 2), np.int64) for _ in out]
        for side in ids:
            side[:, 0] = np.arange(len(side))
        for token, pair in steps.items():
            if pair.reference is None or pair.target is None or len(pair.reference) != len(ids[0]):
                continue
            best = pair.reference.argmax(-1), pair.target.argmax(-1)
            following = steps.get(token + 1)
            for row in range(len(ids[0])):
                parted = best[0][row] != best[1][row] and not _goes_on_alike(following, row)
                ids[0][row, token + 1], ids[1][row, token + 1] = best[0][row], best[1][row] if parted else best[0][row]
        for side, kept in zip(ids, out, strict=True):
            kept[rank] = side
    return out


def _goes_on_alike(following: Rows | None, row: int) -> bool:
    """Are the logits behind the next token so near to each other that both runs were given the same one?"""
    from whence.metrics.logits import of_token

    if following is None or following.reference is None or following.target is None or row >= len(following.reference):
        return False
    return of_token(following.reference[row], following.target[row]).rel_logit_err <= _ALIKE


class _Logits(Named):
    """One side as a run of logits alone: for each token a call of the model, given the whole text so far."""

    def __init__(self, run: Run, side: Tensors, pairs: Mapping[_Place, Rows], ids: Mapping[int, Array], number: int) -> None:
        self.path, self.ended = run.path, run.ended
        self.info = msgspec.structs.replace(run.info, options={**run.info.options, "level": "logits"})
        self.programs: Mapping[str, Program] = {}
        self.notes: Sequence[Note] = [note for note in run.notes if note.kind in ("error", "budget")]
        self.calls: Sequence[Call] = []
        self.records: Sequence[Record] = []
        self.steps: Sequence[Step] = []
        self._arrays: list[Array | None] = []
        calls, records = list(self.calls), list(self.records)
        made_by = next(iter(side.values())).call
        root = made_by.scope or made_by.root
        for rank, token in sorted(side):
            pair = pairs[rank, token]
            logits = pair[number]
            given = ids[rank][:, : token + 1]
            dtype = run.records[side[rank, token].ref.record].dtype
            for array, kind in ((given, "int64"), (logits, dtype)):
                shape = (len(given), 1, 1) if array is None else array.shape if kind == "int64" else (len(array), 1, array.shape[-1])
                records.append(Record(len(records), kind, tuple(shape), why=pair.why if array is None else ""))
                self._arrays.append(None if array is None else array.reshape(shape))
            refs = (Ref("input.input_ids", len(records) - 2), Ref("output.logits", len(records) - 1))
            n = len(calls)
            calls.append(Call(n, "", root, token, n, rank=rank, kind="module", op_type=root, number="0", leaf=True, refs=refs))
        self.calls, self.records = calls, records
        self.steps = [Step(root, token, 0, True, rank) for rank, token in sorted(side)]

    def array(self, record: int) -> Array:
        array = self._arrays[record]
        if array is None:
            raise ElementsMissing(self.records[record].why)
        return array


_WORST = ("unexplained", "off", "incomparable", "explained", "sampled", "noise", "identical")


def _view_row(reference: Run, target: Run, one: Found | None, other: Found | None, pair: Rows, verdicts: Sequence[str]) -> ViewRow:
    from whence import metrics
    from whence.api.viewing import _shown

    shown = [
        _shown(run, side.call, side.ref.slot, side.ref.record) if side is not None else None
        for run, side in ((reference, one), (target, other))
    ]
    slot = (one or other).ref.slot  # type: ignore[union-attr]
    figures: metrics.Figures = {}
    why, rel_l2, largest = pair.why, None, None
    if pair.reference is not None and pair.target is not None:
        width = min(pair.reference.shape[-1], pair.target.shape[-1])
        a, b = pair.reference[:, :width], pair.target[:, :width]
        figures, why = metrics.VIEWS["msit"](a, b)
        wide = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(all="ignore"):
            apart, norm = np.abs(wide[1] - wide[0]), float(np.linalg.norm(wide[0]))
            rel_l2 = float(np.linalg.norm(apart)) / norm if norm else None
            largest = float(apart.max())
    verdict = next((word for word in _WORST if word in verdicts), "")
    return ViewRow((-1, -1), slot, shown[0], shown[1], figures=figures, why=why, verdict=verdict, rel_l2=rel_l2, max_abs_err=largest)
