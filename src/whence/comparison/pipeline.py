"""A comparison of two runs: align and measure them, pass verdicts through the stages, answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from whence.comparison import equal_runs
from whence.comparison.answer import assemble, generation
from whence.comparison.answer.effect import effect
from whence.comparison.answer.runs import ended
from whence.comparison.context import Context, context_of, followed, timed
from whence.comparison.differing_part import DifferingPart, differing_part
from whence.comparison.options import CompareOptions
from whence.comparison.ranks.target_alone import with_ranks
from whence.comparison.verdicts import (
    after_steps,
    checkpoints,
    compiled_kernels,
    gradient_flow,
    loss_scale,
    operator_forms,
    random_draws,
    returned_shapes,
    rewritten,
)
from whence.comparison.verdicts.causes.explained import explained
from whence.comparison.verdicts.patched import declare_patched
from whence.comparison.verdicts.ranks import RankFaults
from whence.comparison.verdicts.source_lines import placed
from whence.records import Call, Run
from whence.records.views import CachedRun
from whence.results import Comparison, Verdict
from whence.store import StoredRun

Verdicts = dict[tuple[int, int], Verdict]
"""By call of the reference and segment of it, -1 for a leaf."""
Stage = Callable[[Verdicts, Context], Verdicts]
"""Looks at the verdicts so far and gives new ones; writes nothing in the context."""


def _excuse_what_does_not_repeat(verdicts: Verdicts, context: Context) -> Verdicts:
    figures = (
        (call, local)
        for call, by_slot in context.judge.replays.figures.items()
        for local in by_slot.values()
    )
    return context.repeated.explained(verdicts, figures)


def _judge_three_ways(verdicts: Verdicts, context: Context) -> Verdicts:
    return context.third.judged(
        verdicts, list(context.regions), context.judge.first, context.errors.of
    )


def _declare_patched(verdicts: Verdicts, context: Context) -> Verdicts:
    paired = context.paired
    return declare_patched(verdicts, paired.plan.pairs, paired.calls, context.prepared.target.calls)


# The order is the method.
STAGES: dict[str, Stage] = {
    # In words of ranks, before anything is excused.
    "ranks": lambda verdicts, c: RankFaults(c.judge.replays).explained(verdicts),
    "repeated runs": _excuse_what_does_not_repeat,
    # Only where nothing was replayed.
    "third run": _judge_three_ways,
    # Integers that the callers gave differently: guilty only where an output depends on them.
    "positions": lambda verdicts, c: c.positions.judged(verdicts, c.root_inputs.differ),
    # Growth says little of modules that are written differently.
    "rewritten": lambda verdicts, c: rewritten.doubted(verdicts, c.errors),
    # What sizes cannot show: another form of an operator, other arguments.
    "operator forms": lambda verdicts, c: operator_forms.formed(verdicts, c.errors),
    # Random numbers that were drawn by other settings, and those that were not recorded.
    "random draws": lambda verdicts, c: random_draws.judged(verdicts, c.paired),
    # Losses whose other scale is taken out again.
    "loss scale": lambda verdicts, c: loss_scale.undone(verdicts, c.paired),
    # Parameters that are not what the step before left.
    "after steps": lambda verdicts, c: after_steps.blamed(verdicts, c.errors),
    # Tensors through which a gradient flows in one run only.
    "gradient flow": lambda verdicts, c: gradient_flow.stopped(verdicts, c.paired),
    # A module whose parameters the checkpoint lacks.
    "checkpoints": lambda verdicts, c: checkpoints.complete(verdicts, c.paired),
    # What something behind it takes back is another form of the same computation.
    "travels": lambda verdicts, c: c.neighbourhoods.judged(verdicts),
    # The same where no program says so.
    "data flow": lambda verdicts, c: c.data_flow.judged(verdicts),
    # Steps of operators that nothing paired shows.
    "steps": lambda verdicts, c: c.neighbourhoods.with_steps(verdicts),
    # Models that were given different inputs prove little by their outputs.
    "root inputs": lambda verdicts, c: c.root_inputs.doubted(verdicts),
    # Elements that agree in other axes are another result, unless a map says that it is meant.
    "returned shapes": lambda verdicts, c: (
        verdicts if c.options.chart else returned_shapes.blamed(verdicts, c.paired)
    ),
    "patched": _declare_patched,
    # Names for what is guilty by now: kernels, then lines of source.
    "compiled kernels": lambda verdicts, c: compiled_kernels.named(verdicts, c.paired),
    "source lines": lambda verdicts, c: placed(verdicts, c.paired),
    # Why, where the runs hold more than the verdict needed.
    "causes": lambda verdicts, c: explained(verdicts, c.paired),
}


def judge_regions(context: Context) -> Verdicts:
    """A verdict for every region whose call has a partner, after all stages."""
    verdicts = context.judge.verdicts()
    for stage in STAGES.values():
        verdicts = stage(verdicts, context)
    return verdicts


def compare_runs(
    reference: Run,
    target: Run,
    options: CompareOptions,
    *,
    again: Sequence[Run] = (),
    third: Run | None = None,
) -> Comparison:
    """Compare two opened runs. Reads all, writes nothing. again: further runs of the reference;
    third: a run of it in higher precision.
    """
    if generation.logits_alone(reference, target):
        result = generation.compare_logits(reference, target, options, again, third)
        return ended(result, reference, target, options)
    options, not_replayed = followed(reference, target, options)
    alone = not again and third is None and not not_replayed
    if alone and (equal := equal_runs.answer(reference, target, options)) is not None:
        return ended(equal, reference, target, options)
    part = differing_part(reference, target, options) if alone else None
    if part is not None:
        answer = _compared_in_part(part, reference, target, options)
        if answer is not None:
            return ended(answer, reference, target, options)
    reference, target = (
        CachedRun(run) if isinstance(run, StoredRun) else run for run in (reference, target)
    )
    context = context_of(reference, target, options, again=again, third=third)
    prepared, result = context.prepared, _answered(context, not_replayed)
    result = _with_tokens(
        result, context, prepared.read_reference, prepared.read_target, context.paired.calls
    )
    with timed(context.timing, "ranks"):
        result = with_ranks(result, reference, target)
    return ended(result, prepared.read_reference, prepared.read_target, options)


def _compared_in_part(
    part: DifferingPart, reference: Run, target: Run, options: CompareOptions
) -> Comparison | None:
    """The comparison of runs whose stages look at a part of them; None where a stage would have
    taken the whole otherwise.
    """
    context = context_of(part.reference, part.target, options, left_out=part.left_out)
    if not part.fits(context):
        return None
    result = part.whole(_answered(context, ()))
    if not part.columns.may_hold_tokens():
        return msgspec.structs.replace(result, effect=effect(context.paired, context.errors))
    read = CachedRun(reference)
    return _with_tokens(result, context, read, CachedRun(target), read.calls)


def _answered(context: Context, not_replayed: Sequence[str]) -> Comparison:
    with timed(context.timing, "judge"):
        verdicts = judge_regions(context)
    return assemble.comparison(context, verdicts, not_replayed)


def _with_tokens(
    result: Comparison, context: Context, reference: Run, target: Run, calls: Sequence[Call]
) -> Comparison:
    """The answer with what both runs generated, and what the differences come to at the outputs.
    calls: of the reference, which the answer speaks of.
    """
    with timed(context.timing, "tokens"):
        generated, unknown = generation.generated(reference, target, result, calls)
    return msgspec.structs.replace(
        result,
        generation=generated,
        notes=(*result.notes, *unknown),
        effect=effect(context.paired, context.errors, generated),
    )
