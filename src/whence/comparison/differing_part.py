"""The part in which two runs differ that say the same in every line: calls that hold a tensor with
another hash, the calls around them, and what these are made of. The stages of a comparison look at
these alone; what is equal beside them is counted, and its rows and verdicts are read off columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import msgspec
import numpy as np

from whence.comparison.call_columns import RULE, CallColumns, of_columns
from whence.comparison.context import Context
from whence.comparison.kept_calls import Kept, kept_calls
from whence.comparison.left_out import LeftOut, operator_form
from whence.comparison.options import CompareOptions
from whence.comparison.own_tensors import Column
from whence.dtypes import Array
from whence.records import Call, Over, Run
from whence.records.slots import is_written
from whence.results import Comparison, Finding, Plan, Remark, Row, Undecided, Verdict, VerdictKind
from whence.store import StoredRun, differing_tensors, some_calls, some_records

_LARGEST_SHARE = 0.6  # of calls that are kept; above, little is won
_force = msgspec.structs.force_setattr
Said = TypeVar("Said", Finding, Remark, Verdict, Undecided)


class PartOfRun(Over):
    """Some calls and records of a run on disk, under numbers of their own.

    numbers: by record of this run, its number in `base`. like: the calls of the other run, whose
    references are held once where they are the same.
    """

    def __init__(
        self, run: StoredRun, calls: Column, records: Column, like: Sequence[Call] = ()
    ) -> None:
        place_of = np.full(len(run.calls), -1, np.int64)
        place_of[calls] = np.arange(calls.size)
        places = np.full(len(run.records), -1, np.int64)
        places[records] = np.arange(records.size)
        own_calls, own_records = [], []
        for number, call in enumerate(some_calls(run, calls)):
            _force(call, "id", number)
            if call.parent >= 0:
                _force(call, "parent", int(place_of[call.parent]))
            for ref in call.refs:
                _force(ref, "record", int(places[ref.record]))
            if like and call.refs == like[number].refs:
                _force(call, "refs", like[number].refs)
            own_calls.append(call)
        for number, record in enumerate(some_records(run, records)):
            _force(record, "id", number)
            own_records.append(record)
        super().__init__(run, own_calls, own_records)
        self.numbers = records
        self.programs = {
            key: msgspec.structs.replace(p, constants=tuple(places[list(p.constants)].tolist()))
            for key, p in run.programs.items()
        }

    def array(self, record: int) -> Array:
        """Elements of a record."""
        return self.base.array(int(self.numbers[record]))

    def below(self, record: int) -> tuple[Run, int] | None:
        """As `Over.below`."""
        return self.base, int(self.numbers[record])


@dataclass(frozen=True)
class DifferingPart:
    """Both runs as far as they differ. columns: of the whole reference; kept: which of its calls
    are in the part.
    """

    reference: PartOfRun
    target: PartOfRun
    columns: CallColumns
    kept: Kept
    left_out: LeftOut

    # ---- what the stages made of it

    def fits(self, context: Context) -> bool:
        """Did the stages take both runs as they are, with each call paired with its like?"""
        prepared, paired = context.prepared, context.paired
        sides = (
            (prepared.read_reference, prepared.aligned.reference, self.reference),
            (prepared.read_target, prepared.aligned.target, self.target),
        )
        if not all(aligned is read and read.base is part for read, aligned, part in sides):
            return False
        plan = paired.plan
        if paired.target is not paired.shown or msgspec.structs.replace(plan, pairs=()) != Plan(()):
            return False
        order = [call.id for call in sorted(paired.calls, key=lambda call: call.order)]
        return order == [pair.reference for pair in plan.pairs] and all(
            pair.target == pair.reference
            and pair.rule == RULE
            and not (pair.evidence or pair.only_reference or pair.only_target or pair.also)
            and [
                (s.reference_slot, s.reference_record, s.target_slot, s.target_record)
                for s in pair.slots
            ]
            == [(r.slot, r.record) * 2 for r in paired.calls[pair.reference].refs]
            for pair in plan.pairs
        )

    def whole(self, result: Comparison) -> Comparison:
        """The answer about the part as one about both runs. Raises nothing where `fits`."""
        calls = np.flatnonzero(self.kept.is_kept)
        of_pairs = [p.reference for p in result.plan.pairs]
        pair_of = self.columns.pair_of[calls[of_pairs]]

        def placed(said: Said) -> Said:
            return msgspec.structs.replace(
                said, pair=int(pair_of[said.pair]) if said.pair >= 0 else said.pair
            )

        verdicts: dict[tuple[int, int], Verdict] = {}
        for verdict in result.verdicts:
            moved = placed(verdict)
            if verdict.named >= 0:
                moved = moved.replace(named=int(calls[verdict.named]))
            verdicts[moved.pair, moved.stretch] = moved
        others = {key: v for key, v in verdicts.items() if v != self.columns.equal(*key)}
        every = self.columns.verdicts(others, self._stretches(verdicts))
        undecided = result.undecided
        return msgspec.structs.replace(
            result,
            findings=tuple(map(placed, result.findings)),
            remarks=tuple(map(placed, result.remarks)),
            undecided=placed(undecided) if undecided is not None else None,
            plan=Plan(self.columns.pairs()),
            rows=self.columns.rows(self._rows(result.rows, pair_of)),
            verdicts=every,
            counts=_in_order(result.counts, every),
        )

    def _stretches(self, verdicts: Mapping[tuple[int, int], Verdict]) -> tuple[Column, Column]:
        """(container, stretch) of what is judged of containers, in the order of execution: of those
        in the part as it was judged, of the others what made a tensor.
        """
        containers, stretches, ends = self.columns.own
        is_beside = ~self.kept.is_open[containers]
        keys = [(self.columns.order[pair], part) for pair, part in verdicts if part >= 0]
        own = np.array(keys, np.int64).reshape(-1, 2)
        containers = np.concatenate([containers[is_beside], own[:, 0]])
        stretches = np.concatenate([stretches[is_beside], own[:, 1]])
        when = np.concatenate([ends[is_beside], self.columns.times.ends(own[:, 0], own[:, 1])])
        in_order = np.argsort(when, kind="stable")
        return containers[in_order], stretches[in_order]

    def _rows(self, rows: Sequence[Row], pair_of: Column) -> dict[int, list[Row]]:
        """The rows of calls that are not equal in all, by pair."""
        differ = {
            row.pair
            for row in rows
            if row.verdict != VerdictKind.IDENTICAL or not row.measured.identical
        }
        numbers, out = self.reference.numbers, dict[int, list[Row]]()
        for row in rows:
            if row.pair in differ:
                pair = int(pair_of[row.pair])
                moved = msgspec.structs.replace(
                    row,
                    pair=pair,
                    reference_record=int(numbers[row.reference_record]),
                    target_record=int(numbers[row.target_record]),
                )
                out.setdefault(pair, []).append(moved)
        return out


def differing_part(reference: Run, target: Run, options: CompareOptions) -> DifferingPart | None:
    """The part in which two runs differ; None where they differ in more than elements, where it is
    most of them, or where the stages have to look at more than columns tell.
    """
    runs = of_columns(reference, target, options)
    if runs is None or options.engine is not None:
        return None
    differ = differing_tensors(*runs)
    if differ is None or not differ.any():
        return None
    columns = CallColumns(runs[0])
    if not columns.are_plain() or not columns.are_modules():
        return None
    has_programs = bool(options.replay and columns.programs)
    kept = kept_calls(columns, differ, makers=has_programs)
    if kept is None or kept.is_kept.sum() > _LARGEST_SHARE * kept.is_kept.size:
        return None
    calls = np.flatnonzero(kept.is_kept)
    is_used = np.zeros(differ.size, bool)
    is_used[columns.records_of(kept.is_kept)] = True
    for program in runs[0].programs.values():
        is_used[list(program.constants)] = True
    records = np.flatnonzero(is_used)
    first = PartOfRun(runs[0], calls, records)
    second = PartOfRun(runs[1], calls, records, first.calls)
    if not all(_is_plain(call) for part in (first, second) for call in part.calls):
        return None
    return DifferingPart(first, second, columns, kept, _Beside(*runs, columns, kept).left_out())


class _Beside:
    """The calls that are not in the part. target: the whole run."""

    def __init__(
        self, reference: StoredRun, target: StoredRun, columns: CallColumns, kept: Kept
    ) -> None:
        self._reference, self._target = reference, target
        self._columns, self._is_left = columns, ~kept.is_kept

    def left_out(self) -> LeftOut:
        """What the stages have to know of them."""
        columns, is_left = self._columns, self._is_left
        has_tensors = np.diff(columns.columns["refs_at"]) > 0
        has_tensors[columns.own[0]] = True
        roots = np.bincount(columns.columns["root"][is_left], minlength=len(columns.names))
        return LeftOut(
            int(is_left.sum()),
            int((columns.have_programs() & is_left).sum()),
            int((has_tensors & is_left).sum()),
            {columns.names[n]: int(roots[n]) for n in np.flatnonzero(roots).tolist()},
            self._repeats,
            self._target_elements,
        )

    def _repeats(self) -> Counter[Hashable]:
        run, counts = self._reference, Counter[Hashable]()
        first, numbers = self._columns.forms(self._is_left)
        for call, number in zip(some_calls(run, first), numbers.tolist(), strict=True):
            outputs = [r.record for r in call.refs if is_written(r.slot)]
            if call.leaf and outputs and all(run.records[record].count for record in outputs):
                counts[operator_form(call, call, run.records)] += number
        return counts

    def _target_elements(self, call: Call, step: int, slot: str) -> Array | None:
        calls, keys = self._by_step
        scope = self._columns.names.index(call.scope)
        first, last = np.searchsorted(keys, [_key(scope, step), _key(scope, step + 1)]).tolist()
        wanted = msgspec.structs.replace(call, step=step).key()
        for number in calls[first:last].tolist():
            earlier = self._target.calls[number]
            if earlier.key() == wanted:
                record = next((ref.record for ref in earlier.refs if ref.slot == slot), None)
                return self._target.array(record) if record is not None else None
        return None

    @cached_property
    def _by_step(self) -> tuple[Column, Column]:
        """(calls, key of the module and step of each), in the order of the keys."""
        columns, calls = self._columns.columns, np.flatnonzero(self._is_left)
        keys = _key(columns["scope"][calls].astype(np.int64), columns["step"][calls])
        in_order = np.argsort(keys, kind="stable")
        return calls[in_order], keys[in_order]


def _key(scope: Any, step: Any) -> Any:
    """One number of a module and a step."""
    return (scope << 32) + step


def _is_plain(call: Call) -> bool:
    """Is it a module's in a forward pass that computes with numbers?"""
    is_forward = call.phase == "forward" and call.forward < 0
    return is_forward and call.quantised is None and not call.gradients


def _in_order(counts: Mapping[str, int], verdicts: Sequence[Verdict]) -> dict[str, int]:
    """The counts in the order in which verdicts have them first."""
    first: dict[str, None] = {}
    for verdict in verdicts:
        first[verdict.verdict] = None
        if verdict.verdict == VerdictKind.IDENTICAL:
            break
    return {kind: counts[kind] for kind in (*first, *counts) if kind in counts}
