"""A verdict for every region: exact, then the replay of its program on the target's inputs, then
growth between two dumps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from whence import judge
from whence.comparison.inputs.positions_masks import PositionsAndMasks
from whence.comparison.options import CompareOptions
from whence.comparison.verdicts.call_replays import CallReplays
from whence.comparison.verdicts.indices import Indices
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.parameter_drift import ParameterDrifts, unless_drifted
from whence.comparison.verdicts.parameters import Parameters
from whence.comparison.verdicts.quantised.layers import QuantisedLayers
from whence.comparison.verdicts.region_evidence import (
    LeafEvidenceCollector,
    RegionEvidence,
    SegmentEvidenceCollector,
)
from whence.comparison.verdicts.repeated_runs import RepeatedRuns
from whence.comparison.verdicts.segments import SegmentJudge
from whence.comparison.verdicts.siblings import blame_those_that_stand_out
from whence.comparison.verdicts.sparse_target.judge import SparseTargetJudge
from whence.comparison.verdicts.unseen_inputs import UnseenInputs
from whence.dtypes import is_half_roundoff
from whence.judge.limits import LIMITS
from whence.judge.policy import Policy
from whence.records import Region
from whence.records.slots import is_param, is_read, is_written
from whence.records.training import GRADIENTS, LOSS, OPTIMIZER
from whence.results import GUILTY, Evidence, SlotPair, Verdict, VerdictKind


class RegionJudge:
    """Judges the regions of a comparison in the order of execution.

    replays: figures of every replay, and which calls had none. unseen: calls whose inputs a run
    does not tell. sparse: the pairs of tensors of a target that shows only some.
    """

    def __init__(
        self,
        errors: PairErrors,
        regions: Sequence[Region],
        options: CompareOptions,
        repeated: RepeatedRuns,
        positions: PositionsAndMasks,
        tell: Callable[[int, int, str], None],
    ) -> None:
        self.errors, self.paired = errors, errors.paired
        self._regions, self._tell = regions, tell
        self.parameters = parameters = Parameters(self.paired)
        self.unseen = UnseenInputs(errors)
        self._indices = Indices(errors)
        self.replays = CallReplays(errors, parameters, options, repeated)
        self.quantised = QuantisedLayers(
            self.paired.reference,
            self.paired.target,
            self.replays.replayer,
            options.policy or Policy(),
            errors.declared.ledger,
        )
        self.sparse = SparseTargetJudge(errors, regions, self.replays.replayer)
        self._drifts = ParameterDrifts(errors, parameters)
        self._leaves = LeafEvidenceCollector(errors, parameters, self.unseen, self._drifts)
        self._segments = SegmentEvidenceCollector(errors, parameters, self.unseen, positions)
        self._segment_judge = SegmentJudge(self.replays, self._indices)

    @property
    def first(self) -> Mapping[int, int]:
        """By record of the reference, the target's that it was first seen with."""
        return self._segments.first

    def verdicts(self) -> dict[tuple[int, int], Verdict]:
        """A verdict for every region whose call has a partner, by (reference call, segment)."""
        verdicts = self.sparse.verdicts()
        for label, index in self.sparse.labels.items():
            verdicts[label, -1] = self._unless_partial(verdicts[label, -1], index)
            self._segments.note(self.paired.slots[index].values())
        self.replays.inside |= self.sparse.inside()
        self.replays.not_replayed |= self.sparse.not_replayed
        regions = [
            (region, self.paired.pair_of[region.call])
            for region in self._regions
            if region.call in self.paired.pair_of and region.call not in self.sparse.calls
        ]
        self._judge_leaves(regions, verdicts)
        self._judge_segments(regions, verdicts)
        self._excuse_after_ties(verdicts)
        blame_those_that_stand_out(verdicts, self.replays)
        return verdicts

    def _judge_leaves(
        self, regions: Iterable[tuple[Region, int]], verdicts: dict[tuple[int, int], Verdict]
    ) -> None:
        # All calls of one module together: its parameters are converted once. The order within a
        # module stays.
        def order(item: tuple[Region, int]) -> tuple[bool, str]:
            call = self.paired.calls[item[0].call]
            return not self.replays.sampling.first(call), call.scope

        leaves = sorted((item for item in regions if item[0].stretch < 0), key=order)
        for number, (region, index) in enumerate(leaves):
            self._tell(number + 1, len(leaves), "judging")
            verdicts[region.call, -1] = self._unless_partial(self._leaf(index), index)
        # A module that is at fault in a step that was replayed is looked at in all.
        guilty = [call for (call, _), verdict in verdicts.items() if verdict.verdict in GUILTY]
        for index in self.replays.widen(guilty):
            verdicts[self.paired.plan.pairs[index].reference, -1] = self._leaf(index)

    def _judge_segments(
        self, regions: Iterable[tuple[Region, int]], verdicts: dict[tuple[int, int], Verdict]
    ) -> None:
        for region, index in regions:
            slots = self.paired.slots[index].values()
            if region.stretch < 0:
                self._segments.note(
                    s for s in slots if is_read(s.reference_slot) or is_written(s.reference_slot)
                )
                continue
            evidence = self._segments.collect(region, index)
            verdict = (
                self._segment_judge.verdict(region, evidence) if evidence is not None else None
            )
            pair = self.paired.pair(index)
            verdict = self.errors.declared.containers.segment(verdict, pair, list(slots))
            verdict = self._unless_container_drifted(verdict, region, index)
            if verdict is not None:
                verdict = self._segment_judge.located(verdict, region)
                verdicts[region.call, region.stretch] = self._unless_partial(verdict, index)

    def _unless_container_drifted(
        self, verdict: Verdict | None, region: Region, index: int
    ) -> Verdict | None:
        """The verdict of a segment. What is not known of the container's own parameters is said
        with the first one.
        """
        if region.stretch != 0:
            return verdict
        pair, slots = self.paired.pair(index), self.paired.slots[index]
        drift = self._drifts.of(pair, slots, self.parameters.given(pair.call, slots))
        if drift is None:
            return verdict
        passed = Verdict(index, VerdictKind.IDENTICAL, stretch=region.stretch)
        return unless_drifted(verdict or passed, drift)

    def _leaf(self, index: int) -> Verdict:
        evidence = self._leaves.collect(index)
        if evidence is None:
            return Verdict(
                index, VerdictKind.IDENTICAL, evidence=Evidence.TWO_DUMPS, sentence="bitwise equal"
            )
        pair, leaf = evidence.pair, evidence.leaf
        quantised = self.quantised.judged(pair, leaf)
        if quantised is not None:
            return quantised
        replaying = self.replays.of(pair) if self.replays.replayer is not None else None
        verdict, figures = self.errors.declared.leaves.judged(
            leaf, pair, self.paired.slots[index], replaying
        )
        if verdict is not None:
            self.replays.figures[pair.call.id] = {str(i): e for i, e in enumerate(figures)}
            return unless_drifted(verdict, evidence.drift)
        verdict = self._judged_leaf(evidence)
        slots = [output.slot for output in evidence.outputs]
        if slots and evidence.is_deep and not verdict.cause:
            verdict = judge.judge_unseen(
                verdict,
                evidence.growth,
                leaf.u,
                leaf.inputs or None,
                lambda: self.errors.sight(slots),
                is_whole=pair.call.parent == -1 and pair.call.leaf and pair.partner.leaf,
                in_other_steps=evidence.in_other_steps,
            )
        return unless_drifted(verdict, evidence.drift)

    def _judged_leaf(self, evidence: RegionEvidence) -> Verdict:
        """The verdict of a leaf by the strongest evidence there is."""
        if self.replays.replayer is None:
            return self._leaf_by_growth(evidence, is_doubtful=True)
        if evidence.leaf.is_settled:
            return self._leaf_by_growth(evidence)
        if reason := self.replays.reason_to_postpone(evidence):
            return self._leaf_by_growth(evidence, reason)
        replayed = self.replays.replay(evidence.pair)
        if not replayed.local:
            return self._leaf_by_growth(evidence, replayed.why, is_doubtful=True)
        return self.replays.verdict(evidence, list(replayed.local.items()), replayed.broken)

    def _leaf_by_growth(
        self, evidence: RegionEvidence, why: str = "", *, is_doubtful: bool = False
    ) -> Verdict:
        """The verdict of a leaf from two dumps. why: there is no replay. is_doubtful: it may depend
        on all that was made before, where its place among the calls is a guess.

        A program that is not the one that ran (exported before passes) has other operators around;
        types and order alone then tell who reads what, and where they err, a call in the middle of
        what a fault spoilt seems to have equal inputs.
        """
        call = evidence.pair.call
        leaf = evidence.leaf.replace(no_replay=why)
        if is_doubtful and evidence.ahead is not None:
            self.unseen.calls.add(call.id)
            leaf = leaf.replace(inputs=[*leaf.inputs, evidence.ahead])
        outputs = [(output.name, output.slot) for output in evidence.outputs]
        verdict = judge.judge_leaf(leaf)
        if is_doubtful:
            verdict = self._unless_coherent(verdict, leaf, outputs)
        if evidence.hands_on:  # nothing is computed that could be wrong
            verdict = judge.without_visible(verdict)
            if verdict.verdict in GUILTY:
                why = "inherited: every output is a tensor that came in"
                verdict = verdict.withdrawn(VerdictKind.INHERITED, why)
        if verdict.verdict == VerdictKind.INTRODUCED and _is_step_unknown(verdict, evidence):
            why = (
                f"no replay of {call.op_type}: a step that takes signs or divides by what is near "
                f"zero makes that of rounding in a gradient; {verdict.sentence}"
            )
            verdict = verdict.withdrawn(VerdictKind.UNDETERMINED, why)
        return self._indices.judged(verdict, call, evidence.inputs, outputs)

    def _unless_coherent(
        self, verdict: Verdict, leaf: judge.LeafEvidence, outputs: Sequence[tuple[str, SlotPair]]
    ) -> Verdict:
        """The verdict of a leaf that was not replayed, unless one number explains how it differs:
        in 16 bits what rounding may make is so large that a wrong factor hides within it.
        """
        if not is_half_roundoff(leaf.u):
            return verdict
        room = LIMITS.growth * (leaf.growth.e_in + 2 * leaf.u)
        slots = [slot for _, slot in outputs]
        return judge.unless_coherent(
            verdict, leaf.growth, leaf.u, lambda: self.errors.sight(slots), room
        )

    def _excuse_after_ties(self, verdicts: dict[tuple[int, int], Verdict]) -> None:
        """What two dumps prove of calls behind a choice that ties decided."""
        children = self.paired.kids
        places = [
            children[call][segment] if 0 <= segment < len(children.get(call, ())) else call
            for (call, segment), verdict in verdicts.items()
            if "tied_rows" in verdict.numbers
        ]
        if places:
            self._indices.after_ties(verdicts, min(places))

    def _unless_partial(self, verdict: Verdict, index: int) -> Verdict:
        """The verdict, or `undetermined` when it says that all is well and only a part of the
        outputs was printed.
        """
        if verdict.verdict not in (VerdictKind.IDENTICAL, VerdictKind.NOISE):
            return verdict
        slots: Iterable[SlotPair] = self.paired.slots[index].values()
        partly = (self.paired.partly(s) for s in slots if not is_param(s.reference_slot))
        missing = next(filter(None, partly), "")
        if not missing:
            return verdict
        return verdict.withdrawn(
            VerdictKind.UNDETERMINED, f"{missing}; in these {verdict.sentence}"
        )


def _is_step_unknown(verdict: Verdict, evidence: RegionEvidence) -> bool:
    """Is it the step of an optimiser that was not replayed, with the same settings in both runs,
    and that was given something else?
    """
    call, partner = evidence.pair.call, evidence.pair.partner
    return (
        call.phase == OPTIMIZER
        and call.op not in (GRADIENTS, LOSS)
        and verdict.evidence == Evidence.TWO_DUMPS
        and call.arguments == partner.arguments
        and any(error.inherited for error in evidence.leaf.inputs)
    )
