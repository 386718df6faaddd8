"""Withdraws faults caused by a different loss scale that is divided out before the optimiser
step. What the optimiser takes is the same, so nothing computes something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from whence.comparison.paired_runs import PairedRuns
from whence.dtypes import Array, unit_roundoff
from whence.errors import ElementsMissing
from whence.judge.limits import LIMITS
from whence.records import Call, Operation, Run
from whence.records.slots import (
    GRAD_SCALE,
    INVERSE_SCALE,
    is_input,
    is_of_child,
    is_of_loss_scaler,
    is_output,
    is_read_beside,
    split_child,
)
from whence.records.training import BACKWARD, GRADIENTS, LOSS, OPTIMIZER
from whence.results import GUILTY, Evidence, SlotPair, Verdict, VerdictKind

Verdicts = dict[tuple[int, int], Verdict]

_UNDONE = "undone_scale"
"""By how much a loss was off, among the numbers of a verdict that is withdrawn."""
_FACTOR = 0.01
"""What 16 bits leave where tensors differ by a factor alone, over their 2-norm."""
_SHOWN = 8  # steps that are listed
_ALIKE = 5e-4
"""Largest deviation of scale, and largest residual, of gradients that count as equal."""


def undone(verdicts: Verdicts, paired: PairedRuns) -> Verdicts:
    """The verdicts, without faults of losses whose different scale does not reach the optimiser.

    Gradients are compared before clipping, since clipping removes any scale.
    """
    suspects = {
        key: verdict
        for key, verdict in verdicts.items()
        if verdict.verdict in (*GUILTY, VerdictKind.UNDETERMINED)
    }
    differing = {
        key: slots for key, v in suspects.items() if (slots := list(_of_loss(paired, key, v)))
    }
    taken = [key for key in suspects if paired.calls[key[0]].op == GRADIENTS]
    skipped = {*skipped_steps(paired.reference), *skipped_steps(paired.target)}
    if not differing and not taken and not skipped:
        return verdicts
    out, steps = dict(verdicts), dict(gradients_of_steps(paired))
    for key, factor in _factors_of_losses(paired, differing, skipped):
        step = steps.get(place := _step(paired.calls[key[0]]))
        if place in skipped or (step is not None and step.agree(factor)):
            words = f"{factor:.6g} times the reference's, which does not reach the optimiser"
            numbers = {**verdicts[key].numbers, _UNDONE: factor}
            out[key] = _withdrawn(verdicts[key], words, VerdictKind.NOISE, numbers=numbers)
    for key, verdict in out.items():
        if words := _of_skipped(paired, paired.calls[key[0]], verdict, skipped):
            out[key] = _withdrawn(verdict, words, VerdictKind.UNDETERMINED)
    for key in taken:
        step = steps.get(_step(paired.calls[key[0]]))
        if step is not None and step.is_moved and _are_taken_alike(paired, verdicts[key].pair):
            words = "gradients are scaled here, and a loss in the other run: they leave alike"
            out[key] = _withdrawn(verdicts[key], words, VerdictKind.NOISE)
    return out


def _withdrawn(verdict: Verdict, words: str, kind: VerdictKind, **changes: Any) -> Verdict:
    return verdict.withdrawn(kind, f"{words}; {verdict.sentence}", **changes)


def _factors_of_losses(
    paired: PairedRuns,
    differing: Mapping[tuple[int, int], Sequence[SlotPair]],
    skipped: Set[tuple[int, str, int]],
) -> Iterator[tuple[tuple[int, int], float]]:
    """(key of a verdict, factor) of the losses that are off by one factor. A single number may be
    off by any; only the gradients show which terms differ.
    """
    factors = {key: _factor(paired, slots) for key, slots in differing.items()}
    calls = {key: paired.calls[key[0]] for key in factors}
    otherwise = {
        _micro_batch(call)
        for key, call in calls.items()
        if call.op == LOSS
        and _step(call) not in skipped
        and (factors[key] is None or is_value_alone(paired, call))
    }
    for key, factor in factors.items():
        is_otherwise = calls[key].op == LOSS and _micro_batch(calls[key]) in otherwise
        if factor is not None and not is_otherwise:
            yield key, factor


def _step(call: Call) -> tuple[int, str, int]:
    return call.rank, call.root, call.step


def _micro_batch(call: Call) -> tuple[int, str, int, int]:
    return call.rank, call.root, call.step, call.micro


def _is_scaled_otherwise(paired: PairedRuns, call: Call, verdict: Verdict) -> bool:
    """Whether only one run divides these gradients by the scale of a loss scaler."""
    partner = paired.pair(verdict.pair).partner
    scalers = [
        {ref.slot for ref in side.refs if is_of_loss_scaler(ref.slot)} for side in (call, partner)
    ]
    return call.op == GRADIENTS and scalers[0] != scalers[1]


def _of_skipped(
    paired: PairedRuns, call: Call, verdict: Verdict, skipped: set[tuple[int, str, int]]
) -> str:
    """Why a guilty verdict proves nothing, since one run's loss scaler skipped steps; "" if it does
    prove something.
    """
    if verdict.verdict not in GUILTY:
        return ""
    if call.phase == BACKWARD and _step(call) in skipped:
        return "a loss scaler left this step out, whose gradients are not finite at its scale"
    before = any(
        (rank, root) == (call.rank, call.root) and step < call.step for rank, root, step in skipped
    )
    is_known = verdict.evidence == Evidence.REPLAY
    is_known = is_known and not _is_scaled_otherwise(paired, call, verdict)
    if before and call.phase == OPTIMIZER and not is_known:
        return "a loss scaler left an earlier step out of one run, so that its optimiser is behind"
    return ""


def _are_taken_alike(paired: PairedRuns, index: int) -> bool:
    """Whether the optimiser takes equal gradients in both runs, each within `_ALIKE`."""
    slots = [s for name, s in paired.slots[index].items() if is_output(name)]
    pairs = [paired.arrays(s) for s in slots]
    lone = [*paired.plan.pairs[index].only_reference, *paired.plan.pairs[index].only_target]
    return not any(map(is_output, lone)) and all(
        pair is not None
        and (known := fit([pair], [(1.0, 1.0)])) is not None
        and abs(known.scale - 1) <= _ALIKE
        and known.residual <= _ALIKE
        for pair in pairs
    )


def notes(verdicts: Iterable[Verdict], paired: PairedRuns) -> Iterator[str]:
    """Notes for the answer: skipped steps, and losses whose different scale is divided out."""
    factors = [
        factor
        for verdict in verdicts
        if (factor := verdict.numbers.get(_UNDONE)) is not None
        and paired.pair(verdict.pair).call.phase == "forward"
    ]
    for side, run in (("reference", paired.reference), ("target", paired.target)):
        if steps := sorted({step for _, _, step in skipped_steps(run)}):
            listed = ", ".join(map(str, steps[:_SHOWN])) + (" ..." if len(steps) > _SHOWN else "")
            named = f"step{'s' if len(steps) > 1 else ''} {listed}"
            yield (
                f"the loss scaler of the {side} left out {named}, whose gradients are not finite "
                "at its scale: parameters part from there. Begin with a smaller scale "
                "(GradScaler's init_scale) to compare these steps"
            )
    if factors:
        yield (
            f"the loss is {factors[0]:.6g} times the reference's; the scale does not reach the "
            "optimiser: gradients before clipping are of one scale"
        )


def skipped_steps(run: Run) -> Iterator[tuple[int, str, int]]:
    """(rank, root, step) of the steps that a loss scaler skipped."""
    for call in run.calls:
        if call.op == GRADIENTS and call.arguments.get("step.skipped"):
            yield call.rank, call.root, call.step


def _of_loss(paired: PairedRuns, key: tuple[int, int], verdict: Verdict) -> Iterator[SlotPair]:
    """The tensors of a verdict about a loss: its outputs, or one number that it or its backward
    pass is given, such as the scale of a loss scaler. Empty for any other verdict.
    """
    call, stretch = key
    if paired.calls[call].op == LOSS:
        yield from (s for n, s in paired.slots[verdict.pair].items() if is_output(n))
    elif is_of_child(verdict.slot) and 0 <= stretch < len(paired.kids.get(call, ())):
        child = paired.kids[call][stretch]
        slot = paired.slots_of(child).get(split_child(verdict.slot)[1])
        is_of_loss = paired.calls[child].op == LOSS
        if is_of_loss and slot and paired.reference.records[slot.reference_record].count == 1:
            yield slot


def is_value_alone(paired: PairedRuns, call: Call) -> bool:
    """Whether this is a loss with another value and gradients of the same size, in any order of
    rows: a constant was added. False where norms are not known.
    """
    value = paired.slots_of(call.id).get("output.0")
    if value is None or (call.op, call.phase) != (LOSS, "forward"):
        return False
    ratios = {
        slot.reference_slot: _ratio(paired, slot)
        for other in paired.calls
        if (other.op, _micro_batch(other)) == (LOSS, _micro_batch(call))
        for slot in paired.slots_of(other.id).values()
    }
    seed = ratios.get("input.grad.output.0", 1.0)
    own = [abs(r / seed - 1) for name, r in ratios.items() if name.startswith("output.grad.input.")]
    limit = LIMITS.within(unit_roundoff(paired.records(value)[1].dtype))
    return max(own, default=math.inf) <= limit < abs(ratios["output.0"] - 1)


def _ratio(paired: PairedRuns, slot: SlotPair) -> float:
    """The norm of the target's tensor over that of the reference's; NaN where one is not known."""
    norms = [s.norm for r in paired.records(slot) if (s := r.statistics) is not None and s.norm]
    if len(norms) < 2 and (arrays := paired.arrays(slot)) is not None:  # joined, or in new order
        norms = [float(np.linalg.norm(a.astype(np.float64))) for a in arrays if np.any(a)]
    return norms[1] / norms[0] if len(norms) > 1 else math.nan


def _factor(paired: PairedRuns, slots: Sequence[SlotPair]) -> float | None:
    """The one factor k with target = k x reference for all these tensors; None if there is none."""
    known = []
    for slot in slots:
        arrays = paired.arrays(slot)
        if arrays is None:
            return None
        if not any(array.any() for array in arrays):  # what is zero is so at any scale
            continue
        fitted = fit([arrays], [(1.0, 1.0)])
        if fitted is None or fitted.residual > _FACTOR * abs(fitted.scale):
            return None
        known.append(fitted.scale)
    if not known or not known[0] or max(known) - min(known) > _FACTOR * abs(known[0]):
        return None
    return known[0]


# Compares the scale of both runs' gradients at the start of an optimiser's step.

_OFF = 0.02
"""Largest distance of the gradients' scale from 1, as a share of the loss's: the question is which
of two scales reaches the optimiser. A small ResNet under bfloat16 autocast has 1.5 %.
"""
_LEFT = 0.25
"""Largest residual of all gradients after the fit, as that share: a small network with batch norms
under autocast has 0.24. A larger residual makes the fitted scale meaningless.
"""
_CARRIES = 0.1
"""Largest residual, as that share, with which the scale of one parameter's gradient is known."""


_OperandKey = tuple[str, Any]
"""A hashable key of an operand: ("in", input number) or ("op", (operation, output))."""


class Fit(NamedTuple):
    """The least squares fit target = scale x reference. residual: ||target - scale x reference|| /
    ||reference||.
    """

    scale: float
    residual: float

    def is_one(self, size: float) -> bool:
        """Whether the scale is 1 rather than off by `size`."""
        return abs(self.scale - 1) <= _OFF * size and self.residual <= _LEFT * size

    def is_of(self, factor: float, size: float) -> bool:
        """Whether the scale is known, and nearer to this factor than to 1."""
        is_known = self.residual <= _CARRIES * size * abs(self.scale)
        return is_known and abs(self.scale - factor) < abs(self.scale - 1)


class StepGradients(NamedTuple):
    """How the gradients of one step compare. whole: the fit of all gradients together; each: the
    fit of every gradient. is_moved: whether the runs multiply them by different numbers before the
    optimiser takes them.
    """

    whole: Fit
    each: tuple[Fit, ...]
    is_moved: bool

    def agree(self, factor: float) -> bool:
        """Whether a loss scale that is off by this factor reaches none of the gradients. Then all
        together, or more than half of them, have scale 1 (the rest may have a fault of their own),
        and no gradient, however small, is off by just this factor.
        """
        size = min(abs(factor - 1), abs(1 / factor - 1), 1.0)
        if any(fit.is_of(factor, size) for fit in self.each):
            return False
        agreeing = sum(fit.is_one(size) for fit in self.each)
        return self.whole.is_one(size) or 2 * agreeing > len(self.each)


def gradients_of_steps(
    paired: PairedRuns,
) -> Iterator[tuple[tuple[int, str, int], StepGradients]]:
    """((rank, root, step), gradients) of each step. A gradient is what the last backward pass left,
    times the numbers that code multiplies it by before it does anything else. Steps with a gradient
    that has no partner or no elements are left out.
    """
    for index, pair in enumerate(paired.plan.pairs):
        call, partner = paired.calls[pair.reference], paired.target.calls[pair.target]
        lone = [*pair.only_reference, *pair.only_target]
        if call.op != GRADIENTS or any(is_input(s) and not _is_beside(s) for s in lone):
            continue
        slots = [s for n, s in paired.slots[index].items() if is_input(n) and not _is_beside(n)]
        gradients = [arrays for slot in slots if (arrays := paired.arrays(slot)) is not None]
        try:
            of_reference = _factors(paired.reference, call)
            of_target = _factors(paired.target, partner)
        except ElementsMissing:
            continue
        numbers = [
            (of_reference.get(s.reference_slot, 1.0), of_target.get(s.target_slot, 1.0))
            for s in slots
        ]
        whole = fit(gradients, numbers) if len(gradients) == len(slots) else None
        if whole is not None:
            each = (fit([both], [number]) for both, number in zip(gradients, numbers))
            yield (
                (call.rank, call.root, call.step),
                StepGradients(
                    whole,
                    tuple(known for known in each if known is not None),
                    any(a != b for a, b in numbers),
                ),
            )


def _is_beside(slot: str) -> bool:
    """Whether the slot holds another tensor that code reads to change gradients, not a gradient."""
    return is_of_loss_scaler(slot) or is_read_beside(slot)


def fit(pairs: Sequence[tuple[Array, Array]], scales: Sequence[tuple[float, float]]) -> Fit | None:
    """The fit of these (reference, target) pairs, each array times its number in `scales`; None if
    shapes differ or the norms are zero or not finite.
    """
    if any(a.shape != b.shape for a, b in pairs):
        return None
    product = own = others = 0.0
    for arrays, numbers in zip(pairs, scales, strict=True):
        a, b = (x.astype(np.float64) * s for x, s in zip(arrays, numbers, strict=True))
        product += float(np.vdot(a, b))
        own += float(np.vdot(a, a))
        others += float(np.vdot(b, b))
    if not own > 0 or not math.isfinite(own + others):
        return None
    # |b - s a|^2 with s = (a, b) / (a, a)
    left = max(0.0, others - product * product / own)
    return Fit(product / own, math.sqrt(left / own))


def _factors(run: Run, call: Call) -> dict[str, float]:
    """By slot of a gradient, the product of the numbers that a call multiplies it by first:
    constants of its code and settings of a loss scaler. Raises ElementsMissing.
    """
    settings = _scaler_settings(run, call)
    program = run.programs.get(call.program)
    if program is None:
        inverse = settings.get(INVERSE_SCALE, 1.0) / settings.get(GRAD_SCALE, 1.0)
        return {ref.slot: inverse for ref in call.slots("input")}
    scaled: dict[_OperandKey, tuple[str, float]] = {
        ("in", place): (slot, 1.0) for place, slot in enumerate(program.inputs)
    }
    numbers: dict[_OperandKey, float] = {
        ("in", place): settings[slot]
        for place, slot in enumerate(program.inputs)
        if slot in settings
    }
    factors = dict.fromkeys(program.inputs, 1.0)
    for place, operation in enumerate(program.operations):
        for output, value, number in _multiplied(operation, numbers):
            slot, factor = scaled.get(value, ("", math.nan))
            if math.isfinite(factor * number):
                factors[slot] = factor * number
                scaled["op", (place, output)] = slot, factor * number
    return factors


_MULTIPLY = {"mul", "mul_", "_foreach_mul", "_foreach_mul_"}
_DIVIDE = {"div", "div_", "_foreach_div", "_foreach_div_"}


def _multiplied(
    operation: Operation, numbers: Mapping[_OperandKey, float]
) -> Iterator[tuple[int, _OperandKey, float]]:
    """(output, operand, factor) for each tensor that an operation multiplies or divides by a
    number. numbers: values of the operands that are a single number.
    """
    name = operation.name.split(".")[1] if operation.name.startswith("aten.") else ""
    if name not in _MULTIPLY | _DIVIDE or len(operation.args) != 2 or operation.kwargs:
        return
    values, by = operation.args
    if isinstance(by, dict):
        by = numbers.get(_operand_key(by))
    if not isinstance(by, (int, float)) or not by:
        return
    number = 1 / by if name in _DIVIDE else float(by)
    for output, value in enumerate(values if isinstance(values, (list, tuple)) else [values]):
        yield output, _operand_key(value), number


def _operand_key(value: Any) -> _OperandKey:
    """The key of a program's input or of an operation's result; ("", None) for anything else."""
    kind = next(iter(value), "") if isinstance(value, dict) else ""
    if kind not in ("in", "op"):
        return "", None
    return kind, tuple(value[kind]) if kind == "op" else value[kind]


def _scaler_settings(run: Run, call: Call) -> dict[str, float]:
    """The loss scaler's settings that a `gradients` call reads, by slot. Raises ElementsMissing."""
    return {
        ref.slot: float(run.array(ref.record).reshape(-1)[0])
        for ref in call.refs
        if is_of_loss_scaler(ref.slot)
    }
