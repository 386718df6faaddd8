"""How far rounding alone strays in a replay: noise floors, tried in order until nothing is suspect.

Each floor is a function of a `Measurement`, and none runs another replay where the figures so far
explain the target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from whence import dtypes, judge
from whence.comparison.replays import optimizer_steps
from whence.comparison.replays.call_tree import REPLICAS
from whence.comparison.replays.jump_sides import JumpSides, Run
from whence.comparison.replays.program_run import ProgramRun
from whence.comparison.replays.semantics import PLAIN, Semantics
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Call, marks

DRAWS = 8
"""Replays on perturbed inputs that show which values lie at the boundary between two codes."""

ReplayErrors = dict[str, judge.ReplayError]


@dataclass(slots=True)
class Measurement:
    """The target's outputs (`produced`) and the replays of one call, by output slot.

    wide: the replay in the finer dtype. terms: summands of the longest sum in the program.
    reference: (the reference's output, the wide replay on the reference's inputs; None if the runs
    have equal inputs). spread: how much each element differs between runs of the reference. calls:
    of the reference and of the target. outputs: number of calls judged in the comparison.
    is_lowered: whether only the target computes the call in 16 bits (autocast). errors: the errors
    under the floors so far; quick: whether the wide replay, rounded once, explained them. sides: of
    jumps, if the target's differ.
    """

    run: ProgramRun
    produced: Mapping[str, Array]
    wide: Mapping[str, Array]
    terms: int
    reference: Mapping[str, tuple[Array, Array | None]]
    spread: Mapping[str, Array | None]
    semantics: Semantics
    calls: tuple[Call, Call]
    outputs: int
    is_lowered: bool = False
    errors: ReplayErrors = field(default_factory=dict)
    quick: bool = False
    sides: JumpSides | None = None

    def is_suspect(self) -> bool:
        """Whether an error is so large that another floor must be tried."""
        return judge.highest(self.errors) > judge.LIMITS.suspect

    def against(
        self, wide: Mapping[str, Array], working: Mapping[str, Array], *, written_out: bool = False
    ) -> ReplayErrors:
        """The errors of the target against `wide`, in units of the error of `working`."""
        return {
            slot: self._error(slot, wide[slot], working[slot], written_out=written_out)
            for slot in self.produced
        }

    def _error(
        self, slot: str, wide: Array, working: Array, *, written_out: bool
    ) -> judge.ReplayError:
        output = self.produced[slot]
        if wide.shape != output.shape or working.shape != output.shape:
            raise ReplayRefused(
                f"{slot} of the replay has shape {wide.shape}, the target's {output.shape}"
            )
        reference, reference_wide = self.reference.get(slot, (None, None))
        if reference is None or reference.shape != output.shape:
            reference, reference_wide = None, None
        return self.semantics.measure(
            slot,
            output,
            wide,
            working,
            terms=self.terms,
            reference=reference,
            reference_wide=reference_wide,
            spread=self.spread[slot],
            written_out=written_out,
            outputs=self.outputs,
        )

    def copies(self, count: int, *, stepwise: bool = False) -> list[dict[str, Array]]:
        """The working replay, then `count` more on inputs perturbed by one rounding."""
        return [self.run.working(seed=seed, stepwise=stepwise) for seed in (None, *range(count))]


def rounded_once(measurement: Measurement) -> None:
    """For 16 bits, the floor of the wide replay rounded once, which is the least possible noise.

    A target that passes this would pass the working replay too, which is then not run.
    """
    produced = measurement.produced
    if measurement.semantics is not PLAIN or not _is_half(produced):
        return
    wide = measurement.wide
    rounded = {
        slot: judge.rounded(wide[slot], dtypes.of(output).name) for slot, output in produced.items()
    }
    errors = measurement.against(wide, rounded)
    if judge.highest(errors) <= judge.LIMITS.suspect:
        measurement.errors, measurement.quick = errors, True


def working_dtype(measurement: Measurement) -> None:
    """The floor of a replay in the target's dtype; if needed, with rounding after every step."""
    if not measurement.quick:
        measurement.errors = _in_roundings(measurement, measurement.wide)


def other_choices(measurement: Measurement) -> None:
    """If scores tie, the floor with the target's choices and with perturbed inputs."""
    choosing = measurement.run.choosing
    if choosing is None or not measurement.is_suspect():
        return

    def with_inherited_noise(wide: Mapping[str, Array]) -> ReplayErrors:
        errors = _in_roundings(measurement, wide)
        for seed in range(REPLICAS):
            # `choosing` observes these runs: they show how exponentials and sums enlarge a
            # rounding of the inputs.
            measurement.run.working(seed=seed)
        return errors

    measurement.errors = with_inherited_noise(measurement.wide)
    measurement.wide, errors = choosing.figures(
        measurement.wide, measurement.errors, with_inherited_noise
    )
    measurement.errors = dict(errors)


def other_sides(measurement: Measurement) -> None:
    """If results jump, the floor with the target's sides, for arguments that rounding may carry
    across the jump. A working replay on other sides than the wide one is no floor, since its
    distance would hide faults.
    """
    run = measurement.run
    if not run.loaded.jumps or measurement.quick:
        return

    def working(seed: int | None = None, *, stepwise: bool = False) -> Run:
        return lambda jumps: run.with_jumps(
            jumps, lambda: run.working(seed=seed, stepwise=stepwise)
        )

    sides = JumpSides(
        lambda jumps: run.with_jumps(jumps, run.wide),
        (working(), working(stepwise=True)),
        tuple(map(working, range(REPLICAS))),
        measurement.produced,
        run.known_sides,
    )
    if not measurement.is_suspect() and not sides.differ():
        return
    wide = sides.follow()
    levels = sides.levels()
    errors = run.with_jumps(levels, lambda: _in_roundings(measurement, wide))
    is_settled = not sides.is_open and not _is_half(measurement.produced)
    if is_settled or judge.highest(errors) < judge.highest(measurement.errors):
        measurement.wide, measurement.errors, measurement.sides = wide, errors, sides


def code_boundaries(measurement: Measurement) -> None:
    """For 8-bit codes: a value at the boundary between two codes may have either."""
    for slot, error in measurement.errors.items():
        output = measurement.produced[slot]
        if not error.integer_mismatch or dtypes.of(output).bits != 8:
            continue
        draws = [copy[slot] for copy in measurement.copies(DRAWS)]
        beyond = judge.beyond_boundaries(output, [measurement.wide[slot], *draws])
        measurement.errors[slot] = dataclasses.replace(
            error, score=np.inf if beyond else 0.0, integer_mismatch=beyond
        )


def several_draws(measurement: Measurement) -> None:
    """If single elements stand out, the floor of several replays on perturbed inputs.

    One replay is a single sample of rounding. A softmax over large scores makes the rounding of a
    whole head depend on that of one number. Correct code that rounds elsewhere, or works on other
    shapes, is another sample.
    """
    if not any(map(judge.is_one_element, measurement.errors.values())):
        return
    copies = measurement.copies(REPLICAS, stepwise=True)
    measurement.errors = {
        slot: judge.steadier(
            error,
            measurement.produced[slot],
            measurement.wide[slot],
            [c[slot] for c in copies],
            measurement.terms,
        )
        for slot, error in measurement.errors.items()
    }


def gathered(measurement: Measurement) -> None:
    """For tensors put together from ranks, the floor of replays on perturbed inputs. The recorded
    kernels ran on the extents of the pieces, and other extents may select kernels that round
    differently.
    """
    if not measurement.is_suspect() or not any(map(marks.is_gathered, measurement.calls)):
        return
    copies = measurement.copies(REPLICAS)
    for slot, output in measurement.produced.items():
        elsewhere = judge.whole(output, measurement.wide[slot], [c[slot] for c in copies])
        if elsewhere.score <= 1:
            measurement.errors[slot] = min(
                measurement.errors[slot], elsewhere, key=lambda error: error.score
            )


def lowered_inside(measurement: Measurement) -> None:
    """For a call that only the target computes in 16 bits (autocast), the floor of replays on
    perturbed inputs. Autocast rounds at places that the reference's program does not show, and
    early rounding spreads along rows; perturbed inputs have the same effect.
    """
    if not measurement.is_lowered or not measurement.is_suspect():
        return
    for copy in measurement.copies(REPLICAS)[1:]:
        errors = measurement.against(measurement.wide, copy)
        measurement.errors = {
            slot: min(error, errors[slot], key=lambda e: e.score)
            for slot, error in measurement.errors.items()
        }


def single_hyper_parameters(measurement: Measurement) -> None:
    """For an optimiser's step, the floor of a kernel that holds betas in float32 and rounds their
    powers.
    """
    run = measurement.run
    replays = (
        optimizer_steps.in_float32(
            run.loaded.program, run.inputs, run.wide_dtype, run.working_dtype
        )
        if measurement.is_suspect()
        else None
    )
    if replays is None:
        return
    errors = measurement.against(*replays)
    measurement.errors = {
        slot: min(error, errors[slot], key=lambda e: e.score)
        for slot, error in measurement.errors.items()
    }


FLOORS = (
    rounded_once, working_dtype, other_choices, other_sides, code_boundaries, several_draws,
    gathered, lowered_inside, single_hyper_parameters,
)  # fmt: skip


def measure(measurement: Measurement) -> ReplayErrors:
    """The error of every output under the floors, which are tried in order."""
    for floor in FLOORS:
        floor(measurement)
    choosing, errors = measurement.run.choosing, measurement.errors
    if choosing is not None:
        errors = choosing.with_choices(errors)
    if measurement.sides is not None and judge.highest(errors) <= 1:
        sides = measurement.sides.described()
        errors = {
            slot: dataclasses.replace(error, choices=(*error.choices, *sides))
            for slot, error in errors.items()
        }
    return errors


def _in_roundings(measurement: Measurement, wide: Mapping[str, Array]) -> ReplayErrors:
    errors = measurement.against(wide, measurement.run.working())
    if judge.highest(errors) <= judge.LIMITS.suspect:
        return errors
    # A fused operator rounds once, a correct target may round in between: the noisier of both
    # floors counts.
    stepwise = measurement.against(wide, measurement.run.working(stepwise=True), written_out=True)
    return {slot: judge.less_suspect(error, stepwise[slot]) for slot, error in errors.items()}


def _is_half(produced: Mapping[str, Array]) -> bool:
    """Whether all outputs have 16 bits or less."""
    return all(judge.unit_roundoff(dtypes.of(a).name) > 1e-5 for a in produced.values())
