"""Parameters that change between an optimiser's step and the next call that reads them, e.g. by
weight clipping or by copying a moving average into the model.

The code that changes them is not captured. But if the step leaves a parameter alike in both runs,
and the next call reads it unchanged in one run and changed in the other, rounding is not the
reason.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from typing import NamedTuple

from whence import judge
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.parameter_drift import DRIFTED
from whence.records import Call, Run
from whence.records.slots import is_param, param_name
from whence.records.training import GRADIENTS, OPTIMIZER
from whence.results import (
    CauseKind,
    Confidence,
    Evidence,
    SlotPair,
    Verdict,
    VerdictKind,
)

Verdicts = dict[tuple[int, int], Verdict]

AFTER_STEP = "after_step"
"""Number in such a verdict: the relative error of the parameter as the next call reads it."""
_LEFT = "output.param"


class _Step(NamedTuple):
    """An optimiser's step of one parameter. order, call: execution order and id of the call; left:
    the record of the updated parameter.
    """

    order: int
    call: int
    left: int


class _Change(NamedTuple):
    """A parameter whose value changed between its step and the next call that reads it. step: index
    of the pair of step calls; read: the parameter's tensors in the calls that read it;
    by_reference, by_target: whether that run changed it.
    """

    step: int
    read: SlotPair
    by_reference: bool
    by_target: bool


def blamed(verdicts: Verdicts, errors: PairErrors) -> Verdicts:
    """The verdicts, with a guilty one for each step after which a parameter changes in one run
    only. A change in both runs counts if the results differ although the step left all parameters
    bitwise equal.
    """
    return _Changes(errors).marked(verdicts)


class _Changes:
    def __init__(self, errors: PairErrors) -> None:
        self._errors, self._paired = errors, errors.paired
        self._of_reference = _Steps(self._paired.reference)
        self._of_target = _Steps(self._paired.target)

    def marked(self, verdicts: Verdicts) -> Verdicts:
        if not (self._of_reference and self._of_target):
            return verdicts
        out, seen = dict(verdicts), set[int]()
        for index, pair in enumerate(self._paired.plan.pairs):
            call = self._paired.calls[pair.reference]
            if call.phase == OPTIMIZER:
                continue
            is_explained = False
            for change in self._changes(index, call):
                reason = self._reason(change)
                is_explained = is_explained or bool(reason)
                if reason and change.step not in seen:
                    seen.add(change.step)
                    step = self._paired.plan.pairs[change.step].reference
                    out[step, -1] = self._verdict(change, reason, verdicts.get((step, -1)))
            if is_explained:
                out.update(_explained(verdicts, call.id))
        return out

    def _changes(self, index: int, call: Call) -> Iterator[_Change]:
        """The parameters of a paired call whose values changed since the step before it."""
        paired = self._paired
        partner = paired.pair(index).partner
        if call.training != partner.training:  # an evaluation may have other parameters
            return
        for slot in paired.slots[index].values():
            if not (is_param(slot.reference_slot) and is_param(slot.target_slot)):
                continue
            before = self._of_reference.before(call, slot.reference_slot)
            its = self._of_target.before(partner, slot.target_slot)
            step = paired.pair_of.get(before.call) if before is not None else None
            if before is None or its is None or step is None:
                continue
            if paired.plan.pairs[step].target != its.call:
                continue
            by_reference = _is_other(paired.reference, before.left, slot.reference_record)
            by_target = _is_other(paired.target, its.left, slot.target_record)
            if by_reference is None or by_target is None:
                continue
            if by_reference or by_target:
                yield _Change(step, slot, by_reference, by_target)

    def _reason(self, change: _Change) -> str:
        """The change of the parameter in words, "" if rounding may explain the difference."""
        left = self._paired.slot(change.step, _LEFT)
        if left is None:
            return ""
        error, before = self._errors.of(change.read), self._errors.of(left)
        if error.value is None or before.value is None:
            return ""
        limit = judge.LIMITS.growth * (before.value + 2 * error.u)
        if error.value <= max(limit, judge.LIMITS.spread * error.spread):
            return ""
        if change.by_reference and change.by_target:
            is_known = self._are_left_alike(change.step)
            return "is changed after the step in both runs, and differently" if is_known else ""
        side, other = ("target", "reference") if change.by_target else ("reference", "target")
        return f"is changed after the step in the {side}, not in the {other}"

    def _are_left_alike(self, step: int) -> bool:
        """Whether the optimiser left every parameter bitwise equal in both runs at this step."""
        call = self._paired.pair(step).call
        return self._alike[call.rank, call.root, call.step]

    @functools.cached_property
    def _alike(self) -> dict[tuple[int, str, int], bool]:
        alike: dict[tuple[int, str, int], bool] = {}
        for index, pair in enumerate(self._paired.plan.pairs):
            call = self._paired.calls[pair.reference]
            left = self._paired.slot(index, _LEFT) if call.phase == OPTIMIZER else None
            if left is not None:
                key = call.rank, call.root, call.step
                alike[key] = alike.get(key, True) and self._paired.is_equal(left)
        return alike

    def _verdict(self, change: _Change, reason: str, before: Verdict | None) -> Verdict:
        error, name = self._errors.of(change.read).value, param_name(change.read.reference_slot)
        left = self._paired.slots[change.step][_LEFT]
        size = f"rel_l2 {error:.2g}, {self._errors.of(left).value:.2g} as the step left it"
        is_of_both = change.by_reference and change.by_target
        verdict = before or Verdict(change.step, VerdictKind.IDENTICAL)
        return verdict.replace(
            verdict=VerdictKind.INTRODUCED,
            confidence=Confidence.LIKELY if is_of_both else Confidence.CERTAIN,
            evidence=Evidence.TWO_DUMPS,
            cause=CauseKind.SEMANTIC,
            numbers={**verdict.numbers, "e_out": error, AFTER_STEP: error},
            slot=_LEFT,
            sentence=f"{name} {reason} ({size})",
            reason=reason,
        )


class _Steps:
    """All optimiser steps of a run, in execution order for each parameter."""

    def __init__(self, run: Run) -> None:
        self._steps: dict[tuple[int, str, str, str], list[_Step]] = {}
        for call in run.calls:
            if call.phase == OPTIMIZER and call.op != GRADIENTS:
                left = call.by_slot.get(_LEFT)
                if left is not None:
                    key = call.rank, call.root, call.scope, call.op
                    self._steps.setdefault(key, []).append(_Step(call.order, call.id, left))

    def __bool__(self) -> bool:
        return bool(self._steps)

    def before(self, call: Call, slot: str) -> _Step | None:
        """The last step, before this call, of the parameter that the call reads in this slot."""
        steps = self._steps.get((call.rank, call.root, call.scope, param_name(slot)), [])
        place = bisect.bisect(steps, call.order, key=lambda step: step.order)
        return steps[place - 1] if place else None


def _is_other(run: Run, left: int, read: int) -> bool | None:
    """Whether a call reads other values than the step left; None if the two records differ in dtype
    or shape, or lack a hash.
    """
    if left == read:
        return False
    a, b = run.records[left], run.records[read]
    is_known = a.hash and b.hash and (a.dtype, a.shape) == (b.dtype, b.shape)
    return a.hash != b.hash if is_known else None


def _explained(verdicts: Verdicts, call: int) -> Verdicts:
    """The call's `undetermined` verdicts that unexplained parameter drift caused, as `inherited`:
    the drift is explained now.
    """
    return {
        key: verdict.withdrawn(VerdictKind.INHERITED, f"inherited: {verdict.sentence}")
        for key in ((call, -1), (call, 0))
        if (verdict := verdicts.get(key)) is not None
        and verdict.verdict == VerdictKind.UNDETERMINED
        and DRIFTED in verdict.numbers
    }
