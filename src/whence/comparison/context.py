"""The shared input of all stages: aligned runs, measured pairs, regions, options."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from whence import align, extras
from whence.comparison.inputs.positions_masks import PositionsAndMasks
from whence.comparison.inputs.root_inputs import RootInputs
from whence.comparison.left_out import NONE_LEFT_OUT, LeftOut
from whence.comparison.options import CompareOptions
from whence.comparison.paired_runs import PairedRuns
from whence.comparison.prepare import rewritten_modules
from whence.comparison.prepare.bits_of_bfloat16 import with_numbers
from whence.comparison.prepare.gradient_names import with_gradients_of_parameters
from whence.comparison.prepare.labels import plain
from whence.comparison.prepare.opened_containers import with_containers_of_both
from whence.comparison.prepare.stored_precision import StoredPrecisionRun, as_computed
from whence.comparison.prepare.training_form import in_form_of, in_one_form
from whence.comparison.prepare.whole_model import put_together
from whence.comparison.verdicts.data_flow import DataFlow
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.regions import RegionJudge
from whence.comparison.verdicts.repeated_runs import RepeatedRuns
from whence.comparison.verdicts.sparse_target.inner_tensors import inside
from whence.comparison.verdicts.third_run import ThirdRunJudge
from whence.comparison.verdicts.travels import Neighbourhoods
from whence.readers.figures import with_figures
from whence.records import Region, Run, regions
from whence.records.views import CachedRun

NO_TORCH = (
    "torch is not installed here, so nothing is replayed: judged from the two dumps alone. For "
    f"replay: {extras.install('torch')}, or compare on a machine that has it"
)


@contextmanager
def timed(timing: MutableMapping[str, float], name: str) -> Iterator[None]:
    """Add the seconds of a block to `timing` as `name_s`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing[f"{name}_s"] = time.perf_counter() - start


def followed(
    reference: Run, target: Run, options: CompareOptions
) -> tuple[CompareOptions, tuple[str, ...]]:
    """The options as far as they can be followed here, and a note: recorded programs run in torch,
    those of Paddle models too.
    """
    if not options.replay or not (reference.programs or target.programs) or extras.is_here("torch"):
        return options, ()
    return replace(options, replay=False), (NO_TORCH,)


@dataclass(frozen=True, slots=True)
class PreparedRuns:
    """Both runs in the form in which they are compared, and the plan that pairs their calls.

    read_reference, read_target: before alignment, which may join ranks, cut batches or fold
    modules; reference, target: after it.
    """

    read_reference: CachedRun
    read_target: CachedRun
    aligned: align.Aligned
    reference: CachedRun
    target: CachedRun

    def like_reference(self, run: Run, options: CompareOptions) -> CachedRun:
        """A further run of the reference's program in the form that the reference has."""
        _, run, _ = with_numbers(self.read_reference.base, with_figures(run))
        run = in_form_of(self.read_reference.base, run)
        if self.aligned.reference is self.read_reference:
            return CachedRun(run)
        aligned = align.align(
            CachedRun(run), self.read_target, match=options.match, user_map=options.chart
        )
        return CachedRun(rewritten_modules.folded_like(self.reference.base, aligned.reference))

    def before_alignment(self) -> tuple[Run, Run] | None:
        """Both runs as they were read, where alignment made others of them."""
        read, aligned = (self.read_reference, self.read_target), self.aligned
        return None if (aligned.reference, aligned.target) == read else read

    def notes(self) -> list[str]:
        """Which tensors were computed in a coarser dtype than they are stored in."""
        bases = (self.read_reference.base, self.read_target.base)
        return [note for b in bases if isinstance(b, StoredPrecisionRun) for note in b.sentences]


def prepare(reference: Run, target: Run, options: CompareOptions) -> PreparedRuns:
    """Align two runs. Reads what the alignment needs, measures nothing."""
    within = functools.partial(inside, allow=options.allow) if options.replay else None
    reference, target, sentences = in_one_form(
        with_figures(reference),
        with_figures(target),
        unwrapped=options.match in ("auto", "names") and options.chart is None,
    )
    reference, target, about_bits = with_numbers(reference, target)
    sentences = (*sentences, *about_bits)
    read_reference = CachedRun(as_computed(reference))
    read_target = CachedRun(as_computed(target))
    aligned = align.align(
        read_reference, read_target, match=options.match, user_map=options.chart, inside=within
    )
    modules = rewritten_modules.without_operators(read_reference, read_target, aligned.plan)
    if modules is not None:
        aligned = align.align(*modules, match=options.match, user_map=options.chart, inside=within)
    aligned = rewritten_modules.judged_by_module(aligned, options.match, options.chart)
    aligned = with_gradients_of_parameters(with_containers_of_both(aligned))
    if sentences:
        plan = msgspec.structs.replace(aligned.plan, notes=(*sentences, *aligned.plan.notes))
        aligned = align.Aligned(aligned.reference, aligned.target, plan)
    return PreparedRuns(
        read_reference,
        read_target,
        aligned,
        CachedRun(aligned.reference),
        CachedRun(aligned.target),
    )


@dataclass(frozen=True, slots=True)
class Context:
    """What every stage may look at and none changes.

    judge: judges regions, and holds the figures of their replays once it has. neighbourhoods: say
    whether what is wrong at a place travels; data_flow: the same without programs.
    differing_inputs: the inputs of roots that differ without an explanation, in sentences.
    """

    prepared: PreparedRuns
    options: CompareOptions
    paired: PairedRuns
    errors: PairErrors
    regions: tuple[Region, ...]
    judge: RegionJudge
    neighbourhoods: Neighbourhoods
    data_flow: DataFlow
    repeated: RepeatedRuns
    third: ThirdRunJudge
    positions: PositionsAndMasks
    root_inputs: RootInputs
    differing_inputs: tuple[str, ...]
    labels_notes: tuple[str, ...]
    timing: dict[str, float]

    def covers(self, number: int) -> bool:
        """Is a call of the reference that could not be measured inside what is right around it?"""
        flow = self.data_flow
        is_covered = number in flow.covered or number in flow.remade
        return is_covered or self.neighbourhoods.cover(number)


def context_of(
    reference: Run,
    target: Run,
    options: CompareOptions,
    *,
    again: Sequence[Run] = (),
    third: Run | None = None,
    left_out: LeftOut = NONE_LEFT_OUT,
) -> Context:
    """Align and measure two runs. again, third: as `compare_runs` takes them. left_out: equal calls
    that both runs lack.
    """
    timing: dict[str, float] = {}

    def progress(number: int, of: int, words: str) -> None:
        if options.progress is not None:
            options.progress(number, of, words)

    with timed(timing, "plan"):
        reference, target, labels_notes = plain(reference, target)
        prepared = prepare(reference, target, options)
    aligned_reference, aligned_target = prepared.reference, prepared.target
    with timed(timing, "again"):
        repeated = RepeatedRuns(
            aligned_reference,
            [prepared.like_reference(run, options) for run in again],
            allow=options.allow,
            model=options.model,
            threads=options.threads,
            tell=progress,
        )
    with timed(timing, "third"):
        finer = prepared.like_reference(third, options) if third is not None else None
        third_run = ThirdRunJudge(aligned_reference, aligned_target, finer, tell=progress)
    plan = put_together(prepared.aligned.plan, aligned_reference.calls, aligned_target.calls)
    paired = PairedRuns(aligned_reference, aligned_target, plan, options, progress, left_out)
    errors = PairErrors(paired, options.policy, repeated)
    with timed(timing, "measure"):
        paired.measure()
    positions = PositionsAndMasks(paired, errors.of)
    root_inputs = RootInputs(paired, positions, errors.of)
    differing_inputs = tuple(root_inputs.sentences())
    tiles = tuple(regions(paired.calls))
    repeated.find(tiles)
    judge = RegionJudge(errors, tiles, options, repeated, positions, progress)
    neighbourhoods = Neighbourhoods(errors, tiles, judge, prepared.before_alignment())
    return Context(
        prepared,
        options,
        paired,
        errors,
        tiles,
        judge,
        neighbourhoods,
        DataFlow(errors, neighbourhoods.was_replayed),
        repeated,
        third_run,
        positions,
        root_inputs,
        differing_inputs,
        tuple(labels_notes),
        timing,
    )
