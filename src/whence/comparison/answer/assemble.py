"""The answer of a comparison put together: verdicts become findings, counts, rows and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from whence import align
from whence.comparison.answer import summary
from whence.comparison.answer.alike import alike
from whence.comparison.answer.coverage import CallCoverage
from whence.comparison.answer.finding_details import with_worst
from whence.comparison.answer.layer_costs import layer_costs
from whence.comparison.answer.occurrences import counted, of_operators
from whence.comparison.answer.origin import OriginTracer, flow_of
from whence.comparison.answer.runs import versions
from whence.comparison.context import Context, timed
from whence.comparison.verdicts import compiled_kernels, indices, loss_scale
from whence.comparison.verdicts.findings import findings, order_and_taint, remarks
from whence.comparison.verdicts.random_draws import random_numbers
from whence.comparison.verdicts.status import decide
from whence.comparison.views.rows import viewed
from whence.results import Comparison, Finding, Remark, Status, Verdict


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
        *compiled_kernels.notes(paired, replays),
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
