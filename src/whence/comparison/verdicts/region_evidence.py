"""What both runs show of a region, collected once before anything is replayed or judged."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from whence import dtypes, judge
from whence.comparison.inputs.positions_masks import PositionsAndMasks
from whence.comparison.left_out import operator_form
from whence.comparison.paired_runs import PairedCall
from whence.comparison.prepare.stored_precision import executed_in
from whence.comparison.programs.program_flow import PLACED
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.parameter_drift import ParameterDrift, ParameterDrifts
from whence.comparison.verdicts.parameters import Parameters
from whence.comparison.verdicts.unseen_inputs import UnseenInputs
from whence.records import Call, Region, marks
from whence.records.known_order import layer_before
from whence.records.marks import Mark, has_mark
from whence.records.program import inputs_of
from whence.records.region import inwards
from whence.records.slots import (
    is_input,
    is_of_child,
    is_own_input,
    is_param,
    is_read,
    is_written,
    split_child,
)
from whence.results import SlotPair, VerdictKind

_FEW_OPERATORS = 12  # most operators of a program that counts as one layer, not as a network
_FEW_HIDDEN = 2  # most calls without visible tensors that are judged together with what follows


class RegionOutput(NamedTuple):
    """A tensor that a region computed. name: its slot ("output.0"), or the slot of the child that
    receives it ("3:input.0").
    """

    name: str
    slot: SlotPair
    error: judge.PairError
    is_equal: bool


@dataclass(frozen=True, slots=True)
class RegionEvidence:
    """What both runs show of a region.

    segment: -1 for a leaf. leaf: the errors of inputs and outputs, and the parameters, that the
    judge gets. is_deep: the number of operators in the region is not known. elsewhere: errors of
    its outputs in other steps and layers, for deep leaves. ahead: the largest error of all earlier
    tensors, for a leaf whose place among the calls is a guess. scopes: by slot, the scope of a
    parameter of a call inside.
    """

    pair: PairedCall
    segment: int
    inputs: Sequence[SlotPair]
    outputs: Sequence[RegionOutput]
    leaf: judge.LeafEvidence
    is_deep: bool
    elsewhere: judge.Elsewhere = judge.NOWHERE
    ahead: judge.PairError | None = None
    drift: ParameterDrift | None = None
    scopes: Mapping[str, str] = field(default_factory=dict)

    @property
    def hands_on(self) -> bool:
        """Whether every output is an unchanged input, on both sides."""
        read = {(s.reference_record, s.target_record) for s in self.inputs}
        returned = [(o.slot.reference_record, o.slot.target_record) for o in self.outputs]
        return bool(returned) and read.issuperset(returned)

    @property
    def growth(self) -> judge.ErrorGrowth:
        """The growth of the error from inputs to outputs."""
        return self.leaf.growth


class LeafEvidenceCollector:
    """Collects the evidence of leaf calls."""

    def __init__(
        self,
        errors: PairErrors,
        parameters: Parameters,
        unseen: UnseenInputs,
        drifts: ParameterDrifts,
    ) -> None:
        self.errors, self.paired = errors, errors.paired
        self._parameters, self._unseen = parameters, unseen
        self._drifts = drifts

    def collect(self, index: int) -> RegionEvidence | None:
        """The evidence of one pair of calls; None if all their tensors are bitwise equal."""
        pair, slots = self.paired.pair(index), self.paired.slots[index]
        call = pair.call
        given = self._parameters.given(call, slots)
        if slots and all(map(self.paired.is_equal, slots.values())):
            return None
        inputs, outputs, parameters = self._parameters.by_role(call, slots)
        in_errors = [self.errors.of(s) for s in inputs]
        if call.id in self._unseen.worst_before:
            in_errors.append(self._unseen.worst_before[call.id])
        out_errors = self._errors_of_outputs(inputs, outputs, in_errors)
        u = self.errors.roundoff(outputs, out_errors, (e.u for e in in_errors))
        if any(e.codes for e in out_errors):
            out_errors = [
                self.errors.rounded(s, inputs, e) for s, e in zip(outputs, out_errors, strict=True)
            ]
        leaf = judge.LeafEvidence(
            index,
            in_errors,
            out_errors,
            u,
            parameters,
            structural=self._shape_clash(inputs, outputs),
            repeats=self._repeats[self._form(pair)] if u else 0,
            terms=self._terms(slots.values(), inputs, outputs),
        )
        if leaf.growth.verdict == VerdictKind.INTRODUCED:
            seen = [self.errors.below_masks(s, call) for s in inputs]
            leaf = leaf.replace(inputs=[*seen, *in_errors[len(inputs) :]])
        is_deep = self._may_be_a_network(call, inputs)
        return RegionEvidence(
            pair,
            -1,
            inputs,
            [
                RegionOutput(s.reference_slot, s, e, self.paired.is_equal(s))
                for s, e in zip(outputs, out_errors, strict=True)
            ],
            leaf,
            is_deep=is_deep,
            elsewhere=judge.Elsewhere(
                self._in_other_steps(call),
                self._in_layer_before(call),
                self._unseen.equal_before.get(call.id, 0),
            )
            if is_deep
            else judge.NOWHERE,
            ahead=self._unseen.ahead.get(call.id) if PLACED in call.notes else None,
            drift=self._drifts.of(pair, slots, given),
        )

    def _terms(
        self, slots: Iterable[SlotPair], inputs: Sequence[SlotPair], outputs: Sequence[SlotPair]
    ) -> float:
        """The number of products that are summed in an output element, from the sizes of the
        largest weight, input and output. Exact for a matrix product, an upper bound for a
        convolution; 0 without a weight.
        """
        weights = (slot for slot in slots if is_param(slot.reference_slot))
        sizes = [
            self._largest(of, least) for of, least in ((weights, 2), (inputs, 1), (outputs, 1))
        ]
        return math.sqrt(sizes[0] * sizes[1] / sizes[2]) if all(sizes) else 0.0

    def _largest(self, slots: Iterable[SlotPair], least_axes: int) -> int:
        """The element count of the largest of these tensors that is floating-point and has at least
        so many axes; 0 if there is none.
        """
        records = (self.paired.reference.records[slot.reference_record] for slot in slots)
        sizes = (
            r.count for r in records if len(r.shape) >= least_axes and dtypes.is_floating(r.dtype)
        )
        return max(sizes, default=0)

    def _errors_of_outputs(
        self,
        inputs: Sequence[SlotPair],
        outputs: Sequence[SlotPair],
        in_errors: Sequence[judge.PairError],
    ) -> list[judge.PairError]:
        errors = [self.errors.of(s) for s in outputs]
        if any(e.codes for e in in_errors):
            return [self.errors.accumulated(s, e) for s, e in zip(outputs, errors, strict=True)]
        return errors

    def _may_be_a_network(self, call: Call, inputs: Sequence[SlotPair]) -> bool:
        """Whether the number of operators in this leaf, or before it, is not known."""
        if call.kind == "label" or marks.hidden_inside(call):
            return True
        if not inputs and self._is_all_of_its_model(call):
            return True
        if call.kind != "module" or call.parent != -1 or has_mark(call, Mark.PUT_TOGETHER):
            return False
        program = self.paired.reference.programs.get(call.program)
        return program is None or len(program.operations) > _FEW_OPERATORS

    def _is_all_of_its_model(self, call: Call) -> bool:
        """Whether the dump shows only this call of a model, for example its last layer."""
        calls, kids = self.paired.calls, self.paired.kids
        return (
            call.parent >= 0
            and has_mark(calls[call.parent], Mark.PUT_TOGETHER)
            and len(kids[call.parent]) == 1
        )

    def _in_other_steps(self, call: Call) -> judge.OtherSteps:
        """The largest output error of each other call of this module, split into earlier and later
        calls.
        """
        errors: dict[bool, list[float]] = {False: [], True: []}
        for other in self._calls_by_place[call.scope, call.rank, call.phase]:
            if other != call.id and (error := self._error_of(other)) is not None:
                errors[other > call.id].append(error)
        return judge.OtherSteps(tuple(errors[False]), tuple(errors[True]))

    def _in_layer_before(self, call: Call) -> float | None:
        """The largest output error of the same module one layer earlier, in the same step."""
        for scope in layer_before(call.scope):
            for other in self._calls_by_place.get((scope, call.rank, call.phase), ()):
                if self.paired.calls[other].step == call.step:
                    return self._error_of(other)
        return None

    def _error_of(self, call: int) -> float | None:
        """The largest error of what a call returned; None where none is known."""
        slots = self.paired.slots_of(call).values()
        values = [self.errors.of(s).value for s in slots if is_written(s.reference_slot)]
        return max((value for value in values if value is not None), default=None)

    @functools.cached_property
    def _calls_by_place(self) -> Mapping[tuple[str, int, str], Sequence[int]]:
        """The ids of the reference's calls, by (scope, rank, phase)."""
        places: dict[tuple[str, int, str], list[int]] = {}
        for call in self.paired.calls:
            places.setdefault((call.scope, call.rank, call.phase), []).append(call.id)
        return places

    @functools.cached_property
    def _repeats(self) -> Counter[Hashable]:
        """By form, the number of leaves whose outputs are bitwise equal in both runs. Leaves that
        were printed in part do not count.
        """
        counts = self.paired.left_out.repeats()
        for index, slots in enumerate(self.paired.slots):
            outputs = [s for s in slots.values() if is_written(s.reference_slot)]
            pair = self.paired.pair(index)
            if (
                pair.call.leaf
                and outputs
                and all(
                    self.errors.of(s).exact
                    and self.paired.reference.records[s.reference_record].count
                    for s in outputs
                )
            ):
                counts[self._form(pair)] += 1
        return counts

    def _form(self, pair: PairedCall) -> Hashable:
        return operator_form(pair.call, pair.partner, self.paired.reference.records)

    def _shape_clash(self, inputs: Sequence[SlotPair], outputs: Iterable[SlotPair]) -> str:
        """The output, in words, whose shape differs although all inputs agree; "" if none."""

        def clashes(slot: SlotPair) -> bool:
            reference, target = self.paired.records(slot)
            # the full shape is not known, or only a part of the tensor is shown
            partly = any(marks.is_unplaced(r) or r.whole for r in (reference, target))
            return reference.shape != target.shape and not partly

        slot = next(filter(clashes, outputs), None)
        # Calls without a common input computed different things.
        if slot is None or not inputs or any(map(clashes, inputs)):
            return ""
        why = self.paired.measured[slot.reference_record, slot.target_record].why
        return f"{slot.reference_slot} has {why}, its inputs agree in shape"


class SegmentEvidenceCollector:
    """Collects the evidence of a container's own operators between two children, in execution
    order: the tensors that the next child reads, or the container returns, against all tensors that
    these operators could read.

    first: by record of the reference, the target's record that it was first paired with.
    """

    def __init__(
        self,
        errors: PairErrors,
        parameters: Parameters,
        unseen: UnseenInputs,
        positions: PositionsAndMasks,
    ) -> None:
        self.errors, self.paired = errors, errors.paired
        self._parameters, self._unseen, self._positions = parameters, unseen, positions
        self.first: dict[int, int] = {}
        self._visible: dict[int, list[tuple[int, judge.PairError]]] = {}

    def note(self, slots: Iterable[SlotPair]) -> None:
        """Note the target's record of each tensor that is seen here for the first time."""
        for slot in slots:
            self.first.setdefault(slot.reference_record, slot.target_record)

    def collect(self, region: Region, index: int) -> RegionEvidence | None:
        """The evidence of a segment; None if it computed nothing and no parameter differs."""
        pair, slots = self.paired.pair(index), self.paired.slots[index]
        call = pair.call
        candidates = list(self._candidates(region, index))
        if region.stretch == 0:
            self.note(s for s in slots.values() if is_read(s.reference_slot))
        outputs, fresh = self._own(region, pair, candidates)
        visible = self._visible.setdefault(call.id, [])
        if call.id in self._unseen.worst_before and not visible:
            visible.append((-1, self._unseen.worst_before[call.id]))
        visible += [(s.reference_record, self.errors.of(s)) for s in self._read(region, fresh)]
        visible += [(-1, error) for error in self._unseen.within(call.id, region.stretch)]
        parameters, scopes = self._parameters_of(region, pair)
        if not outputs and not any(p.differs for _, p in parameters):
            return None
        before = self._before_change(region, outputs)
        unread = self._unread(call, outputs)
        errors_in = [error for record, error in visible if record not in unread]
        # A later segment that passes on what this one spoilt is not to blame.
        self.first.update((o.slot.reference_record, o.slot.target_record) for o in outputs)
        errors_out = [o.error for o in outputs]
        below = self.paired.target_kids.get(pair.partner.id, ())
        kinds = {executed_in(self.paired.target.calls[k]) for k in below} - {""}
        u = max((*(e.u for e in errors_out), *map(judge.unit_roundoff, kinds)), default=0.0)
        return RegionEvidence(
            pair,
            region.stretch,
            self._read(region, fresh),
            outputs,
            judge.LeafEvidence(index, tuple(before or errors_in), errors_out, u, parameters),
            is_deep=self._is_behind_hidden_calls(region),
            scopes=scopes,
        )

    def _before_change(
        self, region: Region, outputs: Sequence[RegionOutput]
    ) -> list[judge.PairError]:
        """The earlier errors of these outputs, if the reference passes all of them on unchanged; []
        if it computes one of them. Other inputs cannot explain a change of a tensor that the
        reference leaves alone.
        """
        errors = []
        for slot in (output.slot for output in outputs):
            pair = slot.reference_record, self.first[slot.reference_record]
            if pair[0] in region.outputs or pair not in self.paired.measured:
                return []
            if pair[1] == slot.target_record:
                return []
            errors.append(self.errors.of(SlotPair("", "", *pair)))
        return errors

    def _read(self, region: Region, fresh: Set[int]) -> list[SlotPair]:
        """The pairs of tensors that are visible to a segment and were compared before it."""
        return [
            SlotPair("", "", record, self.first[record])
            for record in region.inputs
            if record not in fresh and (record, self.first.get(record, -1)) in self.paired.measured
        ]

    def _unread(self, call: Call, outputs: Sequence[RegionOutput]) -> Set[int]:
        """Records (inputs of the call and outputs of its children) from which the reference's
        program does not compute these outputs; empty without a program.
        """
        program = self.paired.reference.programs.get(call.program)
        if program is None:
            return frozenset()
        ends = dict(program.outputs)
        if any(output.name not in ends for output in outputs):
            return frozenset()
        read = inputs_of(program, [ends[output.name] for output in outputs])
        kids = list(enumerate(self.paired.kids.get(call.id, ())))
        hidden = {k for k, kid in kids if kid not in self.paired.pair_of}
        if any(is_of_child(slot) and split_child(slot)[0] in hidden for slot in read):
            return frozenset()  # an unpaired child may use anything that it reads
        seen = [(ref.slot, ref.record) for ref in call.slots("input")]
        seen += [
            (f"{k}:{ref.slot}", ref.record)
            for k, kid in kids
            for ref in self.paired.calls[kid].slots("output")
        ]
        return {record for _, record in seen} - {record for slot, record in seen if slot in read}

    def _candidates(self, region: Region, index: int) -> Iterator[tuple[str, SlotPair]]:
        """(name, pair) of each tensor that the next child reads, or that the container returns."""
        children = self.paired.kids.get(region.call, [])
        if region.stretch < len(children):
            for slot in self.paired.slots_of(children[region.stretch]).values():
                if is_input(slot.reference_slot) and not is_own_input(slot.reference_slot):
                    yield f"{region.stretch}:{slot.reference_slot}", slot
            return
        for slot in self.paired.slots[index].values():
            if is_written(slot.reference_slot):
                yield slot.reference_slot, slot

    def _own(
        self, region: Region, pair: PairedCall, candidates: Iterable[tuple[str, SlotPair]]
    ) -> tuple[list[RegionOutput], set[int]]:
        """(tensors that this segment computed, records of the reference that are new here)."""
        region_outputs = set(region.outputs)
        outputs: list[RegionOutput] = []
        fresh: set[int] = set()
        for name, slot in candidates:
            # Tensors of calls without a partner were never compared before.
            is_handed_on = (
                slot.reference_record not in region_outputs and slot.reference_record in self.first
            )
            first = self.first.setdefault(slot.reference_record, slot.target_record)
            # The reference passed this tensor on unchanged; the target may have changed it.
            is_changed = first != slot.target_record and not self._have_one_content(
                first, slot.target_record
            )
            is_made_before = (
                slot.reference_record in self._parameters.made_before
                and not self.paired.is_equal(slot)
            )
            if (
                (is_changed or not is_handed_on)
                and not is_made_before
                and not self._positions.given(slot)
                and not self._positions.counts_padding(pair.call, pair.partner, slot)
            ):
                outputs.append(
                    RegionOutput(name, slot, self.errors.of(slot), self.paired.is_equal(slot))
                )
                fresh |= set() if is_handed_on else {slot.reference_record}
        return outputs, fresh

    def _parameters_of(
        self, region: Region, pair: PairedCall
    ) -> tuple[list[tuple[str, judge.ParameterDifference]], dict[str, str]]:
        """(differences, scopes) of the container's parameters and of those of unpaired calls
        inside; empty for all segments but the first. scopes: of the latter, by slot.
        """
        if region.stretch != 0:
            return [], {}
        _, _, parameters = self._parameters.by_role(pair.call, self.paired.slots[pair.index])
        scopes: dict[str, str] = {}
        for scope, name, difference in self._parameters.inside(pair.call, pair.partner):
            scopes[f"{scope}.{name}"] = scope
            parameters.append((f"{scope}.{name}", difference))
        return parameters, scopes

    def _have_one_content(self, *records: int) -> bool:
        """Whether these records of the target have hashes and these are equal."""
        hashes = {self.paired.target.records[record].hash for record in records}
        return len(hashes) == 1 and all(hashes)

    def _is_behind_hidden_calls(self, region: Region) -> bool:
        """Whether more than `_FEW_HIDDEN` leaf calls right before a segment have no measured
        output.
        """
        hidden = 0
        for child in reversed(self.paired.kids.get(region.call, [])[: region.stretch]):
            if hidden > _FEW_HIDDEN or self._shows_something(child):
                break
            inside = inwards(self.paired.kids, child)
            hidden += sum(number not in self.paired.kids for number in inside)
        return hidden > _FEW_HIDDEN

    def _shows_something(self, call: int) -> bool:
        """Whether an output of this call, or of a call inside it, was measured."""
        slots = self.paired.slots_of(call).values()
        outputs = (s for s in slots if is_written(s.reference_slot))
        if any(self.errors.of(s).value is not None for s in outputs):
            return True
        return any(map(self._shows_something, self.paired.kids.get(call, ())))
