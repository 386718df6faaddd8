"""Compares dumps that hold one tensor for each token: the logits that chose the next token.

Such dumps hold nothing else, so names and layouts need not agree: `0/root.lm_head/output.pth` of a
torch model is compared with `0/30_LmHeadOperation/after/outtensor0.bin` of a library. Token ids are
not dumped. The next token is assumed to be the one with the largest logit, and two texts are
assumed to diverge where the largest logits differ and the following logits are not close.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from whence import align, dtypes
from whence.comparison.answer.generation import compare_logits, logits_alone
from whence.comparison.prepare import bare_logits
from whence.comparison.prepare.bare_logits import PromptLogits
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import (
    Call,
    Note,
    Record,
    Ref,
    Run,
    Step,
    in_order,
    missing_of,
)
from whence.records.logits import maker_of, note_of_maker
from whence.records.views import MemoryRun
from whence.results import Comparison, Status, TokenKind, ViewRow
from whence.store import StoredRun

if TYPE_CHECKING:
    from whence.comparison.options import CompareOptions


_LEAST_VOCABULARY = 0.5  # of the other side's entries: a vocabulary may be padded, not doubled
_ASSUMED = (
    "no token ids are in the dumps: each next token is taken to be the largest logit of "
    "the one before"
)


def of_bare_logits(reference: Run, target: Run, options: CompareOptions) -> Comparison | None:
    """The answer about two runs that hold logits without token ids; None for other runs."""
    bare = [
        None if isinstance(run, StoredRun) else bare_logits.of_run(run)
        for run in (reference, target)
    ]
    if bare[0] is not None and bare[1] is not None:
        reference, target = bare[0], bare[1]
    elif not logits_alone(reference, target) or have_ids(reference, target):
        return None
    *tensors, is_alone = found(reference, target)
    if not is_alone or not all(tensors):
        return None
    return compared(reference, target, (tensors[0], tensors[1]), options)[0]


def have_ids(*runs: Run) -> bool:
    """Whether the token ids were captured with the logits, so that texts need not be guessed."""
    return all(
        any(
            dtypes.is_whole(run.records[ref.record].dtype)
            for call in run.calls
            for ref in call.slots("input")
        )
        for run in runs
    )


def found(reference: Run, target: Run) -> tuple[Tensors, Tensors, bool]:
    """(logits of each token in the reference, in the target, whether one of the runs holds nothing
    else, so that only these can be compared).
    """
    reference_tensors, target_tensors = (_candidates(run) for run in (reference, target))
    is_alone = [
        bool(side) and all(_is_one_tensor(several) for several in side.values())
        for side in (reference_tensors, target_tensors)
    ]
    widths = [
        _width(run, side)
        for run, side in ((reference, reference_tensors), (target, target_tensors))
    ]
    of_reference = {
        place: _chosen(reference, several, widths[1])
        for place, several in reference_tensors.items()
    }
    of_target = {
        place: _chosen(target, several, widths[0]) for place, several in target_tensors.items()
    }
    return of_reference, of_target, any(is_alone)


def _candidates(run: Run) -> dict[TokenKey, list[TokenLogits]]:
    """By (rank, token), the outputs that may be logits: those named logits if there are any, else
    all floating-point outputs.
    """
    named: dict[TokenKey, list[TokenLogits]] = defaultdict(list)
    every: dict[TokenKey, list[TokenLogits]] = defaultdict(list)
    for call in in_order(run.calls):
        for ref in (
            call.slots("output")
            if call.phase == "forward" and call.kind in ("module", "operator", "tensor", "label")
            else ()
        ):
            record = run.records[ref.record]
            if record.shape and record.count and dtypes.is_floating(record.dtype):
                place = call.rank, call.step
                every[place].append(TokenLogits(call, ref))
                if ref.slot == "output.logits":
                    named[place].append(TokenLogits(call, ref))
    return dict(named or every)


def _is_one_tensor(several: Sequence[TokenLogits]) -> bool:
    """Whether a token has one tensor, be it also the output of the model that a reader puts around
    the last layer.
    """
    return len({logits.ref.record for logits in several}) == 1


def _width(run: Run, side: Mapping[TokenKey, Sequence[TokenLogits]]) -> int:
    """The width (vocabulary) of the logits if it is clear which tensor they are, else 0."""
    extents = {
        run.records[several[0].ref.record].shape[-1]
        for several in side.values()
        if _is_one_tensor(several)
    }
    return extents.pop() if len(extents) == 1 else 0


def _chosen(run: Run, several: Sequence[TokenLogits], width: int) -> TokenLogits:
    """The logits among a token's outputs. They have the other dump's width (0: any); the model's
    own output takes precedence over the last call inside it.
    """
    fit = [f for f in several if not width or run.records[f.ref.record].shape[-1] == width] or list(
        several
    )
    outermost = [f for f in fit if not f.call.scope]
    return outermost[0] if outermost else fit[-1]


def compared(
    reference: Run, target: Run, tensors: tuple[Tensors, Tensors], options: CompareOptions
) -> tuple[Comparison, tuple[ViewRow, ...]]:
    """(the answer about the logits of all tokens, a row of msit's table for each token)."""
    are_prompts = any(isinstance(run, PromptLogits) for run in (reference, target))
    left, right, notes = _of_equal_ranks(*tensors, keep=are_prompts)
    pairs = {key: _rows(reference, target, left, right, key) for key in sorted({*left, *right})}
    texts = texts_of(pairs)
    result = _answer(
        LogitsRun(reference, left, pairs, texts[0], 0),
        LogitsRun(target, right, pairs, texts[1], 1),
        options,
    )
    generation = result.generation
    verdicts: dict[TokenKey, list[str]] = defaultdict(list)
    if generation is not None:
        rank_of = {prompt.number: prompt.rank for prompt in generation.prompts}
        for token in generation.tokens:
            verdicts[rank_of[token.prompt], token.step].append(token.verdict)
        # The prompt itself is not known.
        prompts = tuple(msgspec.structs.replace(p, ids=(-1,)) for p in generation.prompts)
        if are_prompts:
            prompts = tuple(msgspec.structs.replace(p, rank=0) for p in prompts)
        generation = msgspec.structs.replace(generation, prompts=prompts)
    rows = tuple(
        _view_row(reference, target, left.get(key), right.get(key), pair, verdicts[key])
        for key, pair in pairs.items()
    )
    reasons = list(
        dict.fromkeys(f"token {key[1]}: {pair.why}" for key, pair in pairs.items() if pair.why)
    )
    if len(reasons) > 3:
        reasons[3:] = [f"and {len(reasons) - 3} more tokens, see the table"]
    findings = tuple(
        msgspec.structs.replace(
            finding,
            sentence=finding.sentence.partition("; capture both without")[0],
            rank=0 if are_prompts else finding.rank,
        )
        for finding in result.findings
    )
    notes = [*result.notes, *notes, *reasons, _ASSUMED]
    return msgspec.structs.replace(
        result, findings=findings, generation=generation, notes=tuple(notes)
    ), rows


def _answer(reference: LogitsRun, target: LogitsRun, options: CompareOptions) -> Comparison:
    """The answer, with the limit for rounding that the dumps imply."""
    if any(run.is_narrow for run in (reference, target)) or (
        reference.says_precision and target.says_precision
    ):
        return compare_logits(reference, target, options)
    # The dumps do not state a precision, so they imply no limit for rounding. The error of most
    # tokens counts as noise, up to the rounding of 16 bits.
    reference.set_option("precision", "unknown")
    result = compare_logits(reference, target, options, again=(target,))
    if result.findings:
        return result
    reference.set_option("precision", "16 bits")
    return _within_float32(compare_logits(reference, target, options))


def _within_float32(result: Comparison) -> Comparison:
    """The answer, `undecided` in place of `same` if errors exceed the rounding of float32: in dumps
    that do not state a precision, a fault may pass for rounding of 16 bits.
    """
    from whence.judge.limits import U32
    from whence.judge.token_flips import most

    errors = (
        [t.numbers.get("rel_logit_err") or 0.0 for t in result.generation.tokens]
        if result.generation is not None
        else []
    )
    if result.status != Status.SAME or max(errors, default=0.0) <= most(U32):
        return result
    beyond = sum(error > most(U32) for error in errors)
    why = (
        f"the logits part by up to {max(errors):.2g} of their spread, at {beyond} of {len(errors)} "
        "tokens by more "
        f"than float32 rounds ({most(U32):.1g}), "
        f"less than 16 bits may ({most(2.0**-8):.2g}), and the dumps do not say in which the "
        "models computed; dump both models in float32"
    )
    return msgspec.structs.replace(result, status=Status.UNDECIDED, headline=why)


def _of_equal_ranks(
    of_reference: Tensors, of_target: Tensors, *, keep: bool
) -> tuple[Tensors, Tensors, list[str]]:
    """(reference, target, notes) with ranks renumbered from 0. If the numbers of ranks differ, only
    the first rank of each is kept; all of them, as they are, if `keep`.
    """
    ranks = [sorted({rank for rank, _ in side}) for side in (of_reference, of_target)]
    if keep and len(ranks[0]) != len(ranks[1]):
        return of_reference, of_target, []
    count = min(map(len, ranks)) if len(ranks[0]) != len(ranks[1]) else len(ranks[0])
    notes = []
    if len(ranks[0]) != len(ranks[1]):
        count = min(count, 1)
        notes = [
            f"{len(ranks[0])} ranks against {len(ranks[1])}: the logits of the first rank of "
            "each are compared"
        ]
    of_reference, of_target = (
        {
            (numbers.index(rank), token): tensor
            for (rank, token), tensor in side.items()
            if numbers.index(rank) < count
        }
        for side, numbers in zip((of_reference, of_target), ranks, strict=True)
    )
    return of_reference, of_target, notes


def _rows(
    reference: Run, target: Run, of_reference: Tensors, of_target: Tensors, place: TokenKey
) -> Rows:
    """The logits of a token in both dumps, one row for each row of the batch."""
    arrays: list[Array | None] = [None, None]
    for n, (run, side, words) in enumerate(
        ((reference, of_reference, "reference"), (target, of_target, "target"))
    ):
        if place not in side:
            missing = ("target", "reference")[n]
            return Rows(None, None, f"only the {missing} has it")
        try:
            array = np.asarray(run.array(side[place].ref.record))
        except ElementsMissing as error:
            return Rows(None, None, f"{words}: {error}")
        arrays[n] = _last(array, _batch(run, side, place[0]))
        if arrays[n] is None:
            return Rows(
                None,
                None,
                f"{words}: {list(array.shape)} does not say which position is the last of each row",
            )
    reference_rows, target_rows = arrays
    assert reference_rows is not None
    assert target_rows is not None
    widths = sorted((reference_rows.shape[-1], target_rows.shape[-1]))
    if widths[0] < _LEAST_VOCABULARY * widths[1]:
        return Rows(
            None,
            None,
            f"{reference_rows.shape[-1]} entries against {target_rows.shape[-1]}: not both are "
            "logits of one vocabulary",
        )
    if len(reference_rows) != len(target_rows):
        return Rows(None, None, f"{len(reference_rows)} rows against {len(target_rows)}")
    return Rows(reference_rows, target_rows)


def _batch(run: Run, side: Tensors, rank: int) -> int:
    """The number of rows in the batch: the extent of the batch axis; without such an axis, the
    smallest number of rows of any token.
    """
    shapes = [
        _squeezed(run.records[tensor.ref.record].shape)
        for (owner, _), tensor in side.items()
        if owner == rank
    ]
    return min(shape[0] if len(shape) > 2 else math.prod(shape[:-1]) for shape in shapes)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 3 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _last(array: Array, batch: int) -> Array | None:
    """(batch, vocabulary): the logits at the last position of each row; None if rows of unequal
    length are concatenated.
    """
    shape = _squeezed(array.shape)
    if len(shape) > 2:
        return array.reshape(shape[0], -1, shape[-1])[:, -1] if shape[0] == batch else None
    rows: Array = array.reshape(-1, shape[-1])
    return rows.reshape(batch, -1, shape[-1])[:, -1] if len(rows) % batch == 0 else None


_WORST = (
    TokenKind.UNEXPLAINED,
    TokenKind.OFF,
    TokenKind.INCOMPARABLE,
    TokenKind.EXPLAINED,
    TokenKind.SAMPLED,
    TokenKind.NOISE,
    TokenKind.IDENTICAL,
)


def _view_row(
    reference: Run,
    target: Run,
    of_reference: TokenLogits | None,
    of_target: TokenLogits | None,
    pair: Rows,
    verdicts: Sequence[str],
) -> ViewRow:
    from whence.comparison.views import msit
    from whence.comparison.views.formulas import Figures
    from whence.comparison.views.rows import _shown

    sides = [
        _shown(run, side.call, side.ref.slot, side.ref.record) if side is not None else None
        for run, side in ((reference, of_reference), (target, of_target))
    ]
    slot = (of_reference or of_target).ref.slot  # type: ignore[union-attr]
    figures: Figures = {}
    why, rel_l2, largest = pair.why, None, None
    if pair.reference is not None and pair.target is not None:
        width = min(pair.reference.shape[-1], pair.target.shape[-1])
        a, b = pair.reference[:, :width], pair.target[:, :width]
        figures, why = msit.figures(a, b)
        wide = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(all="ignore"):
            error, norm = np.abs(wide[1] - wide[0]), float(np.linalg.norm(wide[0]))
            rel_l2 = float(np.linalg.norm(error)) / norm if norm else None
            largest = float(error.max())
    verdict = next((word for word in _WORST if word in verdicts), "")
    return ViewRow(
        (-1, -1),
        slot,
        sides[0],
        sides[1],
        figures=figures,
        why=why,
        verdict=verdict,
        rel_l2=rel_l2,
        max_abs_err=largest,
    )


# Presents a dump with one tensor for each token as a run of logits, with the text that the model is
# assumed to have read.

# largest error, relative to the spread of the logits, of two right runs on the same text; logits of
# different texts are further apart
_ALIKE = 0.1
_NARROW_BITS = 16


class TokenLogits(NamedTuple):
    """The logits of one token of one rank: the call, its slot, the record."""

    call: Call
    ref: Ref


TokenKey = tuple[int, int]
"""Rank, token."""
Tensors = dict[TokenKey, TokenLogits]


class Rows(NamedTuple):
    """One token in both dumps: logits (batch, vocabulary), or why they cannot be compared."""

    reference: Array | None
    target: Array | None
    why: str = ""


def texts_of(pairs: Mapping[TokenKey, Rows]) -> tuple[dict[TokenKey, Array], dict[TokenKey, Array]]:
    """By (rank, token), the text that each run is assumed to have read before it, (rows, 1 + tokens
    so far): the number of the row, then token ids.
    """
    out: tuple[dict[TokenKey, Array], dict[TokenKey, Array]] = ({}, {})
    for rank in sorted({rank for rank, _ in pairs}):
        tokens = sorted(token for owner, token in pairs if owner == rank)
        steps = [pairs[rank, token] for token in tokens]
        rows = next((len(pair.reference) for pair in steps if pair.reference is not None), 1)
        texts = [np.zeros((rows, len(steps) + 1), np.int64) for _ in out]
        for text in texts:
            text[:, 0] = np.arange(rows) + rank * rows  # so that each prompt has its own
        for place, (pair, following) in enumerate(zip(steps, [*steps[1:], None], strict=True), 1):
            if pair.reference is None or pair.target is None or len(pair.reference) != rows:
                continue
            reference_best, target_best = pair.reference.argmax(-1), pair.target.argmax(-1)
            for row in range(rows):
                parted = reference_best[row] != target_best[row] and not _goes_on_alike(
                    following, row
                )
                texts[0][row, place], texts[1][row, place] = (
                    reference_best[row],
                    target_best[row] if parted else reference_best[row],
                )
        for text, texts_by_key in zip(texts, out, strict=True):
            texts_by_key.update(
                {(rank, token): text[:, : place + 1] for place, token in enumerate(tokens)}
            )
    return out


def _goes_on_alike(following: Rows | None, row: int) -> bool:
    """Whether the following logits are so close that both runs must have read the same token."""
    from whence.metrics.logits import of_token

    if (
        following is None
        or following.reference is None
        or following.target is None
        or row >= len(following.reference)
    ):
        return False
    return of_token(following.reference[row], following.target[row]).rel_logit_err <= _ALIKE


class LogitsRun(MemoryRun):
    """One side as a run of logits: for each token, one call of the model on the whole text so far.

    is_narrow: whether the logits have 16 bits. says_precision: whether the run states the precision
    in which the model computes.
    """

    def __init__(
        self,
        run: Run,
        side: Tensors,
        pairs: Mapping[TokenKey, Rows],
        texts: Mapping[TokenKey, Array],
        number: int,
    ) -> None:
        calls: list[Call] = []
        records: list[Record] = []
        arrays: dict[int, Array] = {}
        first = next(iter(side.values()))
        root = first.call.module_name
        self.is_narrow, self.says_precision = False, bool(align.settings_of(run))
        for rank, token in sorted(side):
            pair, text = pairs[rank, token], texts[rank, token]
            logits = pair.target if number else pair.reference
            dtype = run.records[side[rank, token].ref.record].dtype
            if logits is not None and dtype == "float32":
                logits, dtype = _as_rounded(logits)
            self.is_narrow |= dtypes.named(dtype).bits <= _NARROW_BITS
            if logits is not None:
                logits = logits.reshape(len(logits), 1, logits.shape[-1])
            refs = []
            for slot, kind, array in (
                ("input.input_ids", "int64", text),
                ("output.logits", dtype, logits),
            ):
                refs.append(Ref(slot, len(records)))
                shape = (len(text), 1, 1) if array is None else tuple(array.shape)
                why = pair.why if array is None else ""
                if array is not None:
                    arrays[len(records)] = array
                records.append(Record(len(records), kind, shape, why=why))
            place = len(calls)
            calls.append(
                Call(
                    place,
                    "",
                    root,
                    token,
                    place,
                    rank=rank,
                    kind="module",
                    op_type=root,
                    number="0",
                    leaf=True,
                    refs=tuple(refs),
                )
            )
        super().__init__(
            calls,
            records,
            arrays,
            path=run.path,
            info=run.info,
            notes=[
                *(n for n in run.notes if n.kind in ("error", "budget", "settings")),
                *_notes_of_maker(run, first),
            ],
            steps=[Step(root, token, 0, True, rank) for rank, token in sorted(side)],
            ended=run.ended,
            missing=missing_of(run),
        )
        self.set_option("level", "logits")

    def set_option(self, name: str, value: str) -> None:
        """Set an option of the capture in the run's info."""
        options = {**self.info.options, name: value}
        self.info = msgspec.structs.replace(self.info, options=options)


def _notes_of_maker(run: Run, logits: TokenLogits) -> list[Note]:
    maker = maker_of(run) or _maker(run, logits)
    return [note_of_maker(maker, logits.call.root)] if maker else []


def _maker(run: Run, logits: TokenLogits) -> str:
    """The scope of the module or operator that computed the logits, which the model may return
    unchanged; "" for the model itself.
    """
    scopes = (
        call.scope
        for call in run.calls
        if call.step == logits.call.step and call.phase == "forward"
        for ref in call.slots("output")
        if ref.record == logits.ref.record
    )
    return next(filter(None, scopes), "")


def _as_rounded(array: Array) -> tuple[Array, str]:
    """(array, dtype): float32 numbers in the 16-bit dtype that they were rounded to, if any."""
    for name in ("bfloat16", "float16"):
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = array.astype(dtypes.named(name).numpy)
            if np.array_equal(narrow.astype(np.float32), array, equal_nan=True) and np.any(array):
                return narrow, name
    return array, "float32"
