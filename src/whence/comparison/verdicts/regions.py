"""A verdict for every region: exact, then the replay of its program on the target's inputs, then
growth between two dumps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from whence import align, judge
from whence.comparison.inputs.positions_masks import PositionsAndMasks
from whence.comparison.programs.programs import PLACED
from whence.comparison.replays.fault_cause import fault_cause
from whence.comparison.replays.replayer import Replayer, ReplayRequest
from whence.comparison.replays.sampling import Sampling
from whence.comparison.replays.semantics import ReplayResult, Semantics
from whence.comparison.verdicts.declared import CallReplay
from whence.comparison.verdicts.indices import Indices
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.parameters import Parameters
from whence.comparison.verdicts.repeated_runs import RepeatedRuns
from whence.comparison.verdicts.sparse_target import SparseTargetJudge
from whence.comparison.verdicts.unseen_inputs import UnseenInputs
from whence.readers import GATHERED
from whence.records import Call, Region, marks
from whence.records.slots import (
    is_input,
    is_of_child,
    is_param,
    is_written,
    param_name,
    slot_kind,
    split_child,
)
from whence.results import (
    GUILTY,
    CallPair,
    CauseKind,
    Confidence,
    Evidence,
    SlotPair,
    Verdict,
    VerdictKind,
    severity,
)

if TYPE_CHECKING:
    from whence.comparison.options import CompareOptions

_FEW_OPERATORS = 12  # of a program that is one layer and no network
_FEW_HIDDEN = 2  # calls that show nothing and are judged as one operator with what they lead to


class RegionJudge:
    """Judges the regions of a comparison in the order of execution.

    first: by record of the reference, the target's that it was first seen with. locals: figures of
    every replay, by call and output slot. inside: by call, how many calls without a partner ran as
    part of it. not_replayed: calls of which something was not.
    """

    def __init__(
        self,
        errors: PairErrors,
        regions: Sequence[Region],
        options: CompareOptions,
        again: RepeatedRuns,
        otherwise: PositionsAndMasks,
        tell: Callable[[int, int, str], None],
    ) -> None:
        self.paired = paired = errors.paired
        self.errors, self.regions, self._otherwise, self._tell = errors, regions, otherwise, tell
        self.parameters = Parameters(paired)
        self.first: dict[int, int] = {}
        self.locals: dict[int, dict[str, judge.ReplayError]] = {}
        self.quick: set[int] = set()
        self.worst = self._worst_by_step()
        self.blind = UnseenInputs(errors)
        self.indices = Indices(errors)
        self.inside: dict[int, int] = {}
        self.replayer = None
        if options.replay:
            self.replayer = Replayer(
                paired.reference,
                paired.target,
                paired=paired.pair_of,
                inner=paired.inner_parameter,
                shown=lambda call, slot: paired.slot(paired.pair_of[call.id], slot),
                allow=options.allow,
                spread=again.elementwise,
                model=options.model,
            )
        self.tapped = SparseTargetJudge(errors, regions, self.replayer)
        self.between: dict[int, ReplayResult] = {}
        # By call, the first segment that another choice gave other rows.
        self.misrouted_at: dict[int, int] = {}
        self.seen_errors: dict[int, list[judge.PairError]] = {}
        self.not_replayed: set[int] = set()
        self.postponed: dict[int, int] = {}
        self.widened: set[tuple[str, str]] = set()
        self.sampling = Sampling(
            align.selected(paired.calls), everything=options.sample == "all", budget=options.budget
        )

    def verdicts(self) -> dict[tuple[int, int], Verdict]:
        """A verdict for every region whose call has a partner, by (reference call, stretch)."""
        verdicts = self.tapped.verdicts()
        for label, index in self.tapped.labels.items():
            verdicts[label, -1] = self._unless_partial(
                verdicts[label, -1], self.paired.slots[index].values()
            )
            for slot in self.paired.slots[index].values():
                self.first.setdefault(slot.reference_record, slot.target_record)
        self.inside |= self.tapped.inside()
        self.not_replayed |= self.tapped.not_replayed
        paired_regions = [
            (region, self.paired.pair_of[region.call])
            for region in self.regions
            if region.call in self.paired.pair_of and region.call not in self.tapped.calls
        ]

        # All calls of one module together: its parameters are converted once. The order within a
        # module stays.
        def order(item: tuple[Region, int]) -> tuple[bool, str]:
            call = self.paired.calls[item[0].call]
            return not self.sampling.first(call), call.scope

        leaves = sorted((item for item in paired_regions if item[0].stretch < 0), key=order)
        for done, (region, index) in enumerate(leaves):
            self._tell(done + 1, len(leaves), "judging")
            verdict = self._leaf(index, self.paired.plan.pairs[index])
            verdicts[region.call, -1] = self._unless_partial(
                verdict, self.paired.slots[index].values()
            )
        self._widen(verdicts)
        for region, index in paired_regions:
            pair = self.paired.plan.pairs[index]
            if region.stretch < 0:
                for slot in self.paired.slots[index].values():
                    if slot.reference_slot.startswith(("input", "output", "mutated")):
                        self.first.setdefault(slot.reference_record, slot.target_record)
            else:
                between = self._stretch(index, pair, region)
                call, other = (
                    self.paired.calls[pair.reference],
                    self.paired.target.calls[pair.target],
                )
                between = self.errors.declaring.stretch(
                    between, call, other, list(self.paired.slots[index].values())
                )
                if between is not None:
                    between = self._where_it_comes_in(between, region)
                    verdicts[region.call, region.stretch] = self._unless_partial(
                        between, self.paired.slots[index].values()
                    )
        self._after_ties(verdicts)
        self._second_look(verdicts)
        return verdicts

    def _worst_by_step(self) -> dict[int, float]:
        """The largest error of any output, by step."""
        worst: dict[int, float] = {}
        for pair, slots in zip(self.paired.plan.pairs, self.paired.slots):
            step = self.paired.calls[pair.reference].step
            for slot in slots.values():
                if (
                    is_written(slot.reference_slot)
                    and not self.paired.measured[
                        slot.reference_record, slot.target_record
                    ].identical
                ):
                    worst[step] = max(worst.get(step, 0.0), self.errors.of(slot).value or 0.0)
        return worst

    def _after_ties(self, verdicts: dict[tuple[int, int], Verdict]) -> None:
        """What two dumps prove of calls behind a choice that ties decided."""
        tied = [key for key, verdict in verdicts.items() if "tied_rows" in verdict.numbers]
        kids = self.paired.kids
        places = [
            kids[call][stretch] if 0 <= stretch < len(kids.get(call, ())) else call
            for call, stretch in tied
        ]
        if places:
            self.indices.after_ties(verdicts, min(places))

    def _second_look(self, verdicts: dict[tuple[int, int], Verdict]) -> None:
        """When nothing is flagged by itself: weak evidence that points the same way at all
        siblings.
        """
        if any(v.verdict in GUILTY for v in verdicts.values()):
            return
        pooled = self._pooled()
        spared = {
            call
            for call in self.quick
            if any(self._group(call, slot) in pooled for slot in self.locals[call])
        }
        for call in sorted(spared):
            # The working replay was spared: what rounds inside has patterns that only it knows.
            pair = self.paired.plan.pairs[self.paired.pair_of[call]]
            given = self.parameters.given(
                self.paired.calls[call], self.paired.slots[self.paired.pair_of[call]]
            )
            self._replayed(
                self.paired.pair_of[call],
                self.paired.calls[call],
                self.paired.target.calls[pair.target],
                given,
                thorough=True,
            )
        if spared:
            pooled = self._pooled()
        for (call, stretch), verdict in verdicts.items():
            found = pooled.get(
                (
                    align.starred(self.paired.calls[call].scope),
                    self.paired.calls[call].op_type,
                    stretch,
                )
            )
            if found is not None and verdict.evidence == Evidence.REPLAY:
                verdicts[call, stretch] = verdict.replace(
                    verdict=VerdictKind.INTRODUCED,
                    confidence=Confidence.LIKELY,
                    score=found.z / judge.LIMITS.pooled,
                    sentence=f"introduced here: {found.sentence}",
                )

    def _pooled(self) -> dict[Any, judge.PooledEvidence]:
        return judge.pool(
            (self._group(call, slot), local)
            for call, found in self.locals.items()
            for slot, local in found.items()
        )

    def _group(self, call: int, slot: str) -> tuple[str, str, int]:
        """What a call's output is a sibling of: names with their numbers starred, and the stretch
        that made it.
        """
        stretch = (
            -1
            if self.paired.calls[call].leaf
            else split_child(slot)[0]
            if is_of_child(slot)
            else len(self.paired.kids.get(call, ()))
        )
        return (
            align.starred(self.paired.calls[call].scope),
            self.paired.calls[call].op_type,
            stretch,
        )

    def _leaf(self, index: int, pair: CallPair) -> Verdict:
        call, other = self.paired.calls[pair.reference], self.paired.target.calls[pair.target]
        slots = self.paired.slots[index]
        given = self.parameters.given(call, slots)
        if slots and all(
            self.paired.measured[s.reference_record, s.target_record].identical
            for s in slots.values()
        ):
            return Verdict(
                index, VerdictKind.IDENTICAL, evidence=Evidence.TWO_DUMPS, sentence="bitwise equal"
            )
        inputs, outputs, parameters = self._sorted(call, slots)
        in_errors = [self.errors.of(s) for s in inputs]
        if call.id in self.blind.before:
            in_errors.append(self.blind.before[call.id])
        out_errors = [self.errors.of(s) for s in outputs]
        if any(e.codes for e in in_errors):
            out_errors = [
                self.errors.accumulated(s, e) for s, e in zip(outputs, out_errors, strict=True)
            ]
        u = max((e.u for e in out_errors), default=0.0)
        if any(e.codes for e in out_errors):  # rounded from what was computed as the inputs were
            u = max([u, *(e.u for e in in_errors)])
            out_errors = [
                self.errors.rounded(s, inputs, e) for s, e in zip(outputs, out_errors, strict=True)
            ]
        if judge.grow(in_errors, out_errors, u).verdict == VerdictKind.INTRODUCED:
            in_errors[: len(inputs)] = [self.errors.below_masks(s, call) for s in inputs]
        repeats = self._repeats[self._alike(call, other)] if u else 0
        evidence = judge.LeafEvidence(
            index,
            in_errors,
            out_errors,
            u,
            parameters,
            structural=self._structural(inputs, outputs),
            repeats=repeats,
        )
        replaying = (
            self._replaying(index, call, other, given) if self.replayer is not None else None
        )
        declared, figures = self.errors.declaring.leaf(evidence, call, other, slots, replaying)
        if declared is not None:
            self.locals[call.id] = {str(i): local for i, local in enumerate(figures)}
            return self._unless_unexplained(call, slots, given, declared)
        verdict = self._judged_leaf(evidence, call, other, given, inputs, outputs)
        return self._unless_unexplained(
            call, slots, given, self._of_depth(verdict, evidence, call, outputs)
        )

    def _judged_leaf(
        self,
        evidence: judge.LeafEvidence,
        call: Call,
        other: Call,
        given: Mapping[str, bool],
        inputs: Sequence[SlotPair],
        outputs: Sequence[SlotPair],
    ) -> Verdict:
        """The verdict of a leaf by the strongest evidence there is."""
        index = evidence.pair

        def by_growth(why: str = "") -> Verdict:
            verdict = judge.judge_leaf(_but(evidence, no_replay=why))
            return self.indices.judged(
                verdict, call, inputs, [(s.reference_slot, s) for s in outputs]
            )

        first = judge.judge_leaf(evidence)
        if self.replayer is None:
            first = judge.judge_leaf(evidence := self._doubting(evidence, call))
        if (
            first.verdict in (VerdictKind.IDENTICAL, VerdictKind.STRUCTURAL)
            or self.replayer is None
        ):
            return by_growth()
        reason = self._postponed(
            call, index, judge.grow(evidence.inputs, evidence.outputs, evidence.u)
        )
        if reason:
            return by_growth(reason)
        found = self._replayed(index, call, other, given)
        if not found.local:
            evidence = self._doubting(evidence, call)
            return by_growth(found.why)
        return self._with_cause(
            _but(evidence, local=list(found.local.items()), broken=found.broken), call, other
        )

    def _of_depth(
        self,
        verdict: Verdict,
        evidence: judge.LeafEvidence,
        call: Call,
        outputs: Sequence[SlotPair],
    ) -> Verdict:
        """The verdict, for a call that may be a whole network by what rounding makes at unknown
        depth.
        """
        if verdict.cause or not outputs or not self._may_be_a_network(call):
            return verdict
        growth = judge.grow(evidence.inputs, evidence.outputs, evidence.u)
        before = evidence.inputs or None
        return judge.judge_unseen(
            verdict, growth, evidence.u, before, lambda: self.errors.sight(outputs)
        )

    def _may_be_a_network(self, call: Call) -> bool:
        """Does nothing tell how many operators this leaf is?"""
        if call.kind == "label" or (call.notes and call.notes[0].endswith("inside not seen")):
            return True
        if call.kind != "module" or call.parent != -1 or GATHERED in call.notes:
            return False
        program = self.paired.reference.programs.get(call.program)
        return program is None or len(program.operations) > _FEW_OPERATORS

    def _doubting(self, evidence: judge.LeafEvidence, call: Call) -> judge.LeafEvidence:
        """The evidence of a call that was not replayed, whose inputs are no more than likely: it
        may depend on all that was made before.

        A program that is not the one that ran (exported before passes) has other operators around;
        types and order alone then tell who reads what, and where they err, a call in the middle of
        what a fault spoilt seems to have equal inputs.
        """
        if call.id not in self.blind.ahead or PLACED not in call.notes:
            return evidence
        self.blind.calls.add(call.id)
        return _but(evidence, inputs=[*evidence.inputs, self.blind.ahead[call.id]])

    @functools.cached_property
    def _repeats(self) -> Counter[Hashable]:
        """How many calls of each kind (`_alike`) gave bitwise equal results, of calls that were
        printed or captured whole.
        """
        found: Counter[Hashable] = Counter()
        for pair, slots in zip(self.paired.plan.pairs, self.paired.slots, strict=True):
            made = [s for s in slots.values() if is_written(s.reference_slot)]
            call = self.paired.calls[pair.reference]
            if (
                call.leaf
                and made
                and all(
                    self.errors.of(s).exact
                    and self.paired.reference.records[s.reference_record].count
                    for s in made
                )
            ):
                found[self._alike(call, self.paired.target.calls[pair.target])] += 1
        return found

    def _alike(self, call: Call, other: Call) -> Hashable:
        """What calls have in common that one kernel computes: operators, and forms of all that they
        read and leave.
        """
        records = [(slot_kind(r.slot), self.paired.reference.records[r.record]) for r in call.refs]
        return call.op_type, other.op_type, tuple((kind, r.dtype, r.shape) for kind, r in records)

    def _postponed(self, call: Call, index: int, growth: judge.ErrorGrowth) -> str:
        """Why this call is not replayed now, "" when it is."""
        stands_out = (
            growth.growth > judge.LIMITS.amplified
            or growth.by > 1
            or not np.isfinite(growth.e_out)
            or growth.verdict == VerdictKind.UNDETERMINED
        )
        widened = (call.root, call.scope) in self.widened
        reason = self.sampling.reason(call, stands_out=stands_out or widened)
        if reason:
            self.not_replayed.add(call.id)
            self.postponed[call.id] = index
        elif call.leaf:  # of a container another stretch may have been postponed
            self.not_replayed.discard(call.id)
        return reason

    def _widen(self, verdicts: dict[tuple[int, int], Verdict]) -> None:
        """A module that is at fault in a step that was replayed is looked at in all."""
        guilty = (
            self.paired.calls[call]
            for (call, _), verdict in verdicts.items()
            if verdict.verdict in GUILTY
        )
        self.widened = {(call.root, call.scope) for call in guilty}
        for call, index in list(self.postponed.items()):
            if (self.paired.calls[call].root, self.paired.calls[call].scope) in self.widened:
                verdicts[call, -1] = self._leaf(index, self.paired.plan.pairs[index])

    def _replayed(
        self,
        index: int,
        call: Call,
        other: Call,
        given: Mapping[str, bool],
        *,
        thorough: bool = False,
    ) -> ReplayResult:
        """What a replay of this call finds, all its outputs together."""
        assert self.replayer is not None
        replaying = self._replaying(index, call, other, given, thorough=thorough)
        found = replaying.figures(self.errors.declaring.masking(call, other))
        if not call.leaf:
            found = self.errors.declaring.container(found, call, other, replaying)
        if self._surprising(index, found):
            found = self.replayer.examined(call, found)
            if not found.local and self.replayer.instead(call, found.why):
                return self._replayed(index, call, other, given, thorough=thorough)
        if not found.local:
            return found
        self.locals[call.id] = {
            slot: figures for slot, figures in found.local.items() if not figures.whole
        }
        (self.quick.add if found.quick else self.quick.discard)(call.id)
        if found.inside:
            self.inside[call.id] = len(self.paired.alone(call.id))
        return found

    def _surprising(self, index: int, found: ReplayResult) -> bool:
        """Is there anything that a program must be right about the reference for, before it is
        believed?
        """
        for slot, local in found.local.items():
            if local.score > 1 or (local.reference_rel or 0.0) > judge.LIMITS.growth * max(
                local.floor_rel, local.u
            ):
                return True
            pair = self.paired.slot(index, slot)
            if pair is not None and (self.errors.of(pair).value or 0.0) > judge.LIMITS.growth * (
                (local.inherited_rel or 0.0) + local.floor_rel + 2 * local.u
            ):
                return True
        return False

    def _replaying(
        self,
        index: int,
        call: Call,
        other: Call,
        given: Mapping[str, bool],
        *,
        thorough: bool = False,
    ) -> CallReplay:
        replayer = self.replayer
        assert replayer is not None

        def slot_of(slot: str) -> SlotPair | None:
            return self.paired.slot(index, slot)

        def figures(semantics: Semantics) -> ReplayResult:
            request = ReplayRequest(
                call,
                other,
                slot_of,
                given,
                lambda slot, needs: self.paired.all_same(index, (slot, *needs)),
                semantics,
                thorough,
            )
            result = replayer.figures(request)
            if result.refused and call.leaf and not semantics.name:
                self.not_replayed.add(call.id)
            return result

        return CallReplay(
            figures,
            lambda flagged: fault_cause(replayer.sides, call, other, slot_of, flagged).cause,
            lambda p: replayer.wide(p, slot_of),
        )

    def _with_cause(self, evidence: judge.LeafEvidence, call: Call, other: Call) -> Verdict:
        verdict = judge.judge_leaf(evidence)
        if (
            verdict.verdict != VerdictKind.INTRODUCED
            or verdict.side == "reference"
            or self.replayer is None
        ):
            return verdict
        flagged = [slot for slot, local in evidence.local or () if local.score > 1]
        fault = fault_cause(
            self.replayer.sides,
            call,
            other,
            lambda slot: self.paired.slot(evidence.pair, slot),
            flagged,
        )
        verdict = judge.judge_leaf(_but(evidence, cause=fault.cause, cause_words=fault.words))
        return verdict.replace(operator=fault.operator, source=fault.source)

    def _unless_unexplained(
        self, call: Call, slots: Mapping[str, SlotPair], given: Mapping[str, bool], verdict: Verdict
    ) -> Verdict:
        """The verdict, or `undetermined` when the call read a parameter that parted between steps
        by more than anything before explains.

        What changed it (backward, an optimiser) is not part of the run, so nobody can say whether
        that was rounding.
        """
        if verdict.verdict not in (VerdictKind.NOISE, VerdictKind.INHERITED, VerdictKind.AMPLIFIED):
            return verdict
        for slot, was_given in given.items():
            pair = slots[slot]
            if was_given or pair.reference_record in self.paired.made:
                continue
            error = self.errors.of(pair)
            before = max((e for step, e in self.worst.items() if step < call.step), default=0.0)
            limit = max(
                judge.LIMITS.growth * (before + 2 * error.u), judge.LIMITS.spread * error.spread
            )
            if error.value is not None and error.value > limit:
                name = param_name(slot)
                return verdict.replace(
                    verdict=VerdictKind.UNDETERMINED,
                    confidence=Confidence.NONE,
                    numbers={**verdict.numbers, "e_out": error.value},
                    sentence=f"{name} parted between steps (rel_l2 {error.value:.2g}; before, "
                    f"nothing differed by more than {before:.2g}); "
                    "what changed it, backward or an optimiser, was not captured",
                )
        return verdict

    def _where_it_comes_in(self, verdict: Verdict, region: Region) -> Verdict:
        """The verdict, naming a call instead of code between calls: the one without a partner that
        made what went wrong; below a root that no dump held, which has no code of its own, else the
        one that reads it.
        """
        kids = self.paired.kids.get(region.call, [])
        if (
            verdict.where
            or verdict.verdict != VerdictKind.INTRODUCED
            or verdict.evidence == Evidence.REPLAY
            or region.stretch >= len(kids)
        ):
            return verdict
        wrong = self.paired.slot(verdict.pair, verdict.slot) if verdict.slot else None
        for kid in reversed(kids[: region.stretch]):
            call = self.paired.calls[kid]
            if (
                wrong
                and call.leaf
                and kid not in self.paired.pair_of
                and wrong.reference_record in _written(call)
            ):
                return verdict.replace(
                    where=call.scope,
                    named=kid,
                    sentence=f"the target has no such call: {verdict.sentence}",
                )
        if GATHERED not in self.paired.calls[region.call].notes:
            return verdict
        reader = self.paired.calls[kids[region.stretch]]
        return verdict.replace(
            where=reader.scope,
            named=reader.id,
            sentence=f"comes in here, and no call of the dump made it: {verdict.sentence}",
        )

    def _unless_partial(self, verdict: Verdict, slots: Iterable[SlotPair]) -> Verdict:
        """The verdict, or `undetermined` when it says that all is well and only a part of the
        outputs was printed.
        """
        if verdict.verdict not in (VerdictKind.IDENTICAL, VerdictKind.NOISE):
            return verdict
        missing = next(
            (
                said
                for s in slots
                if not is_param(s.reference_slot) and (said := self.paired.partly(s))
            ),
            "",
        )
        if not missing:
            return verdict
        return verdict.replace(
            verdict=VerdictKind.UNDETERMINED,
            confidence=Confidence.NONE,
            score=None,
            sentence=f"{missing}; in these {verdict.sentence}",
        )

    def _counts_padding(self, call: Call, pair: CallPair, slot: SlotPair) -> bool:
        return self._otherwise.counts_padding(call, self.paired.target.calls[pair.target], slot)

    def _misrouted(self, index: int, region: Region, slot: str, words: str) -> Verdict:
        """A call inside that is given other rows than the reference's operators give it. One choice
        moves them all: the first says so.
        """
        if self.misrouted_at.setdefault(region.call, region.stretch) != region.stretch:
            return Verdict(
                index,
                VerdictKind.INHERITED,
                region.stretch,
                Evidence.REPLAY,
                Confidence.CERTAIN,
                slot=slot,
                sentence=f"inherited: {slot} has {words}",
            )
        sentence = f"introduced here: {slot} has {words}"
        return Verdict(
            index,
            VerdictKind.STRUCTURAL,
            region.stretch,
            Evidence.REPLAY,
            Confidence.CERTAIN,
            cause=CauseKind.STRUCTURAL,
            slot=slot,
            sentence=sentence,
        )

    def _stretch(self, index: int, pair: CallPair, region: Region) -> Verdict | None:
        """A container's own operators between two children: what the next child reads, or it
        returns, against all it could see.
        """
        call = self.paired.calls[region.call]
        kids = self.paired.kids.get(region.call, [])
        outputs: list[tuple[str, SlotPair]] = []
        if region.stretch < len(kids):
            child = self.paired.pair_of.get(kids[region.stretch])
            candidates = self.paired.slots[child].values() if child is not None else ()
            outputs = [
                (f"{region.stretch}:{s.reference_slot}", s)
                for s in candidates
                if is_input(s.reference_slot)
            ]
        else:
            outputs = [
                (s.reference_slot, s)
                for s in self.paired.slots[index].values()
                if is_written(s.reference_slot)
            ]
        if region.stretch == 0:
            given = (s for s in self.paired.slots[index].values() if is_input(s.reference_slot))
            for slot in given:
                self.first.setdefault(slot.reference_record, slot.target_record)
        made = set(region.outputs)
        own: list[tuple[str, SlotPair]] = []
        fresh: set[int] = set()
        for name, slot in outputs:
            # What calls without a partner made was never seen face to face before.
            handed_on = slot.reference_record not in made and slot.reference_record in self.first
            seen = self.first.setdefault(slot.reference_record, slot.target_record)
            # The reference handed this tensor on untouched; the target may have done something to
            # it.
            changed = seen != slot.target_record and not self._one_content(seen, slot.target_record)
            if (
                (changed or not handed_on)
                and not self._otherwise.given(slot)
                and not self._counts_padding(call, pair, slot)
            ):
                own.append((name, slot))
                fresh |= set() if handed_on else {slot.reference_record}
        errors_in = self.seen_errors.setdefault(
            region.call, [self.blind.before[call.id]] if call.id in self.blind.before else []
        )
        errors_in += [
            self.errors.of(SlotPair("", "", r, self.first[r]))
            for r in region.inputs
            if r in self.first and r not in fresh and (r, self.first[r]) in self.paired.measured
        ]
        errors_in += self.blind.within(region.call, region.stretch)
        parameters: list[tuple[str, judge.ParameterDifference]] = []
        inner: dict[str, str] = {}
        if region.stretch == 0:
            _, _, parameters = self._sorted(call, self.paired.slots[index])
            for scope, name, difference in self.parameters.inside(
                call, self.paired.target.calls[pair.target]
            ):
                inner[f"{scope}.{name}"] = scope
                parameters.append((f"{scope}.{name}", difference))
        wrong = [p for p in parameters if p[1].comparable and not p[1].equal]
        if not own and not wrong:
            return None
        errors_out = [self.errors.of(s) for _, s in own]
        # Who hands on from here what this stretch spoilt has nothing to do with it.
        self.first.update((s.reference_record, s.target_record) for _, s in own)
        u = max((e.u for e in errors_out), default=0.0)
        evidence = judge.LeafEvidence(index, errors_in, errors_out, u, parameters)
        if wrong:
            parameter = judge.judge_leaf(evidence)
            return parameter.replace(stretch=region.stretch, where=inner.get(parameter.slot, ""))
        read = [
            SlotPair("", "", r, self.first[r])
            for r in region.inputs
            if r in self.first and r not in fresh
        ]
        read = [
            slot
            for slot in read
            if (slot.reference_record, slot.target_record) in self.paired.measured
        ]

        def by_growth(outputs: list[tuple[str, SlotPair]], why: str = "") -> Verdict:
            grown = judge.grow(errors_in, [self.errors.of(s) for _, s in outputs], u)
            verdict = self.indices.judged(
                judge.judge_region(index, region.stretch, grown, note=why), call, read, outputs
            )
            return self._of_hidden_depth(
                verdict, region, grown, errors_in, [s for _, s in outputs], u
            )

        if all(e.exact for e in errors_out) or self.replayer is None:
            return by_growth(own)
        reason = (
            self._postponed(call, index, judge.grow(errors_in, errors_out, u))
            if call.id not in self.between
            else ""
        )
        if reason:
            return by_growth(own, reason)
        found = self._between(index, pair, call)
        misrouted = next((name for name, _ in own if name in found.misrouted), "")
        if misrouted and not self.replayer.reference.confirm(call)[0]:
            return self._misrouted(index, region, misrouted, found.misrouted[misrouted])
        local = [(name, found.local[name]) for name, _ in own if name in found.local]
        left = [
            (name, s)
            for name, s in own
            if name not in found.local and not self._explained(index, name)
        ]
        verdict: Verdict | None = None
        if local:
            verdict = self._with_cause(
                _but(evidence, local=local, broken=found.broken),
                call,
                self.paired.target.calls[pair.target],
            ).replace(
                stretch=region.stretch,
            )
            if "whole" in verdict.numbers and (inside := self._inside_before(region)):
                verdict = verdict.replace(where=inside)
        if not left:
            return verdict or by_growth(own)
        self.not_replayed.add(call.id)
        why = next((found.refused[name] for name, _ in own if name in found.refused), found.why)
        other = by_growth(left, why)
        if other.verdict == VerdictKind.INTRODUCED:
            other = other.replace(
                slot=max(left, key=lambda item: self.errors.of(item[1]).value or 0.0)[0]
            )
        return max(
            (v for v in (verdict, other) if v is not None), key=lambda v: severity(v.verdict)
        )

    def _of_hidden_depth(
        self,
        verdict: Verdict,
        region: Region,
        growth: judge.ErrorGrowth,
        before: Sequence[judge.PairError],
        outputs: Sequence[SlotPair],
        u: float,
    ) -> Verdict:
        """The verdict of a stretch, for one behind calls that neither run shows by what rounding
        makes at unknown depth.
        """
        if self._hidden_before(region) <= _FEW_HIDDEN:
            return verdict
        return judge.judge_unseen(verdict, growth, u, before, lambda: self.errors.sight(outputs))

    def _hidden_before(self, region: Region) -> int:
        """How many innermost calls right before a stretch show nothing that could be measured."""
        hidden = 0
        for kid in reversed(self.paired.kids.get(region.call, [])[: region.stretch]):
            if self._shows_something(kid):
                break
            todo = [kid]
            while todo:
                call = todo.pop()
                below = self.paired.kids.get(call, [])
                hidden += not below
                todo += below
        return hidden

    def _shows_something(self, call: int) -> bool:
        """Was an output of this call, or of one inside it, measured?"""
        index = self.paired.pair_of.get(call)
        slots = self.paired.slots[index].values() if index is not None else ()
        made = (s for s in slots if is_written(s.reference_slot))
        if any(self.errors.of(s).value is not None for s in made):
            return True
        return any(map(self._shows_something, self.paired.kids.get(call, ())))

    def _one_content(self, one: int, two: int) -> bool:
        """Do two records of the target hold the same bytes, as far as that is known?"""
        a, b = (self.paired.target.records[record].hash for record in (one, two))
        return bool(a) and a == b

    def _inside_before(self, region: Region) -> str:
        """The first of the leaves without a partner right before a stretch that alone were replayed
        with it, "" when there are none.
        """
        kids = self.paired.kids.get(region.call, [])
        first = ""
        for kid in reversed(kids[: region.stretch]):
            if kid in self.paired.pair_of or not self.paired.calls[kid].leaf:
                break
            first = self.paired.calls[kid].scope
        return first if any(kid in self.paired.pair_of for kid in kids) else ""

    def _between(self, index: int, pair: CallPair, call: Call) -> ReplayResult:
        """The replay of a container's own operators, once for all its stretches."""
        found = self.between.get(call.id)
        if found is None:
            given = self.parameters.given(call, self.paired.slots[index])
            found = self.between[call.id] = self._replayed(
                index, call, self.paired.target.calls[pair.target], given
            )
        return found

    def _explained(self, index: int, name: str) -> bool:
        """Is an output that was not replayed bitwise equal?"""
        return self.paired.all_same(index, (name,))

    def _sorted(
        self, call: Call, slots: Mapping[str, SlotPair]
    ) -> tuple[list[SlotPair], list[SlotPair], list[tuple[str, judge.ParameterDifference]]]:
        """(inputs, outputs, exactly comparable parameters) of a paired call.

        A parameter that changed during the run (an optimiser, running statistics) is state: an
        input that carries noise.
        """
        inputs: list[SlotPair] = []
        outputs: list[SlotPair] = []
        parameters: list[tuple[str, judge.ParameterDifference]] = []
        for slot in slots.values():
            kind = slot_kind(slot.reference_slot)
            if kind == "input":
                inputs.append(slot)
            elif kind in ("output", "mutated"):
                outputs.append(slot)
            elif kind == "param":
                if self.parameters.is_given(call, slot):
                    parameters.append((slot.reference_slot, self.parameters.difference(slot)))
                else:
                    inputs.append(slot)
        return inputs, outputs, parameters

    def _structural(self, inputs: Iterable[SlotPair], outputs: Iterable[SlotPair]) -> str:
        def clash(slot: SlotPair) -> bool:
            one, two = (
                self.paired.reference.records[slot.reference_record],
                self.paired.target.records[slot.target_record],
            )
            # its own shape is not known, or not what is shown
            partly = any(marks.is_unplaced(r) or r.whole for r in (one, two))
            return one.shape != two.shape and not partly

        wrong, given = [s for s in outputs if clash(s)], list(inputs)
        # Calls that have no input in common were asked nothing in common.
        if not wrong or not given or any(clash(s) for s in given):
            return ""
        slot = wrong[0]
        return (
            f"{slot.reference_slot} has "
            f"{self.paired.measured[slot.reference_record, slot.target_record].why}, its inputs "
            "agree in shape"
        )


def _written(call: Call) -> set[int]:
    return {r.record for kind in ("output", "mutated") for r in call.slots(kind)}


def _but(old: judge.LeafEvidence, /, **changes: Any) -> judge.LeafEvidence:
    return dataclasses.replace(old, **changes)
