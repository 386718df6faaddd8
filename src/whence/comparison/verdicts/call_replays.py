"""Replays of paired calls: which calls are replayed, each container once for all its segments, and
the figures that came of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from whence import align, judge, metrics
from whence.comparison.options import CompareOptions
from whence.comparison.paired_runs import PairedCall, PairedRuns
from whence.comparison.prepare.masks import Bits, visible
from whence.comparison.replays.fault_cause import fault_cause
from whence.comparison.replays.formulas import Formulas
from whence.comparison.replays.replayer import Replayer, ReplayRequest
from whence.comparison.replays.reproduction import Reproduction, reproduction
from whence.comparison.replays.sampling import Sampling
from whence.comparison.replays.semantics import PLAIN, FaultCause, ReplayResult, Semantics
from whence.comparison.verdicts.declared.candidates import CallReplay
from whence.comparison.verdicts.declared.masked_rows import Keep, along_rows, error_where
from whence.comparison.verdicts.operator_forms import lone_parameters
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.parameters import Parameters
from whence.comparison.verdicts.region_evidence import RegionEvidence, RegionOutput
from whence.comparison.verdicts.repeated_runs import RepeatedRuns
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Run
from whence.records.region import outwards
from whence.records.slots import input_name, param_name
from whence.results import CauseKind, SlotPair, Verdict, VerdictKind

_PASSES = frozenset((
    VerdictKind.NOISE, VerdictKind.INHERITED, VerdictKind.AMPLIFIED, VerdictKind.PRECISION,
))  # fmt: skip


class CallReplays:
    """Replays calls on the target's inputs, and keeps the figures for the summary.

    replayer: None if replay is switched off. figures: errors of all replays, by call and output
    slot. inside: by call, how many calls without a partner ran as part of it. not_replayed: calls
    of which at least one output was not replayed. widened: (root, scope) of modules that are
    replayed in every step. padded: knows the rows of padding that no other row reads.
    """

    def __init__(
        self,
        errors: PairErrors,
        parameters: Parameters,
        options: CompareOptions,
        repeated: RepeatedRuns,
    ) -> None:
        self.errors, self.paired, self._parameters = errors, errors.paired, parameters
        paired = self.paired
        self.replayer = None
        if options.replay:
            self.replayer = Replayer(
                paired.reference,
                paired.target,
                paired=paired.pair_of,
                inner=paired.inner_parameter,
                pair_of=lambda call, slot: paired.replayed(paired.pair_of[call.id], slot),
                allow=options.allow,
                spread=repeated.elementwise,
                model=options.model,
                beside=paired.left_out.calls,
            )
        self.padded = PaddedRows(paired)
        self.formulas = Formulas(self.replayer.sides) if self.replayer is not None else None
        self.sampling = Sampling(
            align.selected(paired.calls), everything=options.sample == "all", budget=options.budget
        )
        self.figures: dict[int, dict[str, judge.ReplayError]] = {}
        self.inside: dict[int, int] = {}
        self.not_replayed: set[int] = set()
        self.widened: set[tuple[str, str]] = set()
        self._postponed: dict[int, int] = {}
        self._containers: dict[int, ReplayResult] = {}

    def reason_to_postpone(self, evidence: RegionEvidence) -> str:
        """Why this region's call is not replayed for now, "" if it is replayed."""
        call = evidence.pair.call
        if call.id in self._containers:
            return ""
        growth = evidence.growth
        stands_out = (
            growth.growth > judge.LIMITS.amplified
            or growth.by > 1
            or not np.isfinite(growth.e_out)
            or growth.verdict == VerdictKind.UNDETERMINED
            or (call.root, call.scope) in self.widened
        )
        reason = self.sampling.reason(call, stands_out=stands_out)
        if reason:
            self.not_replayed.add(call.id)
            self._postponed[call.id] = evidence.pair.index
        elif call.leaf:  # of a container another segment may have been postponed
            self.not_replayed.discard(call.id)
        return reason

    def widen(self, guilty: Collection[int]) -> list[int]:
        """From now on replay the modules of these guilty calls in every step. Returns the indices
        of pairs that were postponed and are to be judged again.
        """
        calls = self.paired.calls
        self.widened = {(calls[call].root, calls[call].scope) for call in guilty}
        return [
            index
            for call, index in self._postponed.items()
            if (calls[call].root, calls[call].scope) in self.widened
        ]

    def replay(self, pair: PairedCall) -> ReplayResult:
        """The replay of a call: errors of all outputs that its program computes."""
        assert self.replayer is not None
        call, declared = pair.call, self.errors.declared
        replaying = self.of(pair)
        semantics = declared.masked.semantics(call, pair.partner)
        result = replaying.figures(semantics)
        if not result.local and (alone := self._of_reference_alone(pair)):
            result = replaying.figures(dataclasses.replace(semantics, params=alone))
        if not call.leaf:
            result = declared.containers.replayed(result, pair, replaying)
        if self._is_surprising(pair.index, result):
            result = self.replayer.examined(call, result)
            if not result.local and self.replayer.instead(call, result.why):
                return self.replay(pair)
        if not result.local:
            return result
        if semantics is PLAIN:
            self._leave_padding_out(pair, replaying, result)
        self.figures[call.id] = {
            slot: figures for slot, figures in result.local.items() if not figures.whole
        }
        if result.inside:
            self.inside[call.id] = len(self.paired.alone(call.id))
        return result

    def _of_reference_alone(self, pair: PairedCall) -> dict[str, Array]:
        """The reference's values (float64, by slot) of parameters that the target's call lacks. A
        replay with them shows whether something else in the target makes up for them.
        """
        named, reference = self.paired.plan.pairs[pair.index], self.paired.reference
        if not lone_parameters(named, self.paired):
            return {}
        records = {r.slot: r.record for r in pair.call.slots("param")}
        slots = (slot for slot in named.only_reference if slot in records)
        return {slot: reference.array(records[slot]).astype(np.float64) for slot in slots}

    def _leave_padding_out(
        self, pair: PairedCall, replaying: CallReplay, result: ReplayResult
    ) -> None:
        """If flagged outputs are right in all rows but padding, use the errors of these rows."""
        flagged = [slot for slot, error in result.local.items() if error.score > 1]
        semantics = self.padded.semantics(pair) if flagged else None
        if semantics is None:
            return
        read = replaying.figures(semantics).local
        if all(slot in read and read[slot].score <= 1 for slot in flagged):
            self.padded.excuse(pair)
            result.local.update({slot: read[slot] for slot in flagged})

    def growth_where_read(
        self, evidence: RegionEvidence, outputs: Sequence[RegionOutput]
    ) -> judge.ErrorGrowth | None:
        """The error growth over the rows that are not padding; None if no row is padding, or if
        these rows too have an introduced error.
        """
        read = [self.padded.error(evidence.pair, output.slot) for output in outputs]
        if not any(read):
            return None
        errors = [error or output.error for error, output in zip(read, outputs, strict=True)]
        growth = judge.grow(evidence.leaf.inputs, errors, evidence.leaf.u)
        if growth.verdict == VerdictKind.INTRODUCED:
            return None
        self.padded.excuse(evidence.pair)
        return growth

    def own_operators(self, pair: PairedCall) -> ReplayResult:
        """The replay of a container's own operators, once for all its segments."""
        call = pair.call.id
        if call not in self._containers:
            self._containers[call] = self.replay(pair)
        return self._containers[call]

    def of(self, pair: PairedCall) -> CallReplay:
        """The functions that replay one call: its figures under given semantics, the cause of
        flagged outputs, and the wide result of a program.
        """
        replayer = self.replayer
        assert replayer is not None
        slot_of = functools.partial(self.paired.replayed, pair.index)
        given = self._parameters.given(pair.call, self.paired.slots[pair.index])

        def figures(semantics: Semantics) -> ReplayResult:
            result = replayer.figures(
                ReplayRequest(
                    pair.call,
                    pair.partner,
                    slot_of,
                    given,
                    lambda slot, needs: self.paired.all_same(pair.index, (slot, *needs)),
                    semantics,
                )
            )
            if result.refused and pair.call.leaf and not semantics.name:
                self.not_replayed.add(pair.call.id)
            return result

        return CallReplay(
            figures,
            lambda flagged: (
                fault_cause(replayer.sides, pair.call, pair.partner, slot_of, flagged).cause
            ),
            lambda program: replayer.wide(program, slot_of),
        )

    def verdict(
        self,
        evidence: RegionEvidence,
        figures: Sequence[tuple[str, judge.ReplayError]],
        broken: float,
    ) -> Verdict:
        """The verdict that follows from the replay errors of a region's outputs, with the cause of
        an introduced error.
        """
        leaf = evidence.leaf.replace(local=figures, broken=broken)
        verdict = judge.judge_leaf(leaf)
        if verdict.verdict in _PASSES:
            if self.errors.declared.containers.accounts_for(evidence.pair):
                return verdict
            return self._unless_other_formula(evidence.pair, verdict, [s for s, _ in figures])
        if verdict.verdict != VerdictKind.INTRODUCED or verdict.side == "reference":
            return verdict
        flagged = [slot for slot, error in figures if error.score > 1]
        if names := self._differing_parameters_behind(evidence.pair, flagged):
            verb = "differs" if len(names) == 1 else "differ"
            words = f"inherited: {', '.join(map(param_name, names))} {verb} between the runs"
            return verdict.withdrawn(VerdictKind.INHERITED, words)
        fault = self.cause(evidence.pair, flagged)
        is_own = fault.cause == CauseKind.SEMANTIC
        again = Reproduction()
        is_finite = all(np.isfinite(error.score) for _, error in figures)
        if fault.cause != CauseKind.KERNEL and is_finite:
            again = self.reproduction(evidence.pair, flagged, is_own=is_own)
        if again.withdrawn:
            words = verdict.sentence.removeprefix("introduced here: ")
            return verdict.withdrawn(VerdictKind.PRECISION, f"{words}; {again.withdrawn}")
        if again.cast:
            fault = FaultCause(fault.cause, again.cast, source=fault.source, reason=again.cast)
        leaf = leaf.replace(cause=CauseKind(fault.cause), cause_words=fault.words)
        return judge.judge_leaf(leaf).replace(
            operator=fault.operator, source=fault.source, reason=fault.reason
        )

    def reproduction(
        self, pair: PairedCall, flagged: Sequence[str], *, is_own: bool
    ) -> Reproduction:
        """Whether a script that reproduces this finding would fail."""
        assert self.replayer is not None
        slot_of = functools.partial(self.paired.replayed, pair.index)
        sides, calls = self.replayer.sides, (pair.call, pair.partner)
        return reproduction(sides, *calls, slot_of, flagged, is_own=is_own)

    def _differing_parameters_behind(self, pair: PairedCall, flagged: Sequence[str]) -> list[str]:
        """The slots of differing parameters, if the reference's program gives the target's flagged
        outputs once it runs with the target's values of them; else empty.
        """
        slots = self.paired.slots[pair.index]
        parameters = self._parameters.by_role(pair.call, slots)[2]
        values: dict[str, Array] = {}
        for name, difference in parameters:
            arrays = self.paired.arrays(slots[name]) if difference.differs else None
            if arrays is not None and arrays[0].shape == arrays[1].shape:
                values[name] = arrays[1].astype(np.float64)
        if not values:
            return []
        local = self.of(pair).figures(Semantics(params=values)).local
        explained = all(slot in local and local[slot].score <= 1 for slot in flagged)
        return list(values) if explained else []

    def _unless_other_formula(
        self, pair: PairedCall, verdict: Verdict, outputs: Sequence[str]
    ) -> Verdict:
        """The verdict, or `introduced` if the target's program computes another formula whose
        results differ by less than its rounding.
        """
        assert self.formulas is not None
        semantics = self.errors.declared.masked.semantics(pair.call, pair.partner)
        slot_of = functools.partial(self.paired.replayed, pair.index)
        keep = semantics.keep or self.padded.keep(pair)
        difference = self.formulas.difference(pair.call, pair.partner, slot_of, outputs, keep)
        if difference is None:
            return verdict
        fault = self.cause(pair, [difference.slot])
        if fault.cause != CauseKind.SEMANTIC:
            return verdict
        return judge.of_formula(verdict, difference, fault.words).replace(
            operator=fault.operator, source=fault.source, reason=fault.reason
        )

    def cause(self, pair: PairedCall, flagged: Sequence[str], own_limit: float = 1.0) -> FaultCause:
        """Why these outputs of a call are wrong. own_limit: see `fault_cause`."""
        assert self.replayer is not None
        slot_of = functools.partial(self.paired.replayed, pair.index)
        return fault_cause(
            self.replayer.sides, pair.call, pair.partner, slot_of, flagged, own_limit
        )

    def _is_surprising(self, index: int, result: ReplayResult) -> bool:
        """Whether a replay result is surprising enough that the program must first be checked
        against the reference's own outputs.
        """
        for name, local in result.local.items():
            if local.score > 1 or (local.reference_rel or 0.0) > judge.LIMITS.growth * max(
                local.floor_rel, local.u
            ):
                return True
            slot = self.paired.slot(index, name)
            if slot is not None and (self.errors.of(slot).value or 0.0) > judge.LIMITS.growth * (
                (local.inherited_rel or 0.0) + local.floor_rel + 2 * local.u
            ):
                return True
        return False


# Ignores attention rows of fully masked queries: their value is undefined and no other row reads
# them.
#
# Fused attention gives zeros there, written-out attention the mean of all values, another nothing
# finite. All are right, since no output at a real position depends on them. They are left out
# only where both runs have the same mask, and only of outputs that everywhere else are what
# rounding explains.


class PaddedRows:
    """Knows which rows (batch, position) of tensors are read and which are padding, and keeps the
    calls that differ in padding only.
    """

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        self._read: dict[int, Bits | None] = {}
        self._excused: dict[int, Bits] = {}

    def semantics(self, pair: PairedCall) -> Semantics | None:
        """Semantics that compare only the rows that are read; None if all rows are read."""
        read = self._rows(pair)
        if read is None:
            return None

        def keep(_slot: str, shape: tuple[int, ...]) -> np.ndarray | None:
            return along_rows(read, shape)

        return Semantics(keep=keep)

    def error(self, pair: PairedCall, slot: SlotPair) -> judge.PairError | None:
        """The error of a pair of tensors over the rows that are read; None if all rows are read, or
        if elements are missing or do not match in shape.
        """
        read = self._rows(pair)
        arrays = self._paired.arrays_of_one_shape(slot) if read is not None else None
        if read is None or arrays is None:
            return None
        keep = along_rows(read, arrays[0].shape)
        if keep is None:
            return None
        records = self._paired.records(slot)
        return error_where(keep, arrays, records, metrics.measure, judge.roundoff(*records))

    def excuse(self, pair: PairedCall) -> None:
        """Take note of a call that differs in no row that is read."""
        read = self._rows(pair)
        if read is not None:
            self._excused[pair.call.id] = read

    def keep(self, pair: PairedCall) -> Keep | None:
        """Selects the elements that count in an excused call; None if all elements count."""
        excused = pair.call.id in self._excused
        semantics = self.semantics(pair) if excused else None
        return semantics.keep if semantics is not None else None

    def notes(self) -> list[str]:
        """A sentence for each kind of module that differs in padding."""
        places: dict[str, list[int]] = defaultdict(list)
        for call in self._excused:
            reference = self._paired.calls[call]
            places[align.starred(reference.module_name)].append(call)
        out = []
        for name, calls in places.items():
            read = self._excused[calls[0]]
            share = f"{np.count_nonzero(~read)} of {read.size} positions"
            out.append(f"{name}: padding ({share}) differs and is left out: the mask hides it")
        return out

    def _rows(self, pair: PairedCall) -> Bits | None:
        call = pair.call
        if call.id not in self._read:
            read = _read_rows(self._paired.reference, call)
            read_in_target = (
                _read_rows(self._paired.target, pair.partner) if read is not None else None
            )
            same = (
                read is not None
                and read_in_target is not None
                and np.array_equal(read, read_in_target)
            )
            self._read[call.id] = read if same else None
        return self._read[call.id]


def _read_rows(run: Run, call: Call) -> Bits | None:
    """Boolean (batch, position), True for rows that are read, from the masks among the inputs of
    the call and of those around it. None if all rows are read or no mask tells.
    """
    for around in outwards(run.calls, call.id):
        for ref in around.slots("input"):
            if "mask" in input_name(ref.slot) and len(run.records[ref.record].shape) == 4:
                try:
                    seen = visible(run.array(ref.record))
                except ElementsMissing:
                    continue
                if seen is not None:
                    return _by_query(seen)
        if around.parent < 0:
            return align.real_positions(run, around)
    return None


def _by_query(seen: Bits) -> Bits | None:
    """Boolean (batch, query), True for rows that are read, from (batch, heads, query, key); None if
    all are read or the mask is ambiguous.

    A query that sees no key is padding only if no query sees its own key either. Otherwise True may
    mean "masked" in this mask, and such a query sees every key.
    """
    rows, columns = np.array(seen.any(axis=(1, 3))), np.array(seen.any(axis=(1, 2)))
    queries, keys = rows.shape[1], columns.shape[1]
    if queries < 2 or queries > keys or rows.all() or not rows.any():
        return None
    # Keys at the end that no query of the batch sees are free room in a cache.
    has_room = not columns[:, -1].any()
    first = 0 if has_room else keys - queries
    own_keys = columns[:, first : first + queries]
    return None if bool((~rows & own_keys).any()) else rows
