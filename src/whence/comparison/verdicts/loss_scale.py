"""A loss that is scaled otherwise, and whose scale is taken out again before the optimiser: divided
by the number of micro-batches or started from with that gradient, with another scale of a loss
scaler or without one, or gradients that are divided in the place of the loss. What the optimiser
takes is the same, so nothing computes something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence.comparison.paired_runs import PairedRuns
from whence.comparison.programs.loss_scalers import scaler_settings, without_scaler
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Operation, Program, Run
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
from whence.results import GUILTY, CauseKind, SlotPair, Verdict, VerdictKind

Verdicts = dict[tuple[int, int], Verdict]
_Key = tuple[str, Any]
"""An operand of a program: its kind and its place."""

_LOSS, _GRADIENTS = "loss", "gradients"
"""Names of the calls of a training step (docs/training.md)."""
_UNDONE = "undone_scale"
"""By how much a loss was off, among the numbers of a verdict that is withdrawn."""
_OFF = 0.02
"""How far the scale of all gradients may be from 1, as a share of what the loss is off by: the
question is which of the two scales reaches the optimiser. A small ResNet under bfloat16 autocast
leaves 1.5 %.
"""
_LEFT = 0.25
"""What may be left of all gradients once their scale is taken out, as that share: a small network
with batch norms under autocast leaves 0.24. More, and their scale says little.
"""
_CARRIES = 0.1
"""What is left of the gradient of one parameter whose scale is known."""

_FACTOR = 0.01
"""What 16 bits leave where tensors differ by a factor alone, over their 2-norm."""


class _Fit(NamedTuple):
    """The least squares target = scale x reference; residual: what is left, over the 2-norm of the
    reference's.
    """

    scale: float
    residual: float


class _Gradients(NamedTuple):
    """How gradients of two runs, as a step begins, are in proportion: all together, and each."""

    all: _Fit
    each: tuple[_Fit, ...]

    def agrees(self, factor: float) -> bool:
        """Are they of one scale, where they would be off by this factor if a loss's scale reached
        them? No gradient may be off by the factor, however small it is beside the others.
        """
        size = min(abs(factor - 1), abs(1 / factor - 1), 1.0)
        if abs(self.all.scale - 1) > _OFF * size or self.all.residual > _LEFT * size:
            return False
        known = (fit for fit in self.each if fit.residual <= _CARRIES * size * abs(fit.scale))
        return all(abs(fit.scale - 1) <= abs(fit.scale - factor) for fit in known)


def undone(verdicts: Verdicts, paired: PairedRuns) -> Verdicts:
    """The verdicts, without those of losses whose other scale does not reach the optimiser.

    Gradients before they are clipped count: clipping takes any scale out.
    """
    verdicts = _with_scalers(verdicts, paired)
    differing = [
        (key, verdict, slots)
        for key, verdict in verdicts.items()
        if verdict.verdict in (*GUILTY, VerdictKind.UNDETERMINED)
        and (slots := list(_of_loss(paired, key, verdict)))
    ]
    if not differing:
        return verdicts
    out, fits = dict(verdicts), dict(_fits(paired))
    for key, verdict, slots in differing:
        call = paired.calls[key[0]]
        factor = _factor(paired, slots)
        fit = fits.get((call.rank, call.root, call.step))
        if factor is not None and fit is not None and fit.agrees(factor):
            words = f"{factor:.6g} times the reference's, which does not reach the optimiser"
            out[key] = verdict.withdrawn(
                VerdictKind.NOISE,
                f"{words}; {verdict.sentence}",
                numbers={**verdict.numbers, _UNDONE: factor},
            )
    return out


def _with_scalers(verdicts: Verdicts, paired: PairedRuns) -> Verdicts:
    """The verdicts, without those of gradients that were changed alike but for the operations of a
    loss scaler, which one of the runs lacks or has in another place.

    The target's own operators have to give what it recorded: `semantic` says so.
    """
    out = dict(verdicts)
    for key, verdict in verdicts.items():
        call = paired.calls[key[0]]
        if call.op != _GRADIENTS or verdict.cause != CauseKind.SEMANTIC:
            continue
        partner = paired.target.calls[paired.plan.pairs[verdict.pair].target]
        if _scaler_slots(call) == _scaler_slots(partner):
            continue
        programs = _without_scaler(paired.reference, call), _without_scaler(paired.target, partner)
        if None not in programs and _operations(programs[0]) == _operations(programs[1]):
            words = "the same operations once the scale of the loss scaler is out"
            out[key] = verdict.withdrawn(VerdictKind.NOISE, f"{words}; {verdict.sentence}")
    return out


def _scaler_slots(call: Call) -> set[str]:
    return {ref.slot for ref in call.refs if is_of_loss_scaler(ref.slot)}


def _without_scaler(run: Run, call: Call) -> Program | None:
    """The program of a call of `gradients` without a scaler's operations, None where there is none
    that is known.
    """
    program = run.programs.get(call.program)
    if program is None:
        return None
    try:
        return without_scaler(program, scaler_settings(run, call))
    except ElementsMissing:
        return None


def _operations(program: Program | None) -> Any:
    """What a program computes, whatever its dtypes."""
    return program and (program.operations, program.inputs, program.outputs)


def notes(verdicts: Iterable[Verdict], paired: PairedRuns) -> Iterator[str]:
    """What is said of losses whose other scale is taken out again."""
    factors = [
        factor
        for verdict in verdicts
        if (factor := verdict.numbers.get(_UNDONE)) is not None
        and paired.calls[paired.plan.pairs[verdict.pair].reference].phase == "forward"
    ]
    if factors:
        yield (
            f"the loss is {factors[0]:.6g} times the reference's; the scale does not reach the "
            "optimiser: gradients before clipping are of one scale"
        )


def _of_loss(paired: PairedRuns, key: tuple[int, int], verdict: Verdict) -> Iterator[SlotPair]:
    """The tensors that a verdict is about where it is one about a loss, its backward pass, or a
    number that it is given, as a loss scaler's scale.
    """
    call, stretch = key
    if paired.calls[call].op == _LOSS:
        yield from (s for n, s in paired.slots[verdict.pair].items() if is_output(n))
    elif is_of_child(verdict.slot) and 0 <= stretch < len(paired.kids.get(call, ())):
        child = paired.kids[call][stretch]
        index = paired.pair_of.get(child)
        slots = paired.slots[index] if index is not None else {}
        slot = slots.get(split_child(verdict.slot)[1])
        is_of_loss = paired.calls[child].op == _LOSS
        if is_of_loss and slot and paired.reference.records[slot.reference_record].count == 1:
            yield slot


def _factor(paired: PairedRuns, slots: Sequence[SlotPair]) -> float | None:
    """How many times the reference's these tensors are; None where they are off by more than a
    factor.
    """
    pairs = [paired.arrays(s) for s in slots]
    if None in pairs:
        return None
    fit = _fit([pair for pair in pairs if pair is not None], [(1.0, 1.0)] * len(pairs))
    if fit is None or not fit.scale or fit.residual > _FACTOR * abs(fit.scale):
        return None
    return fit.scale


def _fits(paired: PairedRuns) -> Iterator[tuple[tuple[int, str, int], _Gradients]]:
    """By (rank, root, step), of gradients as the last backward pass left them, times the numbers
    that they are multiplied by before anything else is done to them. Steps of which a gradient has
    no partner are left out.
    """
    for index, pair in enumerate(paired.plan.pairs):
        call, partner = paired.calls[pair.reference], paired.target.calls[pair.target]
        lone = [*pair.only_reference, *pair.only_target]
        if call.op != _GRADIENTS or any(is_input(s) and not _is_beside(s) for s in lone):
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
        fit = _fit(gradients, numbers) if len(gradients) == len(slots) else None
        if fit is not None:
            each = (_fit([pair], [number]) for pair, number in zip(gradients, numbers))
            every = _Gradients(fit, tuple(part for part in each if part is not None))
            yield (call.rank, call.root, call.step), every


def _is_beside(slot: str) -> bool:
    """Is it what code reads that changes gradients, and no gradient?"""
    return is_of_loss_scaler(slot) or is_read_beside(slot)


def _fit(
    pairs: Sequence[tuple[Array, Array]], scales: Sequence[tuple[float, float]]
) -> _Fit | None:
    """The fit of these pairs, each side times its number in `scales`."""
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
    return _Fit(product / own, math.sqrt(left / own))


def _factors(run: Run, call: Call) -> dict[str, float]:
    """By slot of a gradient, the product of the numbers that a call first multiplies it by: those
    that its code has, and the settings of a loss scaler. Raises ElementsMissing.
    """
    settings = scaler_settings(run, call)
    program = run.programs.get(call.program)
    if program is None:
        inverse = settings.get(INVERSE_SCALE, 1.0) / settings.get(GRAD_SCALE, 1.0)
        return {ref.slot: inverse for ref in call.slots("input")}
    scaled: dict[_Key, tuple[str, float]] = {
        ("in", place): (slot, 1.0) for place, slot in enumerate(program.inputs)
    }
    numbers: dict[_Key, float] = {
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
    operation: Operation, numbers: Mapping[_Key, float]
) -> Iterator[tuple[int, _Key, float]]:
    """(number of its output, operand, number that it is multiplied by) of an operation that
    multiplies or divides tensors by one number. numbers: operands that are one.
    """
    name = operation.name.split(".")[1] if operation.name.startswith("aten.") else ""
    if name not in _MULTIPLY | _DIVIDE or len(operation.args) != 2 or operation.kwargs:
        return
    values, by = operation.args
    if isinstance(by, dict):
        by = numbers.get(_key(by) or ("", None))
    if not isinstance(by, (int, float)) or not by:
        return
    number = 1 / by if name in _DIVIDE else float(by)
    for output, value in enumerate(values if isinstance(values, (list, tuple)) else [values]):
        if (key := _key(value)) is not None:
            yield output, key, number


def _key(operand: Any) -> _Key | None:
    """An operand that is an input or an output of an operation, as a key; None for any other."""
    if isinstance(operand, dict) and (kind := next(iter(operand))) in ("in", "op"):
        place = operand[kind]
        return kind, tuple(place) if kind == "op" else place
    return None
