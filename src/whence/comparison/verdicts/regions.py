"""A verdict for every region: exact, then the replay of its program on the target's inputs, then
growth between two dumps.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from whence import align, judge
from whence.align.quantised.operands import is_coded
from whence.comparison.inputs.positions_masks import PositionsAndMasks
from whence.comparison.options import CompareOptions
from whence.comparison.replays.semantics import ReplayResult
from whence.comparison.verdicts.call_replays import CallReplays
from whence.comparison.verdicts.indices import Indices
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.parameter_drift import ParameterDrifts, unless_drifted
from whence.comparison.verdicts.parameters import Parameters
from whence.comparison.verdicts.quantised.layers import QuantisedLayers
from whence.comparison.verdicts.region_evidence import (
    LeafEvidenceCollector,
    RegionEvidence,
    RegionOutput,
    SegmentEvidenceCollector,
)
from whence.comparison.verdicts.repeated_runs import RepeatedRuns
from whence.comparison.verdicts.sparse_target.judge import SparseTargetJudge
from whence.comparison.verdicts.unseen_inputs import UnseenInputs
from whence.dtypes import is_half_roundoff
from whence.frameworks.operator_names import CHOOSES, VIEWS, base_name
from whence.judge.limits import LIMITS, STRUCTURE_ELEMENTS
from whence.judge.policy import Policy
from whence.records import Call, Region
from whence.records.marks import Mark, has_mark
from whence.records.program import operands
from whence.records.slots import is_of_child, is_param, is_read, is_written, split_child
from whence.records.training import GRADIENTS, LOSS, OPTIMIZER
from whence.results import (
    GUILTY,
    CauseKind,
    Confidence,
    Evidence,
    SlotPair,
    Verdict,
    VerdictKind,
    severity,
)


class RegionJudge:
    """Judges the regions of a comparison in the order of execution.

    replays: the figures of all replays, and the calls without one. unseen: calls whose inputs a run
    does not show. sparse: judges a target that shows only some of its tensors.
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
        self.located = self._segment_judge.located

    @property
    def first(self) -> Mapping[int, int]:
        """By record of the reference, the target's record that it was first paired with."""
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
        # A module that is at fault in a replayed step is replayed in all steps.
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
        """The verdict of a segment; for the first one, `undetermined` if it passes and a parameter
        of the container drifted.
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
                elsewhere=evidence.elsewhere,
            )
            if verdict.verdict == VerdictKind.INTRODUCED and self._is_coded_alone:
                words = f"{verdict.sentence}; the target computes with codes, whose loss is open"
                verdict = verdict.withdrawn(VerdictKind.UNDETERMINED, words)
        return unless_drifted(verdict, evidence.drift)

    @functools.cached_property
    def _is_coded_alone(self) -> bool:
        """Whether the target has nodes that compute with codes, and the reference has none."""
        reference, target = self.paired.reference, self.paired.target
        return any(map(is_coded, target.calls)) and not any(map(is_coded, reference.calls))

    def _judged_leaf(self, evidence: RegionEvidence) -> Verdict:
        """The verdict of a leaf by the strongest evidence: replay if possible, else growth."""
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
        """The verdict of a leaf from two dumps. why: why there is no replay. is_doubtful: if the
        leaf's place among the calls is a guess, all earlier tensors count as its inputs.

        The place is a guess if the program is not the one that ran (exported before passes):
        types and order of operators then decide who reads what. Where they are wrong, a call behind
        a fault may seem to have equal inputs.
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
        """The verdict of a leaf that was not replayed, or a fault if one factor or constant
        explains its difference: rounding in 16 bits is so large that it would hide a wrong factor.
        """
        if not is_half_roundoff(leaf.u):
            return verdict
        room = LIMITS.growth * (leaf.growth.e_in + 2 * leaf.u)
        slots = [slot for _, slot in outputs]
        return judge.unless_coherent(
            verdict, leaf.growth, leaf.u, lambda: self.errors.sight(slots), room
        )

    def _excuse_after_ties(self, verdicts: dict[tuple[int, int], Verdict]) -> None:
        """Withdraw, in place, verdicts that two dumps do not prove behind a choice among ties."""
        children = self.paired.kids
        places = [
            children[call][segment] if 0 <= segment < len(children.get(call, ())) else call
            for (call, segment), verdict in verdicts.items()
            if "tied_rows" in verdict.numbers
        ]
        if places:
            self._indices.after_ties(verdicts, min(places))

    def _unless_partial(self, verdict: Verdict, index: int) -> Verdict:
        """The verdict, or `undetermined` if it is a pass and only a part of the outputs was
        printed.
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
    """Whether a verdict is about an optimiser's step that was not replayed, has equal settings in
    both runs and got different inputs.
    """
    call, partner = evidence.pair.call, evidence.pair.partner
    return (
        call.phase == OPTIMIZER
        and call.op not in (GRADIENTS, LOSS)
        and verdict.evidence == Evidence.TWO_DUMPS
        and call.arguments == partner.arguments
        and any(error.inherited for error in evidence.leaf.inputs)
    )


# Compares modules of the same kind within a run: a precision loss that only one of them has is a
# fault.


def blame_those_that_stand_out(
    verdicts: dict[tuple[int, int], Verdict], replays: CallReplays
) -> None:
    """Make a suspect or a loss of precision at 16 bits a fault where siblings do without: what
    rounds inside in one layer is not a property of the model's arithmetic.
    """
    candidates = [
        (call, verdict)
        for (call, segment), verdict in verdicts.items()
        if segment < 0 and _may_stand_out(verdict, replays, call)
    ]
    rho_of = _rho_by_scope(replays) if candidates else {}
    for call, verdict in candidates:
        own = replays.figures[call][verdict.slot]
        rho = own.rho
        siblings = rho_of[_form(replays, call, verdict.slot)]
        quiet = [other for other in siblings.values() if other < rho / judge.LIMITS.stands_out]
        if not quiet or 2 * len(quiet) < len(siblings):
            continue
        pair = replays.paired.pair(replays.paired.pair_of[call])
        fault = replays.cause(pair, [verdict.slot], own.score / judge.LIMITS.stands_out)
        is_semantic = fault.cause == CauseKind.SEMANTIC
        if is_semantic and replays.reproduction(pair, [verdict.slot], is_own=True).withdrawn:
            continue
        others = f"{len(quiet)} others of its form" if len(quiet) > 1 else "another of its form"
        words = f"; {fault.words}" if fault.words else ""
        verdicts[call, -1] = verdict.replace(
            verdict=VerdictKind.INTRODUCED,
            confidence=Confidence.LIKELY,
            cause=fault.cause,
            operator=fault.operator,
            source=fault.source or verdict.source,
            reason=fault.words,
            sentence=f"introduced here: {rho:.3g} times this operator's own rounding, where "
            f"{others} in this run {'have' if len(quiet) > 1 else 'has'} {max(quiet):.3g} at most"
            f"{words}",
        )


def _may_stand_out(verdict: Verdict, replays: CallReplays, call: int) -> bool:
    """Whether a call rounds more than most calls do, by an amount that its values do not explain.

    Attention, softmax and choices are left out: how they round depends on the spread of scores.
    """
    is_close = verdict.verdict == VerdictKind.PRECISION or verdict.confidence == Confidence.SUSPECT
    own = replays.figures.get(call, {}).get(verdict.slot)
    if not is_close or own is None or verdict.evidence != Evidence.REPLAY or verdict.cause:
        return False
    limits, reference = judge.LIMITS, replays.paired.reference
    program = reference.programs.get(replays.paired.calls[call].program)
    refs = replays.paired.calls[call].refs
    count = next((reference.records[r.record].count for r in refs if r.slot == verdict.slot), 0)
    return (
        is_half_roundoff(own.u)
        and own.rho > limits.suspect * limits.rho_16
        and count >= STRUCTURE_ELEMENTS
        and program is not None
        and not any(_weighs_by_scores(op.name) for op in program.operations)
    )


def _weighs_by_scores(name: str) -> bool:
    return "attention" in name or "softmax" in name or base_name(name) in CHOOSES


def _rho_by_scope(replays: CallReplays) -> Mapping[Any, Mapping[str, float]]:
    """By form and then scope, the largest rho (error in units of the operator's own rounding)."""
    rho_of: dict[Any, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for call, figures in replays.figures.items():
        scope = replays.paired.calls[call].scope
        for slot, error in figures.items():
            of_form = rho_of[_form(replays, call, slot)]
            of_form[scope] = max(of_form[scope], error.rho)
    return rho_of


def _form(replays: CallReplays, call: int, slot: str) -> Any:
    """A key that outputs share if they should round alike: module name with numbers starred, class,
    slot and program. For a backward pass also the target's program, since a derivative that is
    written by hand rounds at every step and torch's own only once.
    """
    named = replays.paired.calls[call]
    own = ""
    if named.phase == "backward":
        pair = replays.paired.plan.pairs[replays.paired.pair_of[call]]
        own = replays.paired.target.calls[pair.target].program
    return align.starred(named.scope), named.op_type, slot, named.program, own


# The verdict of a segment: a container's own operators between two of its children.


class SegmentJudge:
    """Judges segments by their evidence, and replays their container if needed."""

    def __init__(self, replays: CallReplays, indices: Indices) -> None:
        self._replays, self._indices = replays, indices
        self.paired, self.errors = replays.paired, replays.errors
        # By call, the first segment that got other rows because of a different choice.
        self._misrouted: dict[int, int] = {}

    def verdict(self, region: Region, evidence: RegionEvidence) -> Verdict:
        """The verdict of one segment. Call this in execution order of a call's segments."""
        leaf = evidence.leaf
        if any(p.differs for _, p in leaf.parameters):
            verdict = judge.judge_leaf(leaf)
            return verdict.replace(
                stretch=evidence.segment, where=evidence.scopes.get(verdict.slot, "")
            )
        outputs, replayer = evidence.outputs, self._replays.replayer
        if replayer is None or all(o.error.exact for o in outputs):
            return self._by_growth(evidence, outputs)
        if reason := self._replays.reason_to_postpone(evidence):
            return self._by_growth(evidence, outputs, reason)
        replayed = self._replays.own_operators(evidence.pair)
        misrouted = next((o.name for o in outputs if o.name in replayed.misrouted), "")
        if misrouted and not replayer.reference.confirm(evidence.pair.call)[0]:
            return self._of_other_rows(evidence, misrouted, replayed.misrouted[misrouted])
        return self._by_replay(region, evidence, replayed)

    def _by_replay(
        self, region: Region, evidence: RegionEvidence, replayed: ReplayResult
    ) -> Verdict:
        """The worse of two verdicts: that of the replayed outputs, and that of the other outputs by
        error growth.
        """
        outputs = evidence.outputs
        figures = [(o.name, replayed.local[o.name]) for o in outputs if o.name in replayed.local]
        others = [o for o in outputs if o.name not in replayed.local and not o.is_equal]
        verdicts = []
        if figures:
            verdict = self._replays.verdict(evidence, figures, replayed.broken)
            verdict = verdict.replace(stretch=evidence.segment)
            if "whole" in verdict.numbers and (maker := self._maker(verdict, region)):
                verdict = verdict.replace(where=maker.scope, named=maker.id)
            verdicts.append(verdict)
        if others:
            self._replays.not_replayed.add(evidence.pair.call.id)
            refused = (replayed.refused[o.name] for o in outputs if o.name in replayed.refused)
            verdict = self._by_growth(evidence, others, next(refused, replayed.why))
            if verdict.verdict == VerdictKind.INTRODUCED:
                worst = max(others, key=lambda output: output.error.value or 0.0)
                verdict = verdict.replace(slot=worst.name)
            verdicts.append(verdict)
        if not verdicts:
            return self._by_growth(evidence, outputs)
        return max(verdicts, key=lambda v: severity(v.verdict))

    def _by_growth(
        self, evidence: RegionEvidence, outputs: Sequence[RegionOutput], why: str = ""
    ) -> Verdict:
        """The verdict of these outputs by error growth. why: why there is no replay."""
        leaf, pair = evidence.leaf, evidence.pair
        growth = leaf.growth
        if outputs is not evidence.outputs:
            growth = judge.grow(leaf.inputs, [o.error for o in outputs], leaf.u)
        if growth.verdict == VerdictKind.INTRODUCED:
            growth = self._replays.growth_where_read(evidence, outputs) or growth
        slots = [(o.name, o.slot) for o in outputs]
        verdict = self._indices.judged(
            judge.judge_region(pair.index, evidence.segment, growth, note=why),
            pair.call,
            evidence.inputs,
            slots,
        )
        if not evidence.is_deep:
            return verdict
        verdict = judge.judge_unseen(
            verdict, growth, leaf.u, leaf.inputs, lambda: self.errors.sight(s for _, s in slots)
        )
        if verdict.verdict == VerdictKind.INTRODUCED and self._replays.replayer is not None:
            reference = self._replays.replayer.reference
            own = min(reference.own_error(slot.reference_record) for _, slot in slots)
            if growth.e_out <= LIMITS.growth * own:
                words = f"differs by rel_l2 {growth.e_out:.2g}, the reference itself by {own:.2g}"
                what = "from what its operator gives in float64: all of it is rounding"
                return verdict.withdrawn(VerdictKind.NOISE, f"{words} {what}")
        return verdict

    def _of_other_rows(self, evidence: RegionEvidence, slot: str, words: str) -> Verdict:
        """The verdict of a segment whose child gets other rows than the reference's operators give
        it. One choice moves the rows of all children, so only the first segment is at fault.
        """
        index, segment = evidence.pair.index, evidence.segment
        if self._misrouted.setdefault(evidence.pair.call.id, segment) != segment:
            return Verdict(
                index,
                VerdictKind.INHERITED,
                segment,
                Evidence.REPLAY,
                Confidence.CERTAIN,
                slot=slot,
                sentence=f"inherited: {slot} has {words}",
            )
        return Verdict(
            index,
            VerdictKind.STRUCTURAL,
            segment,
            Evidence.REPLAY,
            Confidence.CERTAIN,
            cause=CauseKind.STRUCTURAL,
            slot=slot,
            sentence=f"introduced here: {slot} has {words}",
        )

    def _maker(self, verdict: Verdict, region: Region) -> Call | None:
        """The call that is named for a tensor of a segment that was replayed with the unpaired
        leaves before it: the first of these, or what is around them all where their container is
        another one in the target.
        """
        leaves, maker = self._replayed_alone(region), self._opened(verdict, region)
        if maker is None:
            return next(iter(leaves), None)
        calls, kids = self.paired.calls, self.paired.kids[region.call]
        around = [calls[region.call], *(calls[k] for k in kids if has_mark(calls[k], Mark.OPENED))]
        code = self._code(verdict, region)
        makers = [*leaves, *(call for call in around if call.scope in code)]
        if makers in ([], [maker]):
            return maker
        whole = [c for c in around if all(m is c or _is_inside(m, c) for m in makers)]
        return max(whole, key=lambda call: len(call.scope))

    def _code(self, verdict: Verdict, region: Region) -> set[str]:
        """Scopes of the operators of a segment that the tensor of a verdict depends on, without
        those that only add, or look at their tensors otherwise, as every residual stream does.
        """
        kids, call = self.paired.kids[region.call], self.paired.calls[region.call]
        program = self.paired.reference.programs[call.program]
        places = dict(program.calls)
        before = [k for k in range(region.stretch) if kids[k] in self.paired.pair_of]
        start = places.get(before[-1], 0) if before else 0
        todo = [*operands([dict(program.outputs).get(verdict.slot)])]
        inside = set[int]()
        while todo:
            kind, value = todo.pop()
            if kind == "op" and value[0] >= start and value[0] not in inside:
                inside.add(value[0])
                operation = program.operations[value[0]]
                todo += operands([operation.args, *operation.kwargs.values()])
        plain = VIEWS | {"add", "clone"}
        names = ((base_name(program.operations[k].name), program.scopes[k]) for k in inside)
        return {scope for name, scope in names if name not in plain}

    def _replayed_alone(self, region: Region) -> list[Call]:
        """The unpaired leaves directly before a segment, in order, which were replayed with it;
        none if no child of the container is paired.
        """
        children, calls = self.paired.kids.get(region.call, []), self.paired.calls
        leaves: list[Call] = []
        for child in reversed(children[: region.stretch]):
            if has_mark(calls[child], Mark.OPENED) or self._hands_on(calls[child]):
                continue
            if child in self.paired.pair_of or not calls[child].leaf:
                break
            leaves.insert(0, calls[child])
        return leaves if any(child in self.paired.pair_of for child in children) else []

    def _between(self, region: Region) -> str:
        """The paired calls around a segment, in words."""
        calls, kids = self.paired.calls, self.paired.kids[region.call]
        paired = [k in self.paired.pair_of for k in kids]
        before = [k for k, is_paired in zip(kids[: region.stretch], paired) if is_paired]
        first = calls[before[-1]].scope if before else "the beginning"
        last = calls[kids[region.stretch]].scope if region.stretch < len(kids) else "the end"
        return f"between {first} and {last}"

    def _hands_on(self, call: Call) -> bool:
        """Whether a call returns what it was given, as a dropout does in evaluation."""
        records = self.paired.reference.records
        read, left = (
            {records[r.record].hash for r in call.slots(kind)} for kind in ("input", "output")
        )
        return bool(left) and "" not in left and left <= read

    def _opened(self, verdict: Verdict, region: Region) -> Call | None:
        """The call that the target does not have and whose code makes the tensor that a verdict is
        about, or hands on what was right before; None in a container that has all of its own code.
        """
        calls, kids = self.paired.calls, self.paired.kids.get(region.call, ())
        opened = [k for k in kids[: region.stretch + 1] if has_mark(calls[k], Mark.OPENED)]
        if not opened:
            return None
        program = self.paired.reference.programs.get(calls[region.call].program)
        if program is None:
            return None
        wrong = self.paired.slot(verdict.pair, verdict.slot) if verdict.slot else None
        operand = dict(program.outputs).get(verdict.slot, {})
        handed = program.inputs[operand["in"]] if "in" in operand else ""
        made_by = kids[split_child(handed)[0]] if is_of_child(handed) else region.call
        is_alone = made_by != region.call and made_by not in self.paired.pair_of
        if is_alone and not self._hands_on(calls[made_by]):
            return calls[made_by]
        if wrong is None or wrong.reference_record not in region.outputs or "op" not in operand:
            around = calls[kids[region.stretch]].scope if region.stretch < len(kids) else ""
            inside = [k for k in opened if around.startswith(f"{calls[k].scope}.")]
        else:
            maker = program.scopes[operand["op"][0]]
            inside = [k for k in opened if calls[k].scope == maker]
        return max((calls[k] for k in inside), key=lambda call: call.order, default=None)

    def located(self, verdict: Verdict, region: Region) -> Verdict:
        """The verdict, naming a call instead of the code between calls if possible: the unpaired
        call that computed the wrong tensor. For the content of a cache, and below a root that no
        dump contains (it has no code of its own), the call that reads the tensor.
        """
        children = self.paired.kids.get(region.call, [])
        if self._opened(verdict, region) is not None and (maker := self._maker(verdict, region)):
            sentence = f"{self._between(region)}: {verdict.sentence}"
            return verdict.replace(where=maker.scope, named=maker.id, sentence=sentence)
        if (
            verdict.where
            or verdict.verdict != VerdictKind.INTRODUCED
            or verdict.evidence == Evidence.REPLAY
            or region.stretch >= len(children)
        ):
            return verdict
        if has_mark(self.paired.calls[region.call], Mark.UNORDERED):  # what came before is open
            return verdict.replace(verdict=VerdictKind.UNDETERMINED)
        wrong = self.paired.slot(verdict.pair, verdict.slot) if verdict.slot else None
        for child in reversed(children[: region.stretch]):
            call = self.paired.calls[child]
            if (
                wrong
                and call.leaf
                and child not in self.paired.pair_of
                and wrong.reference_record in _written(call)
            ):
                return verdict.replace(
                    where=call.scope,
                    named=child,
                    sentence=f"the target has no such call: {verdict.sentence}",
                )
        is_held = is_of_child(verdict.slot) and align.is_cache(split_child(verdict.slot)[1])
        if not is_held and not has_mark(self.paired.calls[region.call], Mark.PUT_TOGETHER):
            return verdict
        reader = self.paired.calls[children[region.stretch]]
        words = "held by its cache" if is_held else "comes in here, and no call of the dump made it"
        sentence = f"{words}: {verdict.sentence}"
        return verdict.replace(where=reader.scope, named=reader.id, sentence=sentence)


def _is_inside(call: Call, container: Call) -> bool:
    return not container.scope or call.scope.startswith(f"{container.scope}.")


def _written(call: Call) -> set[int]:
    return {r.record for kind in ("output", "mutated") for r in call.slots(kind)}
