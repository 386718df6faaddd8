"""The answer about two runs that say the same in every line and every hash: read off the columns of
one index, with nothing decoded for a call but the few fields that could make it a special one.

It is what the stages of a comparison find of such runs. What they would look at more closely
(marks, errors, ranks, operators, a policy) is left to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from whence import align, judge
from whence.comparison.answer import generation, summary
from whence.comparison.options import CompareOptions
from whence.comparison.own_tensors import CallTimes, Column, own_stretches
from whence.comparison.replays.sampling import Sampling
from whence.comparison.verdicts.status import Gaps, decide, failed_alone
from whence.records import Call, Run
from whence.records.slots import is_input, is_written
from whence.records.views import CachedRun
from whence.results import (
    CallPair,
    Comparison,
    Coverage,
    Evidence,
    Measured,
    Plan,
    Row,
    SlotPair,
    Verdict,
    VerdictKind,
)
from whence.results.sequence import MadeOnDemand
from whence.store import StoredRun, say_the_same
from whence.store.line_digests import KINDS as CALL_KINDS
from whence.store.line_digests import Says

_RULE = "exact key"
_SAME = Measured("same", True, {"rel_l2": 0.0, "max_abs_err": 0.0})
_SLOTS = 1 << 20  # that are looked at at once
_GROWTH: dict[str, float | None] = {"e_in": 0.0, "e_out": 0.0, "growth": 0.0}
_KINDS = ("module", "label", "region")
_SPECIAL = Says.NOTES | Says.ERROR | Says.PLACEMENTS | Says.FILES


def answer(reference: Run, target: Run, options: CompareOptions) -> Comparison | None:
    """The comparison of two runs that are equal; None where they are not, or where the answer about
    them takes more than this.
    """
    if not isinstance(reference, StoredRun) or not isinstance(target, StoredRun):
        return None
    asked = (options.policy, options.chart, options.model, options.budget, *options.views)
    if any(a is not None for a in asked) or options.stated or options.occurrences:
        return None
    if options.match == "order" or len(reference.readers) != 1:
        return None
    if not say_the_same(reference, target):
        return None
    calls = _Calls(reference)
    return _answer(reference, target, options, calls) if calls.are_plain() else None


def _answer(
    reference: StoredRun, target: StoredRun, options: CompareOptions, calls: _Calls
) -> Comparison:
    number = len(reference.calls)
    replayed = number - calls.labels if options.replay else 0
    coverage = Coverage(number, number, number, replayed, calls.programs, True)
    status, why, _ = decide(
        (), (), coverage, Gaps(failed=failed_alone(reference.info, target.info)),
        inputs_differ=False, strict=options.strict,
        min_coverage=options.min_coverage,
    )  # fmt: skip
    sampling = Sampling(calls.steps(), everything=options.sample == "all", budget=None)
    result = Comparison(
        status=status,
        evidence=Evidence.TWO_DUMPS,
        reference=reference.path,
        target=target.path,
        findings=(),
        first_difference=None,
        counts={VerdictKind.IDENTICAL: calls.with_verdict()},
        coverage=coverage,
        unmatched=0,
        incomparable=0,
        inputs_differ=(),
        versions=summary.versions(reference),
        plan=Plan(calls.pairs()),
        rows=calls.rows(),
        verdicts=calls.verdicts(),
        headline=why,
        notes=(
            *sampling.notes(calls.labels),
            *summary.capture_notes("reference", reference, ()),
            *summary.capture_notes("target", target, ()),
        ),
        environment=tuple(align.differences(reference, target)),
    )
    if not calls.may_hold_tokens():
        return result
    read = CachedRun(reference)
    generated, unknown = generation.generated(read, CachedRun(target), result, read.calls)
    return msgspec.structs.replace(result, generation=generated, notes=(*result.notes, *unknown))


class _Calls:
    """The calls of a run of one process, by the columns of its index. Pairs are in the order in
    which calls began.

    programs, labels: how many calls have a program, and how many are recorded arrays.
    """

    def __init__(self, run: StoredRun) -> None:
        (self._process,) = run.readers
        self._columns, self._names = self._process.index.columns, self._process.index.names
        self._order = np.argsort(self._columns["order"], kind="stable")
        self.programs = self.labels = 0

    def are_plain(self) -> bool:
        """Is every call known by its name, its tensors and its place, and has every innermost one a
        tensor?
        """
        columns = self._columns
        counts = np.diff(columns["refs_at"])
        times = CallTimes.of(self._order, columns["parent"])
        if (
            times is None
            or not counts.any()
            or _has_a_slot_twice(columns["refs_at"], columns["ref_slot"])
            or not np.diff(columns["order"][self._order]).all()
            or not counts[times.children == 0].all()
        ):
            return False
        self._times = times
        kinds, says = self._process.said["call_kind"], self._process.said["call_says"]
        is_label = kinds == CALL_KINDS.index("label")
        # of one of a program's own, not a recorded array
        special = np.where(is_label, _SPECIAL | Says.ARGUMENTS, _SPECIAL).astype(np.uint8)
        is_known = np.isin(np.arange(256), [CALL_KINDS.index(kind) for kind in _KINDS])
        if not is_known[kinds].all() or (says & special).any():
            return False
        self.programs = int(np.count_nonzero(says & Says.PROGRAM))
        self.labels = int(np.count_nonzero(is_label))
        return self.labels in (0, self._order.size)

    def steps(self) -> list[Call]:
        """A call of each step of each root."""
        both = np.stack([self._columns["root"], self._columns["step"]])
        changes = np.diff(both, axis=1, prepend=-1).any(axis=0)
        pairs = np.unique(both[:, changes], axis=1).T.tolist()
        return [Call(-1, "", self._names[root], step, -1) for root, step in pairs]

    def may_hold_tokens(self) -> bool:
        """Was a root given integers, which may be tokens?"""
        records = self._root_inputs()
        return bool(self._is_exact()[self._columns["dtype"][records]].any())

    def with_verdict(self) -> int:
        """How many calls have a tensor, or made one between their children."""
        judged = np.diff(self._columns["refs_at"]) > 0
        judged[self._own[0]] = True
        return int(judged.sum())

    # ---- what is paired

    def pairs(self) -> Sequence[CallPair]:
        """The pairs of the plan."""

        def made(start: int, stop: int) -> Iterator[CallPair]:
            part = self._part(start, stop)
            for call, slots in zip(part.calls, part.slots(), strict=True):
                yield CallPair(
                    call, call, _RULE, "", tuple([SlotPair(s, s, r, r) for s, r in slots])
                )

        return MadeOnDemand(self._order.size, made)

    def rows(self) -> Sequence[Row]:
        """A row for every tensor of every call."""

        def made(start: int, stop: int) -> Iterator[Row]:
            ends = self._row_ends
            first, last = np.searchsorted(ends, [start, stop - 1], side="right").tolist()
            rows = self._rows_of(first, last + 1)
            begin = start - (int(ends[first - 1]) if first else 0)
            return islice(rows, begin, begin + stop - start)

        return MadeOnDemand(self._columns["ref_slot"].size, made)

    @cached_property
    def _row_ends(self) -> Column:
        """Of each pair the place of the row behind its last."""
        ends: Column = np.cumsum(np.diff(self._columns["refs_at"])[self._order])
        return ends

    def _rows_of(self, start: int, stop: int) -> Iterator[Row]:
        part, names, columns = self._part(start, stop), self._names, self._columns
        told = zip(
            range(start, stop),
            (s or r for s, r in zip(part.named("scope"), part.named("root"), strict=True)),
            part.named("op_type"),
            *(columns[name][part.calls].tolist() for name in ("step", "rank", "occurrence")),
            strict=True,
        )
        extents, at = self._extents, self._columns["shape_at"]
        records = part.records
        dtypes = iter([names[n] for n in columns["dtype"][records].tolist()])
        shapes = zip(at[records].tolist(), at[records + 1].tolist(), strict=True)
        for (index, name, op_type, *place), slots in zip(told, part.slots(), strict=True):
            step, rank, occurrence = place
            for slot, record in slots:
                dtype, (begin, end) = next(dtypes), next(shapes)
                shape = tuple(extents[begin:end])
                yield Row(
                    index, name, op_type, step, rank, occurrence, slot, slot, record, record,
                    dtype, dtype, shape, shape, VerdictKind.IDENTICAL, _RULE, _SAME,
                )  # fmt: skip

    def _part(self, start: int, stop: int) -> _Part:
        return _Part(self._columns, self._names, self._order[start:stop])

    @cached_property
    def _extents(self) -> list[int]:
        """Extents of all records, one after the other."""
        extents: list[int] = self._columns["shape"].tolist()
        return extents

    # ---- what is judged

    def verdicts(self) -> Sequence[Verdict]:
        """Of innermost calls, module by module, then of what containers made between their
        children.
        """

        def made(start: int, stop: int) -> Iterator[Verdict]:
            pairs, parts = self._judged
            of_pairs = zip(pairs[start:stop].tolist(), parts[start:stop].tolist(), strict=True)
            for pair, part in of_pairs:
                yield Verdict(
                    pair,
                    VerdictKind.IDENTICAL,
                    part,
                    Evidence.TWO_DUMPS,
                    numbers={} if part < 0 and not self.labels else dict(_GROWTH),
                    sentence="bitwise equal",
                )

        leaves = int(np.count_nonzero(self._times.children == 0))
        return MadeOnDemand(leaves + self._own[0].size, made)

    @cached_property
    def _judged(self) -> tuple[Column, Column]:
        """(pair, stretch or -1) of each verdict."""
        leaves = self._order[self._times.children[self._order] == 0]
        if not self.labels:
            place = np.empty(len(self._names), np.int64)
            place[sorted(range(len(self._names)), key=self._names.__getitem__)] = range(place.size)
            leaves = leaves[np.argsort(place[self._columns["scope"][leaves]], kind="stable")]
        containers, stretches = self._own
        pair_of = np.empty_like(self._order)
        pair_of[self._order] = np.arange(self._order.size)
        judged = pair_of[np.concatenate([leaves, containers])]
        return judged, np.concatenate([np.full(leaves.size, -1), stretches])

    @cached_property
    def _own(self) -> tuple[Column, Column]:
        """(container, stretch) of what containers made of their own."""
        return own_stretches(self._times, self._columns, self._names, self._given())

    def _is_exact(self) -> Column:
        """Of each name of the index, whether it is a dtype without rounding."""
        is_dtype = np.bincount(self._columns["dtype"], minlength=len(self._names)) > 0
        return np.array(
            [
                is_used and judge.unit_roundoff(name) == 0.0
                for is_used, name in zip(is_dtype.tolist(), self._names, strict=True)
            ]
        )

    def _root_inputs(self) -> Column:
        """Records that roots were given."""
        columns = self._columns
        is_root = np.repeat(columns["parent"] < 0, np.diff(columns["refs_at"]))
        is_given = np.array([is_input(n) for n in self._names])[columns["ref_slot"]]
        return np.unique(columns["ref_record"][is_root & is_given])

    def _given(self) -> Column:
        """Records without rounding that the caller chose, and no call made."""
        columns = self._columns
        records = self._root_inputs()
        exact = records[self._is_exact()[columns["dtype"][records]]]
        if not exact.size:
            return exact
        written = np.array([is_written(n) for n in self._names])[columns["ref_slot"]]
        is_made = np.zeros(columns["dtype"].size, bool)
        is_made[columns["ref_record"][written]] = True
        return exact[~is_made[exact]]


def _has_a_slot_twice(refs_at: Column, slots: Column) -> bool:
    """Has a call two tensors in one slot?"""
    counts = np.diff(refs_at)
    for count in np.unique(counts[counts > 1]).tolist():
        starts = refs_at[:-1][counts == count]
        of_calls = max(1, _SLOTS // count)
        for first in range(0, starts.size, of_calls):
            places = starts[first : first + of_calls, None] + np.arange(count)
            if not np.diff(np.sort(slots[places], axis=1), axis=1).all():
                return True
    return False


class _Part:
    """Some calls with their tensors, taken from the columns at once.

    records: of all their tensors, one call after the other.
    """

    def __init__(self, columns: Mapping[str, Any], names: Sequence[str], calls: Column) -> None:
        self.calls: list[int] = calls.tolist()
        self._columns, self._names = columns, names
        starts, ends = columns["refs_at"][calls], columns["refs_at"][calls + 1]
        self._counts = ends - starts
        places = np.arange(int(self._counts.sum()))
        places += np.repeat(ends - np.cumsum(self._counts), self._counts)
        self._slots, self.records = columns["ref_slot"][places], columns["ref_record"][places]

    def named(self, column: str) -> list[str]:
        """A column of names of these calls."""
        return [self._names[n] for n in self._columns[column][self.calls].tolist()]

    def slots(self) -> Iterator[Iterator[tuple[str, int]]]:
        """(slot, record) of each tensor, call by call; each is read before the next."""
        names = [self._names[n] for n in self._slots.tolist()]
        refs = zip(names, self.records.tolist(), strict=True)
        return (islice(refs, count) for count in self._counts.tolist())
