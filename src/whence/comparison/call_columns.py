"""The calls of a run of one process by the columns of its index: pairs, rows and verdicts that are
made when they are looked at, with nothing decoded for a call but the few fields that could make it
a special one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from whence.comparison.options import CompareOptions
from whence.comparison.own_tensors import CallTimes, Column, own_stretches
from whence.dtypes import unit_roundoff
from whence.records import Call, Run
from whence.records.slots import is_input, is_written, slot_kind
from whence.results import CallPair, Evidence, Measured, Row, Verdict, VerdictKind
from whence.results.columns import PairColumns, RowColumns, VerdictColumns
from whence.results.sequence import MadeOnDemand
from whence.store import StoredRun
from whence.store.line_digests import KINDS as CALL_KINDS
from whence.store.line_digests import Says

RULE = "exact key"
_SAME = Measured("same", True, {"rel_l2": 0.0, "max_abs_err": 0.0})
_PAIR = CallPair(-1, -1, RULE)
_ROW = Row(-1, "", "", 0, 0, 0, "", "", -1, -1, "", "", (), (), VerdictKind.IDENTICAL, RULE, _SAME)
_SLOTS = 1 << 20  # that are looked at at once
_GROWTH: dict[str, float | None] = {"e_in": 0.0, "e_out": 0.0, "growth": 0.0}
_KINDS = ("module", "label", "region")
_SPECIAL = Says.NOTES | Says.ERROR | Says.PLACEMENTS | Says.FILES


def of_columns(
    reference: Run, target: Run, options: CompareOptions
) -> tuple[StoredRun, StoredRun] | None:
    """Both runs, where their columns may tell what a comparison with these options asks for: runs
    of our own, of one process, with nothing declared, mapped or counted beside.
    """
    if not isinstance(reference, StoredRun) or not isinstance(target, StoredRun):
        return None
    asked = (options.policy, options.chart, options.model, options.budget, *options.views)
    if any(a is not None for a in asked) or options.stated or options.occurrences:
        return None
    if options.match == "order" or len(reference.readers) != 1:
        return None
    return reference, target


class CallColumns:
    """The calls of a run of one process, by the columns of its index. Pairs are in the order in
    which calls began.

    programs, labels: how many calls have a program, and how many are recorded arrays.
    """

    def __init__(self, run: StoredRun) -> None:
        (self._process,) = run.readers
        self.columns, self.names = self._process.index.columns, self._process.index.names
        self.order = np.argsort(self.columns["order"], kind="stable")
        self.programs = self.labels = 0

    def are_plain(self) -> bool:
        """Is every call known by its name, its tensors and its place, and has every innermost one a
        tensor?
        """
        columns = self.columns
        counts = np.diff(columns["refs_at"])
        times = CallTimes.of(self.order, columns["parent"])
        if (
            times is None
            or not counts.any()
            or _has_a_slot_twice(columns["refs_at"], columns["ref_slot"])
            or not np.diff(columns["order"][self.order]).all()
            or not counts[times.children == 0].all()
        ):
            return False
        self.times = times
        kinds, says = self._process.said["call_kind"], self._process.said["call_says"]
        is_label = kinds == CALL_KINDS.index("label")
        # of one of a program's own, not a recorded array
        special = np.where(is_label, _SPECIAL | Says.ARGUMENTS, _SPECIAL).astype(np.uint8)
        is_known = np.isin(np.arange(256), [CALL_KINDS.index(kind) for kind in _KINDS])
        if not is_known[kinds].all() or (says & special).any():
            return False
        self.programs = int(np.count_nonzero(says & Says.PROGRAM))
        self.labels = int(np.count_nonzero(is_label))
        return self.labels in (0, self.order.size)

    def are_modules(self) -> bool:
        """Is every call one of a module?"""
        return bool((self._process.said["call_kind"] == CALL_KINDS.index("module")).all())

    def have_programs(self) -> Column:
        """Which calls have a program."""
        has_program: Column = (self._process.said["call_says"] & Says.PROGRAM) > 0
        return has_program

    def records_of(self, some: Column) -> Column:
        """The records of some calls."""
        of_some = np.repeat(some, np.diff(self.columns["refs_at"]))
        records: Column = self.columns["ref_record"][of_some]
        return records

    def forms(self, some: Column) -> tuple[Column, Column]:
        """(first call, number) of the innermost calls of each module, among some, whose tensors are
        of one kind, dtype and shape.
        """
        columns = self.columns
        calls = np.flatnonzero(some & (self.times.children == 0))
        starts = columns["refs_at"][calls]
        counts = columns["refs_at"][calls + 1] - starts
        code = counts.astype(np.int64)
        for name in ("root", "scope", "op_type"):
            code = _joint(code, columns[name][calls])
        kinds = [slot_kind(name) for name in self.names]
        of_slot = np.array([kinds.index(kind) for kind in kinds])[columns["ref_slot"]]
        of_record = self._record_forms(np.arange(columns["dtype"].size))
        for place in range(int(counts.max(initial=0))):
            has_it = counts > place
            refs = starts[has_it] + place
            part = np.zeros(calls.size, np.int64)
            part[has_it] = 1 + _joint(of_slot[refs], of_record[columns["ref_record"][refs]])
            code = _joint(code, part)
        _, first, number = np.unique(code, return_index=True, return_counts=True)
        in_order = np.argsort(first)
        return calls[first[in_order]], number[in_order]

    def _record_forms(self, records: Column) -> Column:
        """By record, one number for its dtype and shape."""
        starts, extents = self.columns["shape_at"][records], self.columns["shape"]
        axes = self.columns["shape_at"][records + 1] - starts
        code = _joint(self.columns["dtype"][records], axes)
        for axis in range(int(axes.max(initial=0))):
            has_it = axes > axis
            part = np.zeros(axes.size, np.int64)
            part[has_it] = 1 + np.unique(extents[starts[has_it] + axis], return_inverse=True)[1]
            code = _joint(code, part)
        return code

    def steps(self) -> list[Call]:
        """A call of each step of each root."""
        both = np.stack([self.columns["root"], self.columns["step"]])
        changes = np.diff(both, axis=1, prepend=-1).any(axis=0)
        pairs = sorted(set(zip(*both[:, changes].tolist(), strict=True)))
        return [Call(-1, "", self.names[root], step, -1) for root, step in pairs]

    def may_hold_tokens(self) -> bool:
        """Was a root given integers, which may be tokens?"""
        records = self._root_inputs()
        return bool(self.is_exact()[self.columns["dtype"][records]].any())

    def with_verdict(self) -> int:
        """How many calls have a tensor, or made one between their children."""
        judged = np.diff(self.columns["refs_at"]) > 0
        judged[self.own[0]] = True
        return int(judged.sum())

    # ---- what is paired

    def pairs(self) -> Sequence[CallPair]:
        """The pairs of the plan."""

        def made(start: int, stop: int) -> PairColumns:
            part = self._part(start, stop)
            counts, records = part.counts.tolist(), part.records.tolist()
            return PairColumns(_PAIR, part.calls, counts, part.slots, records)

        return MadeOnDemand(self.order.size, made)

    def rows(self, instead: Mapping[int, Sequence[Row]] | None = None) -> Sequence[Row]:
        """A row for every tensor of every call. instead: of some pairs the rows they have."""
        others = instead or {}

        def made(start: int, stop: int) -> RowColumns:
            ends = self._row_ends
            first, last = np.searchsorted(ends, [start, stop - 1], side="right").tolist()
            begin = start - (int(ends[first - 1]) if first else 0)
            return self._rows_of(first, last + 1, others, slice(begin, begin + stop - start))

        examples = itertools.chain.from_iterable(self._row_examples(others))
        return MadeOnDemand(self.columns["ref_slot"].size, made, list(examples))

    def _row_examples(self, others: Mapping[int, Sequence[Row]]) -> Iterator[Sequence[Row]]:
        """Rows that are measured as all others are: those of some pairs, and of one equal pair with
        a tensor before the first of them that it may come before.
        """
        has_rows = np.diff(self._row_ends, prepend=0) > 0
        equal = next((p for p in np.flatnonzero(has_rows).tolist() if p not in others), None)
        for pair, rows in others.items():
            if equal is not None and equal < pair:
                yield list(self._rows_of(equal, equal + 1, {}, slice(None)))
                equal = None
            yield rows
        if equal is not None:
            yield list(self._rows_of(equal, equal + 1, {}, slice(None)))

    @cached_property
    def _row_ends(self) -> Column:
        """Of each pair the place of the row behind its last."""
        ends: Column = np.cumsum(np.diff(self.columns["refs_at"])[self.order])
        return ends

    def _rows_of(
        self, start: int, stop: int, others: Mapping[int, Sequence[Row]], some: slice
    ) -> RowColumns:
        """Some of the rows of the pairs from one to another. others: by pair."""
        part, columns = self._part(start, stop), self.columns
        told = zip(
            range(start, stop),
            (s or r for s, r in zip(part.named("scope"), part.named("root"), strict=True)),
            part.named("op_type"),
            *(columns[name][part.calls].tolist() for name in ("step", "rank", "occurrence")),
            strict=True,
        )
        call = np.repeat(np.arange(stop - start), part.counts)[some]
        records = part.records[some]
        form, examples = self._forms_of(records)
        before = (np.cumsum(part.counts) - part.counts - (some.start or 0)).tolist()
        instead = {
            place: row
            for pair, first in zip(range(start, stop), before, strict=True)
            if pair in others
            for place, row in enumerate(others[pair], first)
            if 0 <= place < records.size
        }
        return RowColumns(
            _ROW, list(told), [self._form(record) for record in examples.tolist()],
            call.tolist(), part.slots[some], records.tolist(), form.tolist(), instead,
        )  # fmt: skip

    def _forms_of(self, records: Column) -> tuple[Column, Column]:
        """(number of the dtype and shape of each record, a record of each number)."""
        _, examples, form = np.unique(
            self._record_forms(records), return_index=True, return_inverse=True
        )
        return form, records[examples]

    def _form(self, record: int) -> tuple[str, tuple[int, ...]]:
        """dtype and shape of a record."""
        columns = self.columns
        begin, end = columns["shape_at"][record : record + 2].tolist()
        return self.names[columns["dtype"][record]], tuple(columns["shape"][begin:end].tolist())

    def _part(self, start: int, stop: int) -> _Part:
        return _Part(self.columns, self.names, self.order[start:stop])

    # ---- what is judged

    def verdicts(
        self,
        instead: Mapping[tuple[int, int], Verdict] | None = None,
        stretches: tuple[Column, Column] | None = None,
    ) -> Sequence[Verdict]:
        """Of innermost calls, module by module, then of what containers made between their
        children.

        instead: those that are others, by pair and stretch. stretches: (container, stretch) of all
        that are judged, None for those that made a tensor.
        """
        others = instead or {}
        judged = self._judged(stretches if stretches is not None else self.own[:2])

        def made(start: int, stop: int) -> VerdictColumns:
            pairs, parts = (column[start:stop].tolist() for column in judged)
            keys = zip(pairs, parts, strict=True)
            instead = {place: others[key] for place, key in enumerate(keys) if key in others}
            return VerdictColumns(self.equal(-1, -1), self.equal(-1, 0), pairs, parts, instead)

        return MadeOnDemand(judged[0].size, made)

    def equal(self, pair: int, stretch: int) -> Verdict:
        """The verdict of a region whose tensors are all equal."""
        numbers = {} if stretch < 0 and not self.labels else dict(_GROWTH)
        return Verdict(
            pair,
            VerdictKind.IDENTICAL,
            stretch,
            Evidence.TWO_DUMPS,
            numbers=numbers,
            sentence="bitwise equal",
        )

    def _judged(self, own: tuple[Column, Column]) -> tuple[Column, Column]:
        """(pair, stretch or -1) of each verdict."""
        leaves = self.order[self.times.children[self.order] == 0]
        if not self.labels:
            place = np.empty(len(self.names), np.int64)
            place[sorted(range(len(self.names)), key=self.names.__getitem__)] = range(place.size)
            leaves = leaves[np.argsort(place[self.columns["scope"][leaves]], kind="stable")]
        containers, stretches = own
        judged = self.pair_of[np.concatenate([leaves, containers])]
        return judged, np.concatenate([np.full(leaves.size, -1), stretches])

    @cached_property
    def pair_of(self) -> Column:
        """Of each call the place of its pair."""
        pair_of = np.empty_like(self.order)
        pair_of[self.order] = np.arange(self.order.size)
        return pair_of

    @cached_property
    def own(self) -> tuple[Column, Column, Column]:
        """(container, stretch, when it ends) of what containers made of their own."""
        return own_stretches(self.times, self.columns, self.names, self._given())

    def is_exact(self) -> Column:
        """Of each name of the index, whether it is a dtype without rounding."""
        is_dtype = np.bincount(self.columns["dtype"], minlength=len(self.names)) > 0
        return np.array(
            [
                is_used and unit_roundoff(name) == 0.0
                for is_used, name in zip(is_dtype.tolist(), self.names, strict=True)
            ]
        )

    def _root_inputs(self) -> Column:
        """Records that roots were given."""
        columns = self.columns
        is_root = np.repeat(columns["parent"] < 0, np.diff(columns["refs_at"]))
        is_given = np.array([is_input(n) for n in self.names])[columns["ref_slot"]]
        given: Column = columns["ref_record"][is_root & is_given]
        return np.array(sorted(set(given.tolist())), given.dtype)

    def _given(self) -> Column:
        """Records without rounding that the caller chose, and no call made."""
        columns = self.columns
        records = self._root_inputs()
        exact = records[self.is_exact()[columns["dtype"][records]]]
        if not exact.size:
            return exact
        written = np.array([is_written(n) for n in self.names])[columns["ref_slot"]]
        is_made = np.zeros(columns["dtype"].size, bool)
        is_made[columns["ref_record"][written]] = True
        return exact[~is_made[exact]]


def _joint(first: Column, second: Column) -> Column:
    """One number for each pair of numbers, from 0 on."""
    pairs = first.astype(np.int64) * (int(second.max(initial=0)) + 1) + second
    numbers: Column = np.unique(pairs, return_inverse=True)[1]
    return numbers


def _has_a_slot_twice(refs_at: Column, slots: Column) -> bool:
    """Has a call two tensors in one slot?"""
    counts = np.diff(refs_at)
    for count in sorted(set(counts[counts > 1].tolist())):
        starts = refs_at[:-1][counts == count]
        of_calls = max(1, _SLOTS // count)
        for first in range(0, starts.size, of_calls):
            places = starts[first : first + of_calls, None] + np.arange(count)
            if not np.diff(np.sort(slots[places], axis=1), axis=1).all():
                return True
    return False


class _Part:
    """Some calls with their tensors, taken from the columns at once.

    counts: how many tensors each has. slots, records: of these, one call after the other.
    """

    def __init__(self, columns: Mapping[str, Any], names: Sequence[str], calls: Column) -> None:
        self.calls: list[int] = calls.tolist()
        self._columns, self._names = columns, names
        starts, ends = columns["refs_at"][calls], columns["refs_at"][calls + 1]
        self.counts = ends - starts
        places = np.arange(int(self.counts.sum()))
        places += np.repeat(ends - np.cumsum(self.counts), self.counts)
        self.records = columns["ref_record"][places]
        self.slots = [names[n] for n in columns["ref_slot"][places].tolist()]

    def named(self, column: str) -> list[str]:
        """A column of names of these calls."""
        return [self._names[n] for n in self._columns[column][self.calls].tolist()]
