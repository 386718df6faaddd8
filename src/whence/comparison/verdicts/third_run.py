"""The stage for a third run, the reference in higher precision: how far both runs are from it, call
by call.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from whence import align, judge, metrics
from whence.comparison.verdicts.extra_runs import asked_the_same, partner_records
from whence.comparison.verdicts.sparse_target.labels import is_label
from whence.errors import ElementsMissing, UsageError
from whence.records import Call, Region, Run
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_output, is_param
from whence.results import CallPair, Measured, SlotPair, ThirdRun, Verdict, VerdictKind

Key = tuple[int, int]
Tell = Callable[[int, int, str], None]  # done, of, what


class ThirdRunJudge:
    """Compares reference and target with a third run. Without one, nothing is measured and no
    verdict changes.

    Corresponding tensors of the three runs are read together, once. Raises UsageError if the third
    run had other inputs (`asked_the_same`) or has no higher precision than the reference.
    """

    def __init__(
        self, reference: Run, target: Run, run: Run | None, *, tell: Tell = lambda *_: None
    ) -> None:
        self.reference, self.target, self.run, self._tell = reference, target, run, tell
        self.notes: list[str] = []
        self._partners: dict[int, int] = {}
        self._measured: dict[Key, judge.ThreeWay | None] = {}
        if run is not None:
            plan = align.plan(reference, run)
            until, self.notes = asked_the_same(reference, run, plan, "--third", self._equal)
            self._partners = partner_records(reference, plan, until)
            self._must_be_finer(run)

    def _equal(self, slot: SlotPair) -> bool:
        """Whether both records are equal up to rounding to the coarser dtype; True if elements were
        not kept.
        """
        assert self.run is not None
        a, b = self.reference.records[slot.reference_record], self.run.records[slot.target_record]
        if a.shape != b.shape:
            return False
        if a.hash and a.hash == b.hash and a.dtype == b.dtype:
            return True
        try:
            reference, third = self.reference.array(a.id), self.run.array(b.id)
        except ElementsMissing:
            return True
        if is_param(slot.reference_slot):
            difference = judge.parameters(reference, third)
            return difference.equal or not difference.comparable
        u = max(judge.unit_roundoff(a.dtype), judge.unit_roundoff(b.dtype))
        error = judge.error_of(metrics.measure(reference, third, tier="core"), a, b, u)
        return error.value is not None and error.value <= 2 * u

    def _must_be_finer(self, run: Run) -> None:
        units = [
            (
                judge.unit_roundoff(self.reference.records[a].dtype),
                judge.unit_roundoff(run.records[b].dtype),
            )
            for a, b in self._partners.items()
        ]
        if not any(0 < third < reference for reference, third in units):
            raise UsageError(
                f"--third {run.path} is nowhere of higher precision than {self.reference.path}; "
                "give the same program "
                "in float32 for 16-bit runs, in float64 for float32 runs"
            )

    def of(self, reference: int, target: int) -> judge.ThreeWay | None:
        """The errors of both records against the third run's; None if that has no such record,
        elements are missing, or the errors mean nothing.
        """
        key = (reference, target)
        if self.run is None or reference not in self._partners:
            return None
        if key not in self._measured:
            try:
                arrays = (
                    self.reference.array(reference),
                    self.target.array(target),
                    self.run.array(self._partners[reference]),
                )
                self._measured[key] = judge.three_way(*arrays)
            except ElementsMissing:
                self._measured[key] = None
        return self._measured[key]

    def judged(
        self,
        verdicts: Mapping[Key, Verdict],
        regions: Sequence[Region],
        partners: Mapping[int, int],
        error: Callable[[SlotPair], judge.PairError],
    ) -> dict[Key, Verdict]:
        """The verdicts with three-way numbers; those without a replay are revised with the help of
        the third run.

        partners: record of the reference -> record of the target. error: the error of such a pair,
        from the two dumps.
        """
        out = dict(verdicts)
        if self.run is None:
            return out
        before = _Before()
        for number, region in enumerate(regions):
            self._tell(number + 1, len(regions), "measuring against the third run")
            key, call = (region.call, region.stretch), self.reference.calls[region.call]
            verdict = out.get(key)
            if verdict is None or verdict.verdict == VerdictKind.IDENTICAL:
                continue
            outputs = self._known(region.outputs, partners)
            if not outputs:
                continue
            inputs = self._inputs(region, partners, error)
            if is_label(call):
                inputs = None if has_mark(call, Mark.UNORDERED) else before.of(call)
                before.add(call, outputs)
            # The verdict's error must be among these outputs, but the target may have changed a
            # tensor that the reference only passes on.
            worst = max(error(_pair(r, partners)).value or 0.0 for r in region.outputs)
            if worst < (verdict.numbers.get("e_out") or math.inf):
                out[key] = judge.with_third(verdict, outputs)
            else:
                out[key] = judge.judge_third(verdict, inputs, outputs)
        return out

    def _known(
        self, records: Iterable[int], partners: Mapping[int, int]
    ) -> list[judge.ThreeWay] | None:
        """The errors of these records of the reference; None if one is not known."""
        errors = [self.of(r, partners[r]) if r in partners else None for r in records]
        known = [error for error in errors if error is not None]
        return known if len(known) == len(errors) else None

    def _inputs(
        self,
        region: Region,
        partners: Mapping[int, int],
        error: Callable[[SlotPair], judge.PairError],
    ) -> list[judge.ThreeWay] | None:
        """The errors of what a region reads and that differs; None if one is not known."""
        read = [r for r in region.inputs if r in partners]
        known = self._known((r for r in read if not error(_pair(r, partners)).exact), partners)
        return known if {*region.inputs}.difference(read) <= self._parameters else None

    @functools.cached_property
    def _parameters(self) -> Set[int]:
        """Records of the reference that are parameters."""
        return {ref.record for call in self.reference.calls for ref in call.slots("param")}

    def columns(self, pair: Key, measured: Measured) -> Measured:
        """The measurement with `third_ratio` and `third_overlap` if the pair was compared with the
        third run.
        """
        three_way = self._measured.get(pair)
        if three_way is None:
            return measured
        values: dict[str, float | None] = {
            **measured.values,
            "third_ratio": three_way.ratio,
            "third_overlap": three_way.overlap,
        }
        return Measured(
            measured.tier,
            measured.identical,
            values,
            measured.whys,
            measured.max_abs_index,
            measured.histogram,
            measured.why,
        )

    def summary(
        self, verdicts: Mapping[Key, Verdict], pairs: Sequence[CallPair]
    ) -> ThirdRun | None:
        """The summary for the answer; None without a third run. All outputs of all root calls
        together count as the model's output.
        """
        if self.run is None:
            return None
        ratios: list[tuple[float, str]] = []
        for (call, _), verdict in verdicts.items():
            ratio = verdict.numbers.get("third_ratio")
            if ratio is not None:
                ratios.append((ratio, self.reference.calls[call].module_name))
        roots = [
            self.of(s.reference_record, s.target_record)
            for p in pairs
            if self.reference.calls[p.reference].parent == -1
            for s in p.slots
            if is_output(s.reference_slot)
        ]
        ends = [r for r in roots if r is not None]
        size = math.hypot(*(r.third for r in ends))
        worst = max(ratios, default=(None, ""))
        return ThirdRun(
            self.run.path,
            len(ratios),
            sum(ratio < 1 for ratio, _ in ratios),
            statistics.median(ratio for ratio, _ in ratios) if ratios else None,
            worst[0],
            worst[1],
            math.hypot(*(r.reference for r in ends)) / size if size else None,
            math.hypot(*(r.target for r in ends)) / size if size else None,
            min((r.overlap for r in ends), default=None),
        )


def _pair(record: int, partners: Mapping[int, int]) -> SlotPair:
    return SlotPair("", "", record, partners[record])


class _Before:
    """The worst three-way errors before a label, by process and root. Only the order of labels is
    known, and later steps may read the results of earlier ones.
    """

    def __init__(self) -> None:
        self._worst: dict[tuple[int, str], judge.ThreeWay] = {}

    def of(self, call: Call) -> list[judge.ThreeWay]:
        """The earlier errors with the largest ratio, in a list; empty if there are none."""
        worst = self._worst.get((call.rank, call.root))
        return [worst] if worst is not None else []

    def add(self, call: Call, outputs: Sequence[judge.ThreeWay]) -> None:
        """Note the errors of a label."""
        key = call.rank, call.root
        known = [self._worst[key]] if key in self._worst else []
        self._worst[key] = max([*known, *outputs], key=lambda o: o.beyond)
