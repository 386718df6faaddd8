"""Rows, pairs and verdicts of calls whose tensors are all equal, as columns: they differ in names
and numbers alone, so they are written as text without an object for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from whence.results.plan import CallPair, SlotPair
from whence.results.rows import Row
from whence.results.verdict import Verdict


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Rows of some calls, one call after the other.

    like: a row whose other fields all have. calls: (pair, name, op_type, step, rank, occurrence) of
    each call. call, slot, record, form: of each row the place of its call in `calls`, its slot, its
    record, and the place of (dtype, shape) in `forms`. others: by place, rows that are not like it.
    """

    like: Row
    calls: Sequence[tuple[int, str, str, int, int, int]]
    forms: Sequence[tuple[str, tuple[int, ...]]]
    call: Sequence[int]
    slot: Sequence[str]
    record: Sequence[int]
    form: Sequence[int]
    others: Mapping[int, Row]

    def __iter__(self) -> Iterator[Row]:
        verdict, rule, measured = self.like.verdict, self.like.rule, self.like.measured
        columns = zip(self.call, self.slot, self.record, self.form, strict=True)
        for place, (call, slot, record, form) in enumerate(columns):
            if place in self.others:
                yield self.others[place]
                continue
            dtype, shape = self.forms[form]
            yield Row(
                *self.calls[call], slot, slot, record, record, dtype, dtype, shape, shape,
                verdict, rule, measured,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PairColumns:
    """Pairs of calls that have one number in both runs, and the same tensors.

    like: a pair whose other fields all have. calls: their numbers. counts: of each, how many
    tensors it has. slot, record: of these, one call after the other.
    """

    like: CallPair
    calls: Sequence[int]
    counts: Sequence[int]
    slot: Sequence[str]
    record: Sequence[int]

    def __iter__(self) -> Iterator[CallPair]:
        slots = zip(self.slot, self.record, strict=True)
        like = self.like
        for call, count in zip(self.calls, self.counts, strict=True):
            paired = tuple([SlotPair(s, s, r, r) for s, r in islice(slots, count)])
            yield CallPair(call, call, like.rule, like.evidence, paired)


@dataclass(frozen=True, slots=True)
class VerdictColumns:
    """Verdicts of calls and of stretches of containers.

    whole, part: verdicts whose other fields all of a call, and all of a stretch, have. pair,
    stretch: of each verdict; a stretch of -1 is the whole call. others: by place, verdicts that are
    like neither.
    """

    whole: Verdict
    part: Verdict
    pair: Sequence[int]
    stretch: Sequence[int]
    others: Mapping[int, Verdict]

    def __iter__(self) -> Iterator[Verdict]:
        for place, (pair, stretch) in enumerate(zip(self.pair, self.stretch, strict=True)):
            if place in self.others:
                yield self.others[place]
            elif stretch < 0:
                yield self.whole.replace(pair=pair)
            else:
                yield self.part.replace(pair=pair, stretch=stretch)
