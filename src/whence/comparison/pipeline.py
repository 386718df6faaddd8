"""The stages of a comparison in order: plan, measure, first things first, judge, locate, answer."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from whence import align, extras
from whence.comparison.answer import generation
from whence.comparison.answer.occurrences import counted, of_operators
from whence.comparison.answer.origin import OriginTracer, flow_of
from whence.comparison.answer.summary import Summary
from whence.comparison.inputs.positions_masks import PositionsAndMasks
from whence.comparison.inputs.root_inputs import RootInputs
from whence.comparison.options import CompareOptions
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.prepare import rewritten_modules
from whence.comparison.prepare.labels import plain as labelled_plain
from whence.comparison.prepare.stored_precision import StoredPrecisionRun, as_computed
from whence.comparison.prepare.whole_model import put_together
from whence.comparison.verdicts import compiled_kernels, rewritten
from whence.comparison.verdicts.checkpoints import complete
from whence.comparison.verdicts.findings import findings, order_and_taint, remarks
from whence.comparison.verdicts.indices import notes as notes_of_ties
from whence.comparison.verdicts.operator_forms import formed
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.patched import declare_patched
from whence.comparison.verdicts.ranks import RankFaults
from whence.comparison.verdicts.regions import RegionJudge
from whence.comparison.verdicts.repeated_runs import RepeatedRuns
from whence.comparison.verdicts.source_lines import placed
from whence.comparison.verdicts.sparse_target import inside
from whence.comparison.verdicts.status import decide
from whence.comparison.verdicts.third_run import ThirdRunJudge
from whence.comparison.views.rows import viewed
from whence.readers.figures import with_figures
from whence.records import Run, regions
from whence.records.views import CachedRun
from whence.results import Comparison

NO_TORCH = (
    "torch is not installed here, so nothing is replayed: judged from the two dumps alone. For "
    "replay: pip install 'whence[torch]', or "
    "compare on a machine that has it"
)


def without_replay(
    reference: Run, target: Run, options: CompareOptions
) -> tuple[CompareOptions, tuple[str, ...]]:
    """The options as far as they can be followed here, and a note: recorded programs run in torch,
    of Paddle's models too.
    """
    if not options.replay or not (reference.programs or target.programs) or extras.is_here("torch"):
        return options, ()
    return replace(options, replay=False), (NO_TORCH,)


def brought_face_to_face(
    reference: Run, target: Run, options: CompareOptions
) -> tuple[CachedRun, CachedRun, align.Aligned]:
    """Both runs as they are compared, and the plan with the runs it speaks of."""
    within = functools.partial(inside, allow=options.allow) if options.replay else None
    own, other = (
        CachedRun(as_computed(with_figures(reference))),
        CachedRun(as_computed(with_figures(target))),
    )
    aligned = align.align(own, other, match=options.match, chart=options.chart, inside=within)
    return own, other, rewritten_modules.judged_by_module(aligned, options.match, options.chart)


def compare_runs(
    reference: Run,
    target: Run,
    options: CompareOptions,
    *,
    again: Sequence[Run] = (),
    third: Run | None = None,
) -> Comparison:
    """Compare two opened runs. Reads all, writes nothing. again: further runs of the reference;
    third: it in higher precision.
    """
    if generation.logits_alone(reference, target):
        return generation.compare_logits(reference, target, options, again, third)
    options, unreplayed = without_replay(reference, target, options)
    timing: dict[str, float] = {}

    def tell(done: int, of: int, what: str) -> None:
        if options.progress is not None:
            options.progress(done, of, what)

    with _Timer(timing, "plan"):
        reference, target, labelled = labelled_plain(reference, target)
        own, other, aligned = brought_face_to_face(reference, target, options)
        left, right = CachedRun(aligned.reference), CachedRun(aligned.target)

    def beside(run: Run) -> CachedRun:
        """A run of the reference's program in the form that the reference was brought to."""
        if aligned.reference is own:
            return CachedRun(run)
        alike = align.align(
            CachedRun(run), other, match=options.match, chart=options.chart
        ).reference
        return CachedRun(rewritten_modules.folded_like(left.base, alike))

    with _Timer(timing, "again"):
        further = [beside(with_figures(run)) for run in again]
        repeated = RepeatedRuns(
            left,
            further,
            allow=options.allow,
            model=options.model,
            threads=options.threads,
            tell=tell,
        )
    with _Timer(timing, "third"):
        finer = ThirdRunJudge(
            left, right, beside(with_figures(third)) if third is not None else None, tell=tell
        )
    paired = PairedRuns(
        left, right, put_together(aligned.plan, left.calls, right.calls), options, tell
    )
    errors = PairErrors(paired, options.policy, repeated)
    with _Timer(timing, "measure"):
        paired.measure()
    otherwise = PositionsAndMasks(paired, errors.of)
    first = RootInputs(paired, otherwise, errors.of)
    inputs_differ = first.sentences()
    with _Timer(timing, "judge"):
        tiles = list(regions(paired.calls))
        repeated.find(tiles)
        judging = RegionJudge(errors, tiles, options, repeated, otherwise, tell)
        verdicts = RankFaults(judging).explained(judging.verdicts())
        figures = (
            (call, local) for call, found in judging.locals.items() for local in found.values()
        )
        verdicts = repeated.explained(verdicts, figures)
        verdicts = finer.judged(verdicts, tiles, judging.first, errors.of)
        verdicts = otherwise.judged(verdicts, first.differ)
        verdicts = first.doubted(
            complete(formed(rewritten.doubted(verdicts, errors), errors), paired)
        )
        verdicts = declare_patched(verdicts, paired.plan.pairs, paired.calls, right.calls)
        verdicts = placed(compiled_kernels.named(verdicts, paired), paired)
    answer = Summary(paired, judging, finer)
    with _Timer(timing, "locate"):
        judged = order_and_taint(paired.calls, tiles, verdicts, judging.blind.calls)
        found = [
            answer.with_worst(f) for f in findings(judged, paired.calls, paired.plan, align.starred)
        ]
        noted = remarks(judged, paired.calls, found, align.starred)
    per_call = answer.per_call(verdicts)
    coverage = answer.coverage(per_call)
    if not paired.measured:  # a dump without tensors
        coverage = msgspec.structs.replace(coverage, measured=0, root_outputs_measured=False)
    every, plan = tuple(verdicts.values()), paired.plan
    status, why = decide(
        found,
        every,
        coverage,
        inputs_differ=bool(inputs_differ),
        strict=options.strict,
        min_coverage=options.min_coverage,
        partly=answer.partly(),
    )
    result = Comparison(
        status=status,
        evidence=answer.evidence(every, found),
        reference=left.path,
        target=right.path,
        findings=tuple(found),
        first_difference=answer.first_difference(per_call),
        counts=answer.counts(per_call),
        coverage=coverage,
        unmatched=len(plan.unmatched_reference)
        - coverage.inside
        + len(plan.unmatched_target)
        + len(plan.ambiguous),
        incomparable=answer.incomparable(),
        inputs_differ=tuple(inputs_differ),
        versions=answer.versions(),
        plan=plan,
        rows=tuple(answer.rows(per_call)),
        verdicts=every,
        headline=why,
        notes=(
            *unreplayed,
            *labelled,
            *repeated.notes,
            *finer.notes,
            *judging.sampling.notes(len(judging.not_replayed)),
            *judging.tapped.notes,
            *first.notes,
            *otherwise.notes(),
            *notes_of_ties(
                every,
                [
                    paired.calls[p.reference].scope or paired.calls[p.reference].root
                    for p in plan.pairs
                ],
            ),
            *(
                said
                for run in (own.base, other.base)
                if isinstance(run, StoredPrecisionRun)
                for said in run.said
            ),
            *errors.declaring.notes(),
            *compiled_kernels.notes(paired, judging),
            *(options.model.notes() if options.model is not None else ()),
            *answer.run_notes(),
            *(judging.replayer.reference.notes() if judging.replayer is not None else ()),
        ),
        remarks=tuple(noted),
        declared=errors.declaring.summary(),
        repetition=repeated.summary(),
        third=finer.summary(verdicts, plan.pairs),
        without_partner=answer.without_partner(),
        nearest=answer.nearest(),
        environment=tuple(align.differences(left, right)),
        timing=timing,
        views=viewed(paired, options.views, per_call, tell) if options.views else {},
    )
    if options.occurrences or of_operators(paired):
        tracer = OriginTracer(flow_of(paired.reference, right, plan, result.rows, every))
        start = tracer.first() if of_operators(paired) and tracer.significant else None
        result = msgspec.structs.replace(
            result,
            occurrences=counted(paired, per_call, tracer.significant),
            origin=tracer.origin(start) if start is not None else None,
        )
    with _Timer(timing, "tokens"):
        made, unknown = generation.generated(own, other, result, paired.calls)
    return msgspec.structs.replace(result, generation=made, notes=(*result.notes, *unknown))


class _Timer:
    def __init__(self, table: dict[str, float], name: str) -> None:
        self.table, self.name = table, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.table[f"{self.name}_s"] = time.perf_counter() - self.start
