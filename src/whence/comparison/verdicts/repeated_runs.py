"""The stage for further runs of the reference (A/A): a difference that also occurs between runs of
the reference is no fault of the target.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from whence import align, judge, metrics
from whence.comparison.options import CompareOptions
from whence.comparison.replays.replayer import Replayer, ReplayRequest
from whence.comparison.replays.user_model import Models
from whence.comparison.tasks import measuring
from whence.comparison.verdicts.extra_runs import asked_the_same, partner_records
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Region, Run
from whence.results import CallPair, Evidence, Measured, Repetition, SlotPair, Verdict, VerdictKind

_NAMED = 20
Key = tuple[int, int]
Tell = Callable[[int, int, str], None]  # done, of, what


class RepeatedRuns:
    """Compares the reference with further runs of it (`runs`): how much each record differs, and
    which regions are nondeterministic.

    Without further runs, everything is empty and no verdict changes. Raises UsageError if a run is
    no repetition (`asked_the_same`). Tensors are read one pair at a time.
    """

    def __init__(
        self,
        reference: Run,
        runs: Sequence[Run],
        *,
        allow: Sequence[str] = (),
        model: Models | None = None,
        threads: int | None = None,
        tell: Tell = lambda *_: None,
    ) -> None:
        self.reference, self.runs, self._tell = reference, runs, tell
        self.allow, self.model = allow, model
        self.notes: list[str] = []
        self.largest: dict[
            int, float
        ] = {}  # by record of the reference: relative 2-norm, 1 for an exact kind
        self._flips: dict[int, int] = {}
        self._partners: list[dict[int, int]] = []
        self._errors: list[dict[int, float]] = []  # by run: records that are not bitwise equal
        self._pairs: list[dict[int, CallPair]] = []
        self._replayers: dict[int, Replayer] = {}
        self._unrepeated: dict[
            int, list[int]
        ] = {}  # records that part although what they were made from did not, and in which runs
        self._regions: dict[Key, float] = {}
        for run in runs:
            self._add(run, threads)

    # ---- measure

    def _add(self, run: Run, threads: int | None) -> None:
        plan = align.plan(self.reference, run)
        until, notes = asked_the_same(
            self.reference, run, plan, "--again", functools.partial(self._equal, run)
        )
        partners = partner_records(self.reference, plan, until)
        self.notes += notes
        errors: dict[int, float] = {}
        unmeasured: list[str] = []
        for (a, b), measured in self._measured(run, partners, threads):
            reference, target = self.reference.records[a], run.records[b]
            u = max(judge.unit_roundoff(reference.dtype), judge.unit_roundoff(target.dtype))
            error = judge.error_of(measured, reference, target, u)
            if error.exact:
                continue
            if error.value is None or not np.isfinite(error.value):
                # Without a finite spread nothing is explained: the target is judged here as if
                # there were no further runs.
                unmeasured.append(error.why or measured.why or "NaN or Inf in one of the two")
                errors[a] = 0.0
                continue
            errors[a] = error.value
            self.largest[a] = max(self.largest.get(a, 0.0), error.value)
            if u == 0.0:
                self._flips[a] = max(self._flips.get(a, 0), judge.flips(measured, reference.count))
        if unmeasured:
            self.notes.append(
                f"--again {run.path}: {len(unmeasured)} tensors without a spread; the first: "
                f"{unmeasured[0]}"
            )
        self.notes += [
            f"--again {run.path} under another condition: {d}"
            for d in align.differences(self.reference, run)
        ]
        self._pairs.append({pair.reference: pair for pair in plan.pairs})
        self._partners.append(partners)
        self._errors.append(errors)

    def _measured(
        self, run: Run, partners: Mapping[int, int], threads: int | None
    ) -> Iterator[tuple[Key, Measured]]:
        differing: list[Key] = []
        for key in partners.items():
            a, b = self.reference.records[key[0]], run.records[key[1]]
            if a.shape != b.shape:
                yield key, Measured("none", False, why=f"shape {a.shape} against {b.shape}")
            elif not a.hash or (a.hash, a.dtype) != (b.hash, b.dtype):
                differing.append(key)
        options = CompareOptions(tier="core", threads=threads)
        runs = self.reference, run
        yield from measuring.measure(runs, differing, options, self._tell).items()

    def _equal(self, run: Run, slot: SlotPair) -> bool:
        """Whether both records are bitwise equal; True if neither hashes nor elements are known."""
        a, b = self.reference.records[slot.reference_record], run.records[slot.target_record]
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.hash and b.hash:
            return a.hash == b.hash
        try:
            return metrics.measure(
                self.reference.array(a.id), run.array(b.id), tier="same"
            ).identical
        except ElementsMissing:
            return True

    # ---- results for other stages

    def spread(self, record: int, measured: Measured) -> float:
        """The run-to-run spread of a record of the reference (relative 2-norm, 1 for an exact
        dtype), 0 if there is none. measured: the same record against the target.

        For an exact dtype it is 0 if more than `LIMITS.spread` times as many elements differ in the
        target as between runs of the reference.
        """
        spread = self.largest.get(record, 0.0)
        if spread and record in self._flips:
            count = self.reference.records[record].count
            return (
                spread
                if judge.flips(measured, count) <= judge.LIMITS.spread * self._flips[record]
                else 0.0
            )
        return spread

    def find(self, regions: Iterable[Region]) -> None:
        """Find the nondeterministic regions: their inputs are bitwise equal in a further run, an
        output is not.
        """
        for region in regions:
            for number, (partners, errors) in enumerate(zip(self._partners, self._errors)):
                if not all(r in partners and r not in errors for r in region.inputs):
                    continue
                for record in region.outputs:
                    if errors.get(record):
                        self._unrepeated.setdefault(record, []).append(number)
                        key = region.call, region.stretch
                        self._regions[key] = max(self._regions.get(key, 0.0), errors[record])

    def elementwise(self, record: int) -> Array | None:
        """How much each element of an output differs between runs with equal inputs of its region;
        None if it does not differ.
        """
        if record not in self._unrepeated:
            return None
        try:
            repetitions = (
                self.runs[k].array(self._partners[k][record]) for k in self._unrepeated[record]
            )
            return judge.elementwise(self.reference.array(record), repetitions)
        except ElementsMissing:
            return None

    def explained(
        self, verdicts: Mapping[Key, Verdict], figures: Iterable[tuple[int, judge.ReplayError]]
    ) -> dict[Key, Verdict]:
        """The verdicts, `nondeterministic` if the spread explains them. figures: (call, figures) of
        replays on the target's inputs.
        """
        out = dict(verdicts)
        for key, spread in self._regions.items():
            if key in out:
                out[key] = judge.explain(out[key], spread)
        if not self.runs:
            return out
        by_call: dict[int, list[judge.ReplayError]] = {}
        for call, local in figures:
            by_call.setdefault(call, []).append(local)
        for key, verdict in verdicts.items():
            if (
                key[1] < 0
                and verdict.evidence == Evidence.REPLAY
                and verdict.verdict in (VerdictKind.INTRODUCED, VerdictKind.PRECISION)
            ):
                out[key] = self._repetition(
                    self.reference.calls[key[0]], verdict, by_call.get(key[0], ())
                )
        return out

    def _repetition(
        self, call: Call, verdict: Verdict, target: Sequence[judge.ReplayError]
    ) -> Verdict:
        """The verdict, `nondeterministic` if a further run, replayed on its own differing inputs,
        has errors as large as the target's.
        """
        for number, run in enumerate(self.runs):
            errors, pair = self._errors[number], self._pairs[number].get(call.id)
            if pair is None or not any(r.record in errors for r in call.slots("input")):
                continue
            slots = {s.reference_slot: s for s in pair.slots}
            replayer = self._replayers.setdefault(
                number, Replayer(self.reference, run, allow=self.allow, model=self.model)
            )
            # The replay uses the further run's own parameters, which training may have changed.
            initial = dict.fromkeys(slots, False)
            partner = run.calls[pair.target]
            local = replayer.figures(
                ReplayRequest(call, partner, slots.get, initial, lambda *_: False)
            ).local
            if len(local) == len(target):
                repeated = judge.repeated(verdict, list(zip(target, local.values())))
                if repeated.verdict != verdict.verdict:
                    return repeated
        return verdict

    def summary(self) -> Repetition | None:
        """The summary for the answer; None without further runs."""
        if not self.runs:
            return None
        order = sorted(
            self._regions,
            key=lambda key: (
                self.reference.calls[key[0]].step,
                self.reference.calls[key[0]].order,
                key[1],
            ),
        )
        calls = [self.reference.calls[call] for call in dict.fromkeys(key[0] for key in order)]
        names = dict(itertools.islice({c.module_name: c.op_type for c in calls}.items(), _NAMED))
        return Repetition(
            tuple(run.path for run in self.runs),
            len(calls),
            tuple(names),
            tuple(names.values()),
            max(self._regions.values(), default=0.0),
            max(self.largest.values(), default=0.0),
        )
