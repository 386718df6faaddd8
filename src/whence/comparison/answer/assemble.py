"""The answer of a comparison put together: verdicts become findings, counts, rows and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whence import align, dtypes, judge
from whence.align import step_of
from whence.comparison.answer import summary
from whence.comparison.answer.coverage import CallCoverage
from whence.comparison.answer.origin import OriginTracer, flow_of
from whence.comparison.answer.runs import versions
from whence.comparison.context import Context, timed
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.verdicts import indices, loss_scale
from whence.comparison.verdicts.findings import findings, order_and_taint, remarks
from whence.comparison.verdicts.quantised.programs import LayerPrograms
from whence.comparison.verdicts.quantised.weights import CodedParameters
from whence.comparison.verdicts.random_draws import random_numbers
from whence.comparison.verdicts.returned_shapes import reshaped
from whence.comparison.verdicts.status import decide
from whence.comparison.views.rows import viewed
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call
from whence.records.marks import Mark, has_mark
from whence.records.quantised import F64, Coded, QuantisedLayer
from whence.records.slots import is_of_child, is_output, is_param, is_written, split_child
from whence.results import (
    GUILTY,
    Alike,
    Comparison,
    Counted,
    Finding,
    LayerCost,
    Occurrence,
    Occurrences,
    Remark,
    SlotPair,
    Status,
    Verdict,
    VerdictKind,
)


def comparison(
    context: Context, verdicts: Mapping[tuple[int, int], Verdict], not_replayed: Sequence[str]
) -> Comparison:
    """The answer. not_replayed: notes that say why nothing was replayed."""
    paired, options, plan = context.paired, context.options, context.paired.plan
    with timed(context.timing, "locate"):
        guilty, remarked = _findings(context, verdicts)
    covered = CallCoverage(context.judge.replays, context.judge.sparse.covered, context.covers)
    per_call, coverage = covered.per_call(verdicts), covered.coverage()
    inside = {inner for call in covered.inside for inner in paired.alone(call)}
    every = tuple(verdicts.values())
    unmeasured = summary.unmeasured(context.errors)
    inputs_differ = (*context.differing_inputs, *context.positions.padded(matters=True))
    if inputs_differ and context.neighbourhoods.make_up_for_inputs():
        inputs_differ = ()
    decision = decide(
        guilty,
        every,
        coverage,
        summary.gaps(paired, unmeasured, covered.partly()),
        inputs_differ=bool(inputs_differ),
        strict=options.strict,
        min_coverage=options.min_coverage,
    )
    costs = layer_costs(context, every)
    why_no_shares = [costs.why_no_shares] if costs.why_no_shares else []
    views = viewed(paired, options.views, per_call, paired.progress) if options.views else {}
    result = Comparison(
        status=decision.status,
        evidence=summary.evidence(paired, every, guilty),
        reference=context.prepared.reference.path,
        target=context.prepared.target.path,
        findings=tuple(guilty),
        first_difference=summary.first_difference(paired, per_call),
        counts=summary.counts(paired, per_call),
        coverage=coverage,
        unmatched=summary.unmatched(plan) - coverage.inside,
        incomparable=len(unmeasured),
        inputs_differ=inputs_differ,
        versions=versions(paired.reference),
        plan=plan,
        rows=tuple(summary.rows(paired, context.third, per_call)),
        verdicts=every,
        headline=decision.why,
        undecided=decision.undecided,
        notes=(*not_replayed, *_notes(context, every, unmeasured), *why_no_shares),
        remarks=tuple(remarked),
        declared=context.errors.declared.ledger.summary(),
        layer_costs=costs.costs,
        alike=alike(paired, per_call) if decision.status == Status.SAME else (),
        random_numbers=random_numbers(paired),
        repetition=context.repeated.summary(),
        third=context.third.summary(verdicts, plan.pairs),
        without_partner=summary.without_partner(paired, inside),
        nearest=summary.nearest(paired, inside),
        environment=tuple(align.differences(context.prepared.reference, context.prepared.target)),
        timing=context.timing,
        views=views,
        visible=tuple(summary.visible(paired, every)),
    )
    if options.occurrences or of_operators(paired):
        return _with_origin(result, context, per_call)
    return result


def _findings(
    context: Context, verdicts: Mapping[tuple[int, int], Verdict]
) -> tuple[list[Finding], list[Remark]]:
    paired, unseen = context.paired, context.judge.unseen.calls
    judged = order_and_taint(paired.calls, list(context.regions), verdicts, unseen)
    guilty = [
        with_worst(finding, paired)
        for finding in findings(judged, paired.calls, paired.plan, align.starred)
    ]
    return guilty, remarks(judged, paired.calls, guilty, align.starred)


def _notes(
    context: Context, verdicts: Sequence[Verdict], unmeasured: Mapping[tuple[int, int], str]
) -> list[str]:
    """What else a reader has to know, in the order in which it arose."""
    paired, judge = context.paired, context.judge
    calls = [paired.calls[p.reference] for p in paired.plan.pairs]
    model, replays = context.options.model, judge.replays
    return [
        *context.labels_notes,
        *context.repeated.notes,
        *context.third.notes,
        *replays.sampling.notes(len(replays.not_replayed)),
        *replays.padded.notes(),
        *judge.sparse.notes,
        *judge.parameters.notes(),
        *context.root_inputs.notes,
        *context.positions.notes(),
        *loss_scale.notes(verdicts, paired),
        *indices.notes(verdicts, [call.module_name for call in calls]),
        *context.prepared.notes(),
        *context.errors.declared.ledger.notes(),
        *(model.notes() if model is not None else ()),
        *summary.unmeasured_notes(paired, unmeasured),
        *summary.run_notes(paired),
        *(replays.replayer.reference.notes() if replays.replayer is not None else ()),
    ]


def _with_origin(result: Comparison, context: Context, per_call: Mapping[int, str]) -> Comparison:
    """The answer with a count of each operator's executions, and the way an error of operators
    came.
    """
    paired = context.paired
    flow = flow_of(
        paired.reference, context.prepared.target, paired.plan, result.rows, result.verdicts
    )
    tracer = OriginTracer(flow)
    start = tracer.first() if of_operators(paired) and tracer.significant else None
    return msgspec.structs.replace(
        result,
        occurrences=counted(paired, per_call, tracer.significant),
        origin=tracer.origin(start) if start is not None else None,
    )


# Tensors that pass although rounding does not explain their bits: fill values of masks, and masks
# in another form.

_JUDGED_OTHERWISE: Collection[str] = (
    *GUILTY,
    VerdictKind.UNDETERMINED,
    VerdictKind.DECLARED,
    VerdictKind.OTHER_FORM,
    VerdictKind.INCOMPARABLE,
)


def alike(paired: PairedRuns, per_call: Mapping[int, str]) -> tuple[Alike, ...]:
    """Every tensor of a passing call that differs in its mask or shape only, once, in execution
    order. per_call: the verdict of each call of the reference.
    """
    tensors: dict[tuple[int, int], Alike] = {}
    for index, pair in enumerate(paired.plan.pairs):
        if per_call.get(pair.reference, "") in _JUDGED_OTHERWISE:
            continue
        call = paired.calls[pair.reference]
        for slot in paired.slots[index].values():
            key = slot.reference_record, slot.target_record
            if key in tensors or is_param(slot.reference_slot):
                continue
            for elements, words in _unlike(paired, slot):
                name = call.module_name
                tensors[key] = Alike(name, slot.reference_slot, call.step, elements, words)
    for returned in reshaped(paired):
        slot = returned.slot
        call = paired.pair(returned.pair).call
        elements = paired.reference.records[slot.reference_record].count
        tensors[slot.reference_record, slot.target_record] = Alike(
            call.module_name,
            slot.reference_slot,
            call.step,
            elements,
            f"returned as {returned.words} in the reference",
        )
    return tuple(tensors.values())


def _unlike(paired: PairedRuns, slot: SlotPair) -> Iterator[tuple[int, str]]:
    """(number of elements, words): the elements that differ in the fill of a mask, or the two forms
    of a mask. Empty for any other pair.
    """
    measured = paired.measured[slot.reference_record, slot.target_record]
    reference, target = paired.records(slot)
    if measured.identical:
        shown = paired.shown.records[slot.target_record]
        if shown.dtype != reference.dtype or shown.shape != reference.shape:
            forms = (
                f"{reference.dtype} {list(reference.shape)}",
                f"{shown.dtype} {list(shown.shape)}",
            )
            yield reference.count, f"a mask that says the same as {forms[0]} and as {forms[1]}"
        return
    kinds = [dtypes.DTYPES.get(record.dtype) for record in (reference, target)]
    if not all(kind is not None and kind.kind == "float" for kind in kinds):
        return
    may_be_filled = bool(measured.values.get("inf_mismatch")) or (
        judge.is_filled(reference) and judge.is_filled(target)
    )
    arrays = paired.arrays_of_one_shape(slot) if may_be_filled else None
    if arrays is None:
        return
    differ = judge.filled_otherwise(*arrays)
    if count := int(np.count_nonzero(differ)):
        place = np.unravel_index(int(np.argmax(differ)), differ.shape)
        a, b = (float(array[place]) for array in arrays)
        yield count, f"{a:.6g} against {b:.6g}"


# Counts the executions of each operator, by type and by name, and finds the first that differs from
# its partner.

_OPERATORS = 0.5  # share of calls that are operators, from which on a run is one of operators


def of_operators(paired: PairedRuns) -> bool:
    """Whether the runs consist of operators (a predictor, a dump of a graph), not of modules."""
    leaves = [c for c in paired.calls if c.leaf]
    return bool(leaves) and sum(c.kind == "operator" for c in leaves) >= _OPERATORS * len(leaves)


def counted(
    paired: PairedRuns, per_call: Mapping[int, str], significant: Collection[int]
) -> Occurrences:
    """The table of operators and their executions. per_call: the verdict of each paired call of the
    reference. significant: ids of calls whose difference rounding does not explain.

    Calls that the capture did not select are left out. An execution is equal if all its outputs are
    bitwise equal.
    """
    rows: dict[tuple[str, str], list[tuple[Occurrence | None, bool, bool]]] = {}
    for call in sorted(align.selected(paired.calls), key=lambda c: (c.step, c.micro, c.order)):
        if not call.leaf or has_mark(call, Mark.PUT_TOGETHER):
            continue
        occurrence, differs = _occurrence(paired, call, per_call)
        for key in (("type", call.op_type or call.scope), ("name", call.module_name)):
            rows.setdefault(key, []).append((occurrence, differs, call.id in significant))
    table = tuple(_row(by, name, listed) for (by, name), listed in rows.items())
    by_type = [row for row in table if row.by == "type"]

    def earliest(column: str) -> Occurrence | None:
        occurrences = [
            occurrence for row in by_type if (occurrence := getattr(row, column)) is not None
        ]
        return min(
            occurrences,
            key=lambda occurrence: (
                paired.calls[occurrence.call].step,
                paired.calls[occurrence.call].micro,
                paired.calls[occurrence.call].order,
            ),
            default=None,
        )

    return Occurrences(
        earliest("first_difference"),
        earliest("first_significant"),
        tuple(r for r in table if r.by == "type" or r.count > 1),
    )


def _occurrence(
    paired: PairedRuns, call: Call, per_call: Mapping[int, str]
) -> tuple[Occurrence | None, bool]:
    """(the execution, whether it differs); the former is None if the call has no partner or no
    measured output.
    """
    slots = [s for s in paired.slots_of(call.id).values() if is_written(s.reference_slot)]
    measured = [
        m
        for s in slots
        if (m := paired.measured[s.reference_record, s.target_record]).tier != "none"
    ]
    if not measured:
        return None, False
    worst = max((m.values.get("rel_l2") or 0.0 for m in measured), default=0.0)
    name = call.module_name
    verdict = per_call.get(call.id, "")
    return Occurrence(0, call.id, name, call.op_type, call.step, verdict, worst), not all(
        m.identical for m in measured
    )


def _row(by: str, name: str, listed: list[tuple[Occurrence | None, bool, bool]]) -> Counted:
    first = significant = None
    equal = differing = compared = 0
    for number, (occurrence, differs, is_significant) in enumerate(listed, 1):
        if occurrence is None:
            continue
        compared += 1
        if not differs:
            equal += first is None
            continue
        differing += 1
        numbered = msgspec.structs.replace(occurrence, number=number)
        first = first or numbered
        significant = significant or (numbered if is_significant else None)
    return Counted(by, name, len(listed), compared, equal, differing, first, significant)


# Adds to a finding the element that differs most, and where the target keeps it.

_CLEARLY = 0.1  # share of the largest error of any token, from which on a token differs clearly
_LONGEST = 80  # characters of a dims expression that are shown


def with_worst(finding: Finding, paired: PairedRuns) -> Finding:
    """The finding with the element that has the largest error, its value on both sides, and, for a
    rearranged tensor, its place in the target.
    """
    finding = _with_layout(finding, paired)
    if finding.pair < 0 or finding.verdict == VerdictKind.PARAM_DIFF:
        return finding
    slots = paired.slots[finding.pair]
    slot = paired.slot(finding.pair, finding.slot) if finding.slot else None
    slot = slot or next((s for s in slots.values() if is_output(s.reference_slot)), None)
    if slot is None:
        return finding
    finding = msgspec.structs.replace(finding, printed_at=_printed_at(paired, slot))
    measured = paired.measured[slot.reference_record, slot.target_record]
    arrays = paired.arrays_of_one_shape(slot)
    place = measured.max_abs_index
    if arrays is None or place is None:
        return finding
    since = _since(paired, finding, arrays)
    numbers = {
        k: measured.values.get(k)
        for k in ("rel_l2", "cosine_similarity", "max_abs_err")
        if k in measured.values
    }
    return msgspec.structs.replace(
        finding,
        slot=_slot_name(paired, finding, slot),
        worst_index=place,
        worst_reference=_number(arrays[0][place]),
        worst_target=_number(arrays[1][place]),
        numbers={**finding.numbers, **numbers},
        sentence=finding.sentence + since,
    )


def _printed_at(paired: PairedRuns, slot: SlotPair) -> tuple[str, ...]:
    """("file:line" of the reference, of the target) of a tensor in two logs; () if a side is not a
    log.
    """
    sides = (paired.reference, slot.reference_record), (paired.target, slot.target_record)
    lines = [
        f"{name}:{row}"
        for run, record in sides
        if 0 <= record < len(run.records)
        for name, _, row in (run.records[record].file.rpartition(","),)
        if row.isdigit()
    ]
    return tuple(lines) if len(lines) == len(sides) else ()


def _with_layout(finding: Finding, paired: PairedRuns) -> Finding:
    """The finding with the place of its tensor in the target, or, if the tensor was joined from
    several, the ones that differ.
    """
    slot = paired.slot(finding.pair, finding.slot) if finding.pair >= 0 and finding.slot else None
    if slot is None or not slot.dims or _since(paired, finding, paired.arrays(slot)):
        return finding
    arrays = paired.arrays(slot)
    parts: tuple[str, ...] = ()
    if arrays is not None and arrays[0].shape == arrays[1].shape:
        # All elements of an activation differ a little, so only the largest errors count.
        error = (
            np.abs(arrays[1].astype(np.float64) - arrays[0].astype(np.float64))
            if arrays[0].dtype.kind not in "bc"
            else None
        )
        if error is not None and np.isfinite(error).all():
            limit = 0.0 if finding.verdict == VerdictKind.PARAM_DIFF else float(error.max()) / 10
            derived = {tensor.record: tensor for tensor in paired.plan.made_target}
            parts = align.named(derived, paired.shown.records, slot.target_record, error > limit)
    where = (
        _and(parts)
        if parts
        else slot.dims
        if len(slot.dims) <= _LONGEST
        else f"{slot.dims[:_LONGEST]} ..."
    )
    return msgspec.structs.replace(finding, sentence=f"{finding.sentence}; {where} of the target")


def _since(paired: PairedRuns, finding: Finding, arrays: tuple[Array, Array] | None) -> str:
    """The first token and step that clearly differ, in words, if the calls of several steps were
    joined; else "".
    """
    if arrays is None or arrays[0].shape != arrays[1].shape:
        return ""
    pair = paired.plan.pairs[finding.pair]
    sides = {"reference": paired.calls[pair.reference], "target": paired.target.calls[pair.target]}
    for joined in reversed(paired.plan.joined):  # of the target where both were
        call = sides[joined.side]
        total, dims = sum(tokens for *_, tokens in joined.pieces), arrays[0].ndim
        # The last axis holds features, unless there is one number for each token.
        axis = next(
            (
                k
                for k in range(max(dims - 1, 1 + (dims < 3)))
                if k < dims and arrays[0].shape[k] == total
            ),
            None,
        )
        if (
            (joined.root, joined.step, joined.micro) != (call.root, call.step, call.micro)
            or len(joined.pieces) < 2
            or axis is None
        ):
            continue
        error = np.abs(arrays[1].astype(np.float64) - arrays[0].astype(np.float64))
        by_token = error.max(axis=tuple(k for k in range(dims) if k != axis))
        token = int(np.argmax(by_token > _CLEARLY * by_token.max()))
        ends = np.cumsum([tokens for *_, tokens in joined.pieces])
        step = joined.pieces[int(np.searchsorted(ends, token, side="right"))][0]
        return f"; from token {token} on, step {step} of the {joined.side}"
    return ""


def _slot_name(paired: PairedRuns, finding: Finding, slot: SlotPair) -> str:
    """The slot for display; an input of a child is named by the child ("o_proj:input.0")."""
    if not is_of_child(finding.slot):
        return slot.reference_slot
    kids = paired.kids.get(paired.plan.pairs[finding.pair].reference, [])
    k, name = split_child(finding.slot)
    if k >= len(kids):
        return slot.reference_slot
    child = paired.calls[kids[k]]
    return f"{child.scope.rpartition('.')[2] or child.op_type}:{name}"


def _and(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]


def _number(value: Any) -> float | None:
    number = complex(value)
    return number.real if np.isfinite(number.real) else None


# The cost of each quantised layer: its own loss, and the share of the error at the model's outputs
# that disappears if it alone stays in float.

_MOST_REPLAYS = 600
"""Most replays of single layers in all. Trying a layer costs one replay for each later layer."""
_REPRODUCED = 0.05
"""The chain of replayed layers reproduces the target if its outputs are off by no more than this
share of the target's squared error.
"""
_UNKNOWN = "which quantised layers to leave in float is not known: {}"


class LayerCosts(NamedTuple):
    """The quantised layers, the most costly first. why_no_shares: why their shares of the error at
    the outputs are not known; "" if they are.
    """

    costs: tuple[LayerCost, ...] = ()
    why_no_shares: str = ""


def layer_costs(context: Context, verdicts: Sequence[Verdict]) -> LayerCosts:
    """The costs of the quantised layers of a comparison."""
    costs, why = _own(context, verdicts), ""
    judge = context.judge.quantised
    has_codes = any(call.quantised is not None for call in context.paired.target.calls)
    if not costs or judge.programs is None or not has_codes:
        return LayerCosts(tuple(costs.values()))
    try:
        chain = _Chain(context, judge.programs, judge.parameters)
        why = chain.why_not_reproduced()
        costs = costs if why else chain.explained(costs)
    except (ReplayRefused, ElementsMissing) as error:
        # Layers behind some layer cannot be replayed; the layers' own losses are still known.
        why = str(error)

    def rank(cost: LayerCost) -> tuple[float, float]:
        return -(cost.explains if cost.explains is not None else -np.inf), cost.sqnr_db

    return LayerCosts(tuple(sorted(costs.values(), key=rank)), _UNKNOWN.format(why) if why else "")


def _own(context: Context, verdicts: Sequence[Verdict]) -> dict[str, LayerCost]:
    """The layers by scope with their own loss, the largest loss (lowest SQNR) first."""
    costs: dict[str, LayerCost] = {}
    pairs, calls = context.paired.plan.pairs, context.paired.calls
    quantised_modules = context.errors.declared.ledger.quantised
    for verdict in verdicts:
        sqnr = verdict.numbers.get("sqnr_db")
        pair = pairs[verdict.pair] if 0 <= verdict.pair < len(pairs) else None
        if sqnr is None or pair is None:
            continue
        call, partner = calls[pair.reference], context.paired.target.calls[pair.target]
        if call.quantised is not None:
            continue  # where both compute with codes, nothing is lost by that
        if partner.quantised is None and call.id not in quantised_modules:
            continue
        saturated = verdict.numbers.get("saturated") or 0.0
        used = verdict.numbers.get("range_used")
        before = costs.get(call.scope)
        if before is not None:
            sqnr, saturated = min(sqnr, before.sqnr_db), max(saturated, before.saturated)
        number = before.calls + 1 if before is not None else 1
        costs[call.scope] = LayerCost(
            call.scope, call.op_type, number, sqnr, saturated=saturated, range_used=used
        )
    return dict(sorted(costs.items(), key=lambda item: item[1].sqnr_db))


class _Chain:
    """The layers of the first steps, replayed one after the other with some results replaced.

    steps: the number of steps, limited by `_MOST_REPLAYS`.
    """

    def __init__(
        self, context: Context, programs: LayerPrograms, parameters: CodedParameters
    ) -> None:
        self._paired, self._programs, self._parameters = context.paired, programs, parameters
        target = context.paired.target
        every = [
            (context.paired.calls[pair.reference], target.calls[pair.target], pair)
            for pair in context.paired.plan.pairs
        ]
        layers = Counter(step_of(call) for call, partner, _ in every if partner.leaf)
        # Each layer is left in float twice, and on average half of the others follow it.
        fitting = _MOST_REPLAYS // max(layers.values(), default=1) ** 2
        steps = sorted(layers)[: max(1, fitting)]
        self.steps = len(steps)
        here = [item for item in every if step_of(item[0]) in steps]
        self._layers = sorted(
            ((call, partner) for call, partner, _ in here if partner.leaf),
            key=lambda item: item[1].order,
        )
        self._weighted = {
            call.scope
            for call, partner in self._layers
            if partner.quantised is not None and partner.quantised.weights
        }
        self._ends: list[SlotPair] = [
            slot
            for call, _, pair in here
            if call.parent == -1
            for slot in pair.slots
            if is_output(slot.reference_slot) and self._is_measured(slot)
        ]
        self._replays = 0

    def _is_measured(self, slot: SlotPair) -> bool:
        one = self._paired.reference.records[slot.reference_record]
        two = self._paired.target.records[slot.target_record]
        return dtypes.is_floating(one.dtype) and one.shape == two.shape

    def explained(self, costs: Mapping[str, LayerCost]) -> dict[str, LayerCost]:
        """The costs with the share of the outputs' error that each layer explains. Layers are tried
        in the given order until `_MOST_REPLAYS` is reached.
        """
        whole = self._error({})
        out = dict(costs)
        for name, cost in costs.items():
            if not whole or self._replays > _MOST_REPLAYS:
                break
            left = self._error(self._with_float(name, False))
            cost = msgspec.structs.replace(cost, explains=1 - left / whole, steps=self.steps)
            if name in self._weighted:
                with_codes = self._error(self._with_float(name, True))
                cost = msgspec.structs.replace(cost, weights_explain=1 - with_codes / whole)
            out[name] = cost
        return out

    def why_not_reproduced(self) -> str:
        """Why the replayed chain of layers does not give the target's outputs, "" if it does. If
        it does not, the shares that it gives would be about another model.
        """
        whole = self._error({})
        results = self._run_again()
        missing = [slot for slot in self._ends if slot.target_record not in results]
        if not self._ends or missing:
            return "the layers, run again one after the other, do not lead to the model's outputs"
        run = self._paired.target
        off = sum(
            float(np.sum((_wide(results[end]) - _wide(run.array(end))) ** 2))
            for end in {slot.target_record for slot in self._ends}
        )
        if off <= _REPRODUCED * whole:
            return ""
        share = f"{off / whole:.2g} times" if whole else "by more than"
        return (
            "the layers, run again one after the other, do not make the target's own outputs (off "
            f"{share} the squared error that was to be explained)"
        )

    def _error(self, made: Mapping[int, Array]) -> float:
        """The squared error of the outputs, with some records of the target replaced."""
        run, reference = self._paired.target, self._paired.reference
        total = 0.0
        for slot in self._ends:
            array = made.get(slot.target_record)
            produced = run.array(slot.target_record) if array is None else array
            right = reference.array(slot.reference_record).astype(np.float64)
            off = produced.astype(np.float64) - right
            total += float(np.sum(off * off))
        return total

    def _run_again(self) -> dict[int, Array]:
        """The outputs of all layers, by record, each replayed on the outputs of those before it."""
        made: dict[int, Array] = {}
        for call, partner in self._layers:
            layer = partner.quantised or _plain_layer(partner)
            self._keep(made, layer, self._as_coded(call, layer, made))
        return made

    def _keep(
        self, made: dict[int, Array], layer: QuantisedLayer, results: Sequence[Array]
    ) -> None:
        for coded, result in zip(layer.makes, results, strict=False):
            made[coded.record] = result.reshape(self._paired.target.records[coded.record].shape)

    def _with_float(self, name: str, is_rounded: bool) -> dict[int, Array]:
        """The target's results, by record, if one layer were left in float. is_rounded: as a
        quantiser leaves it out: what other quantised layers make or read stays codes.
        """
        made: dict[int, Array] = {}
        for call, partner in self._layers:
            layer = partner.quantised or _plain_layer(partner)
            is_left = call.scope == name
            reads = {record for coded in layer.reads for record in (coded.record, coded.of)}
            if not is_left and not reads & made.keys():
                continue
            self._replays += 1
            if not is_left:
                results: Sequence[Array] = self._as_coded(call, layer, made)
            elif is_rounded:
                results = self._left_out(call, partner, layer, made)
            else:
                results = self._programs.right(call, layer, {}, given=made)
            self._keep(made, layer, results)
        return made

    def _left_out(
        self, call: Call, partner: Call, layer: QuantisedLayer, made: Mapping[int, Array]
    ) -> list[Array]:
        """The results of a layer that a quantiser leaves out: values are codes where another
        quantised layer makes or reads them.
        """
        kept = self._coded_elsewhere(partner)
        array = self._paired.target.array
        unrounded = {
            coded.record: made[coded.of] if coded.of in made else array(coded.of)
            for coded in layer.reads
            if coded.of >= 0 and not {coded.record, coded.of} & kept
        }
        results = self._programs.right(call, layer, {}, given={**made, **unrounded})
        return [
            rounded if coded.record in kept else result
            for coded, result, rounded in zip(
                layer.makes, results, self._on_grid(layer, results), strict=False
            )
        ]

    def _coded_elsewhere(self, partner: Call) -> set[int]:
        """The records that another quantised layer makes or reads."""
        layers = [p.quantised for _, p in self._layers if p is not partner and p.quantised]
        return {
            record
            for layer in layers
            for coded in (*layer.reads, *layer.makes)
            for record in (coded.record, coded.of)
            if record >= 0
        }

    def _on_grid(self, layer: QuantisedLayer, results: Sequence[Array]) -> list[Array]:
        """The results rounded to the nearest values for which the layer has codes."""
        array = self._paired.target.array
        return [
            result if coded.grid is None else coded.grid.rounded(array, result)
            for coded, result in zip(layer.makes, results, strict=False)
        ]

    def _as_coded(
        self, call: Call, layer: QuantisedLayer, made: Mapping[int, Array]
    ) -> list[Array]:
        """The results of a quantised layer on other inputs (`made`, by record)."""
        programs, run = self._programs, self._paired.target
        weights = self._parameters.of(call, layer)
        if weights.all_face or not layer.weights:
            results = programs.right(call, layer, weights.values, given=made, rounds=True)
            return self._on_grid(layer, results)
        # weights without a counterpart: their contribution to the error is kept as recorded
        results = programs.right(call, layer, {}, given=made, rounds=True)
        before = programs.right(call, layer, {}, rounds=True)
        return [
            _wide(new) + _wide(run.array(coded.record).reshape(new.shape)) - _wide(old)
            for coded, new, old in zip(layer.makes, results, before, strict=False)
        ]


def _wide(array: Array) -> F64:
    out: F64 = array.astype(np.float64)
    return out


def _plain_layer(partner: Call) -> QuantisedLayer:
    """A call without quantised tensors, described as a layer."""
    return QuantisedLayer(
        tuple(Coded(ref.record) for ref in partner.slots("input")),
        tuple(Coded(ref.record) for ref in partner.slots("output")),
    )
