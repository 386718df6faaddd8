"""One of two dumps that hold a tensor for each token as a run of logits alone, and the text that it
is taken to have been given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from whence import align, dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Collective, Note, Program, Record, Ref, Run, Step, missing_of
from whence.records.logits import maker_of, note_of_maker

# of their own spread: logits of one text are nearer to each other than this in two right runs,
# those of two texts are not
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
    """One token in both dumps: logits as (rows of the batch, vocabulary), or why they cannot be
    compared.
    """

    reference: Array | None
    target: Array | None
    why: str = ""


def texts_of(pairs: Mapping[TokenKey, Rows]) -> tuple[dict[TokenKey, Array], dict[TokenKey, Array]]:
    """For each token the text that each run is taken to have been given, (rows, tokens so far): a
    number for the row, then the tokens.
    """
    out: tuple[dict[TokenKey, Array], dict[TokenKey, Array]] = ({}, {})
    for rank in sorted({rank for rank, _ in pairs}):
        tokens = sorted(token for owner, token in pairs if owner == rank)
        steps = [pairs[rank, token] for token in tokens]
        rows = next((len(pair.reference) for pair in steps if pair.reference is not None), 1)
        texts = [np.zeros((rows, len(steps) + 1), np.int64) for _ in out]
        for text in texts:
            text[:, 0] = np.arange(rows)
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
    """Are the logits behind the next token so near to each other that both runs were given the same
    one?
    """
    from whence.metrics.logits import of_token

    if (
        following is None
        or following.reference is None
        or following.target is None
        or row >= len(following.reference)
    ):
        return False
    return of_token(following.reference[row], following.target[row]).rel_logit_err <= _ALIKE


class LogitsRun:
    """One side as a run of logits alone: for each token a call of the model, given the whole text
    so far.

    is_narrow: the logits have 16 bits. says_precision: the run says in which precision the model
    computes.
    """

    def __init__(
        self,
        run: Run,
        side: Tensors,
        pairs: Mapping[TokenKey, Rows],
        texts: Mapping[TokenKey, Array],
        number: int,
    ) -> None:
        self.path, self.ended, self.missing = run.path, run.ended, missing_of(run)
        self.programs: Mapping[str, Program] = {}
        self.notes: Sequence[Note] = [
            note for note in run.notes if note.kind in ("error", "budget", "settings")
        ]
        calls: list[Call] = []
        records: list[Record] = []
        self.calls: Sequence[Call] = calls
        self.records: Sequence[Record] = records
        self._arrays: list[Array | None] = []
        first = next(iter(side.values())).call
        root = first.module_name
        self.notes = [*self.notes, *_notes_of_maker(run, next(iter(side.values())))]
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
                records.append(Record(len(records), kind, shape, why=why))
                self._arrays.append(array)
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
        self.info = run.info
        self.set_option("level", "logits")
        self.collectives: Sequence[Collective] = ()
        self.steps: Sequence[Step] = [
            Step(root, token, 0, True, rank) for rank, token in sorted(side)
        ]

    def set_option(self, name: str, value: str) -> None:
        """Let the run say this of how it was captured."""
        options = {**self.info.options, name: value}
        self.info = msgspec.structs.replace(self.info, options=options)

    def array(self, record: int) -> Array:
        array = self._arrays[record]
        if array is None:
            raise ElementsMissing(self.records[record].why)
        return array


def _notes_of_maker(run: Run, logits: TokenLogits) -> list[Note]:
    maker = maker_of(run) or _maker(run, logits)
    return [note_of_maker(maker, logits.call.root)] if maker else []


def _maker(run: Run, logits: TokenLogits) -> str:
    """The module or operator that made a tensor, which the model may hand on unchanged; "" for the
    model itself.
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
    """float32 numbers that were rounded to 16 bits, as what they are; others as float32."""
    for name in ("bfloat16", "float16"):
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = array.astype(dtypes.named(name).numpy)
            if np.array_equal(narrow.astype(np.float32), array, equal_nan=True) and np.any(array):
                return narrow, name
    return array, "float32"
