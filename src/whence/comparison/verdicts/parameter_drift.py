"""Parameters or optimiser state that diverged for a reason the runs do not contain make later
differences `UNDECIDED`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from whence import judge
from whence.comparison.paired_runs import PairedCall
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.parameters import Parameters
from whence.records import Call
from whence.records.slots import input_name, is_param, is_written, param_name
from whence.records.training import OPTIMIZER, TAKEN_GRADIENT
from whence.results import Confidence, SlotPair, Verdict, VerdictKind

DRIFTED = "drifted"
"""The figure of a verdict: by how much a parameter that its call read parted unseen."""
STEPS_BEFORE = "steps_before"
"""The figure of a verdict: so many steps before the first recorded one may have made it."""

_PASSES = frozenset(
    (VerdictKind.IDENTICAL, VerdictKind.NOISE, VerdictKind.INHERITED, VerdictKind.AMPLIFIED)
)


class ParameterDrift(NamedTuple):
    """A parameter that diverged between steps by more than earlier errors explain. error: its
    relative error (2-norm); largest_before: the largest error of any earlier output. steps_before:
    the number of unrecorded steps that may have changed it; 0 if a recorded step has its initial
    value.
    """

    name: str
    error: float
    largest_before: float
    steps_before: int = 0

    @property
    def sentence(self) -> str:
        """How the parameter diverged, and what the runs do not show of the cause."""
        if self.steps_before:
            before = "step 0" if self.steps_before == 1 else f"steps 0 to {self.steps_before - 1}"
            return (
                f"{self.name} differs (rel_l2 {self.error:.2g}) at step {self.steps_before}, the "
                f"first that was recorded; what {before} made of it is not in the run"
            )
        return (
            f"{self.name} diverged between steps (rel_l2 {self.error:.2g}; before, nothing "
            f"differed by more than {self.largest_before:.2g}); what changed it (backward, an "
            "optimiser, code after its step) was not captured"
        )


class ParameterDrifts:
    """Finds parameters of paired calls that diverged for a reason that was not captured."""

    def __init__(self, errors: PairErrors, parameters: Parameters) -> None:
        self._errors, self._paired, self._parameters = errors, errors.paired, parameters

    def of(
        self, pair: PairedCall, slots: Mapping[str, SlotPair], given: Mapping[str, bool]
    ) -> ParameterDrift | None:
        """The first parameter of a pair of calls that diverged unexplained; None if there is none.
        given: by slot, whether the parameter still has its initial value (`Parameters.given`).
        """
        made_before = self._parameters.made_before
        for name, slot in slots.items():
            is_made_before = slot.reference_record in made_before
            if not is_made_before and given.get(name, True):
                continue
            if slot.reference_record in self._paired.written:
                continue
            error = self._errors.of(slot)
            largest = self._largest_before(pair.call, slot)
            limit = max(
                judge.LIMITS.growth * (largest + 2 * error.u), judge.LIMITS.spread * error.spread
            )
            if error.value is not None and error.value > limit:
                if is_param(name) and self._parameters.difference(slot).is_rounding:
                    continue
                steps_before = pair.call.step if is_made_before else 0
                return ParameterDrift(_name_of(name), error.value, largest, steps_before)
        return None

    def _largest_before(self, call: Call, slot: SlotPair) -> float:
        """The largest error that may explain the difference of a tensor which a call reads: that of
        any output of earlier steps. An optimiser's state is computed from gradients, so for it the
        error of the gradients that the optimiser takes in this step counts.
        """
        if call.phase == OPTIMIZER:
            return self._largest_of_gradients.get(call.step, 0.0)
        return max((e for s, e in self._largest_by_step.items() if s < call.step), default=0.0)

    @functools.cached_property
    def _largest_of_gradients(self) -> dict[int, float]:
        """The largest error of any gradient that an optimiser takes, by step."""
        largest: dict[int, float] = {}
        for pair, slots in zip(self._paired.plan.pairs, self._paired.slots, strict=True):
            call = self._paired.calls[pair.reference]
            if call.phase == OPTIMIZER and TAKEN_GRADIENT in slots:
                error = self._errors.of(slots[TAKEN_GRADIENT]).value or 0.0
                largest[call.step] = max(largest.get(call.step, 0.0), error)
        return largest

    @functools.cached_property
    def _largest_by_step(self) -> dict[int, float]:
        """The largest error of any output, by step."""
        largest: dict[int, float] = {}
        for pair, slots in zip(self._paired.plan.pairs, self._paired.slots, strict=True):
            step = self._paired.calls[pair.reference].step
            for slot in slots.values():
                if is_written(slot.reference_slot) and not self._paired.is_equal(slot):
                    largest[step] = max(largest.get(step, 0.0), self._errors.of(slot).value or 0.0)
        return largest


def _name_of(slot: str) -> str:
    return param_name(slot) if is_param(slot) else input_name(slot)


def unless_drifted(verdict: Verdict, drift: ParameterDrift | None) -> Verdict:
    """The verdict, or `undetermined` if it passes a call that read a drifted parameter: whether
    rounding caused the drift is not known.
    """
    if drift is None or verdict.verdict not in _PASSES:
        return verdict
    numbers = {**verdict.numbers, "e_out": drift.error, DRIFTED: drift.error}
    if drift.steps_before:
        numbers[STEPS_BEFORE] = drift.steps_before
    return verdict.replace(
        verdict=VerdictKind.UNDETERMINED,
        confidence=Confidence.NONE,
        numbers=numbers,
        sentence=drift.sentence,
    )
