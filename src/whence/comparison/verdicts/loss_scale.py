"""A loss that is scaled otherwise, and whose scale is taken out again before the optimiser: divided
by the number of micro-batches or started from with that gradient, with another scale of a loss
scaler or without one, or gradients that are divided in the place of the loss. What the optimiser
takes is the same, so nothing computes something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence.comparison.paired_runs import PairedRuns
from whence.dtypes import Array
from whence.records import Call, Operation, Run
from whence.records.slots import (
    INVERSE_SCALE,
    READ_BESIDE,
    is_input,
    is_of_child,
    is_output,
    split_child,
)
from whence.results import GUILTY, SlotPair, Verdict, VerdictKind

Verdicts = dict[tuple[int, int], Verdict]
_Key = tuple[str, Any]
"""An operand of a program: its kind and its place."""

_LOSS, _GRADIENTS = "loss", "gradients"
"""Names of the calls of a training step (docs/training.md)."""
_UNDONE = "undone_scale"
"""By how much a loss was off, among the numbers of a verdict that is withdrawn."""
_AGREES = 1e-3
"""By how much of what the loss is off by the gradients may be, in size and direction."""

_FACTOR = 0.01
"""What 16 bits leave where tensors differ by a factor alone, over their 2-norm."""


class _Fit(NamedTuple):
    """The least squares target = scale x reference of all gradients; residual: what is left, over
    the 2-norm of the reference's.
    """

    scale: float
    residual: float

    def is_off_by(self, scale: float, factor: float) -> bool:
        """Is it this scale, for gradients that would be off by `factor` if a loss's scale reached
        them?
        """
        limit = _AGREES * min(abs(factor - 1), abs(1 / factor - 1), 1.0)
        return abs(self.scale / scale - 1) <= limit and self.residual <= limit * scale


class _Step(NamedTuple):
    """The gradients of one step. whole: the fit of all; each: of every one. is_moved: are they
    multiplied by other numbers before the optimiser takes them?
    """

    whole: _Fit
    each: list[_Fit]
    is_moved: bool

    def agrees(self, factor: float) -> bool:
        """Does a loss's other scale reach none of them? Most agree then; others may have a fault of
        their own, but are not off by just this factor.
        """
        if self.whole.is_off_by(1.0, factor):
            return True
        agreeing = sum(fit.is_off_by(1.0, factor) for fit in self.each)
        reached = any(fit.is_off_by(factor, factor) for fit in self.each)
        return 2 * agreeing > len(self.each) and not reached


def undone(verdicts: Verdicts, paired: PairedRuns) -> Verdicts:
    """The verdicts, without those of losses whose other scale does not reach the optimiser.

    Gradients before they are clipped count: clipping takes any scale out.
    """
    suspects = {
        key: verdict
        for key, verdict in verdicts.items()
        if verdict.verdict in (*GUILTY, VerdictKind.UNDETERMINED)
    }
    differing = {
        key: slots for key, v in suspects.items() if (slots := list(_of_loss(paired, key, v)))
    }
    taken = [key for key in suspects if paired.calls[key[0]].op == _GRADIENTS]
    if not differing and not taken:
        return verdicts
    out, steps = dict(verdicts), dict(_steps(paired))
    for key, slots in differing.items():
        call, verdict = paired.calls[key[0]], verdicts[key]
        factor = _factor(paired, slots)
        step = steps.get((call.rank, call.root, call.step))
        if factor is not None and step is not None and step.agrees(factor):
            words = f"{factor:.6g} times the reference's, which does not reach the optimiser"
            out[key] = verdict.withdrawn(
                VerdictKind.NOISE,
                f"{words}; {verdict.sentence}",
                numbers={**verdict.numbers, _UNDONE: factor},
            )
    for key in taken:
        call, verdict = paired.calls[key[0]], verdicts[key]
        step = steps.get((call.rank, call.root, call.step))
        if step is not None and step.is_moved and _are_taken_alike(paired, verdict.pair):
            words = "gradients are scaled here, and a loss in the other run: they leave alike"
            out[key] = verdict.withdrawn(VerdictKind.NOISE, f"{words}; {verdict.sentence}")
    return out


def _are_taken_alike(paired: PairedRuns, index: int) -> bool:
    """Does the optimiser take the same gradients in both runs, each but for a little?"""
    slots = [s for name, s in paired.slots[index].items() if is_output(name)]
    pairs = [paired.arrays(s) for s in slots]
    lone = [*paired.plan.pairs[index].only_reference, *paired.plan.pairs[index].only_target]
    return not any(map(is_output, lone)) and all(
        pair is not None
        and (fit := _fit([pair], [(1.0, 1.0)])) is not None
        and fit.is_off_by(1.0, 2.0)
        for pair in pairs
    )


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


def _steps(paired: PairedRuns) -> Iterator[tuple[tuple[int, str, int], _Step]]:
    """By (rank, root, step), of gradients as the last backward pass left them, times the numbers
    that they are multiplied by before anything else is done to them. Steps of which a gradient has
    no partner are left out.
    """
    for index, pair in enumerate(paired.plan.pairs):
        call, partner = paired.calls[pair.reference], paired.target.calls[pair.target]
        lone = [*pair.only_reference, *pair.only_target]
        if call.op != _GRADIENTS or any(is_input(s) and not _is_beside(s) for s in lone):
            continue
        scales = _factors(paired.reference, call), _factors(paired.target, partner)
        slots = [s for n, s in paired.slots[index].items() if is_input(n) and not _is_beside(n)]
        numbers = [
            (scales[0].get(s.reference_slot, 1.0), scales[1].get(s.target_slot, 1.0)) for s in slots
        ]
        pairs = [both for s in slots if (both := paired.arrays(s)) is not None]
        if len(pairs) < len(slots):
            continue
        whole = _fit(pairs, numbers)
        each = [_fit([both], [number]) for both, number in zip(pairs, numbers, strict=True)]
        if whole is not None:
            is_moved = any(a != b for a, b in numbers)
            yield (
                (call.rank, call.root, call.step),
                _Step(whole, [fit for fit in each if fit is not None], is_moved),
            )


def _is_beside(slot: str) -> bool:
    """Is it what code reads that changes gradients, and no gradient?"""
    return slot == INVERSE_SCALE or slot.startswith(READ_BESIDE)


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
    that its code has, and what a loss scaler divides by.
    """
    program = run.programs.get(call.program)
    inverse = _inverse_scale(run, call)
    if program is None:
        return {ref.slot: inverse for ref in call.slots("input")}
    scaled: dict[tuple[str, Any], tuple[str, float]] = {
        ("in", place): (slot, 1.0) for place, slot in enumerate(program.inputs)
    }
    of_scaler = {
        ("in", place): inverse for place, slot in enumerate(program.inputs) if slot == INVERSE_SCALE
    }
    factors = dict.fromkeys(program.inputs, 1.0)
    for place, operation in enumerate(program.operations):
        for output, value, number in _multiplied(operation):
            slot, factor = scaled.get(value, ("", math.nan))
            by = of_scaler.get(number, math.nan) if isinstance(number, tuple) else number
            if math.isfinite(factor * by):
                factors[slot] = factor * by
                scaled["op", (place, output)] = slot, factor * by
    return factors


_MULTIPLY = {"mul", "mul_", "_foreach_mul", "_foreach_mul_"}
_DIVIDE = {"div", "div_", "_foreach_div", "_foreach_div_"}


def _multiplied(operation: Operation) -> Iterator[tuple[int, _Key, float | _Key]]:
    """(number of its output, operand, number that it is multiplied by or the operand of that) of an
    operation that multiplies or divides tensors by one number.
    """
    name = operation.name.split(".")[1] if operation.name.startswith("aten.") else ""
    if name not in _MULTIPLY | _DIVIDE or len(operation.args) != 2 or operation.kwargs:
        return
    values, number = operation.args
    if isinstance(number, dict):
        by: float | _Key | None = _key(number)
    elif isinstance(number, (int, float)) and number:
        by = 1 / number if name in _DIVIDE else float(number)
    else:
        by = None
    if by is None or (name in _DIVIDE and isinstance(by, tuple)):
        return
    for output, value in enumerate(values if isinstance(values, (list, tuple)) else [values]):
        if (key := _key(value)) is not None:
            yield output, key, by


def _key(operand: Any) -> _Key | None:
    """An operand that is an input or an output of an operation, as a key; None for any other."""
    if isinstance(operand, dict) and (kind := next(iter(operand))) in ("in", "op"):
        place = operand[kind]
        return kind, tuple(place) if kind == "op" else place
    return None


def _inverse_scale(run: Run, call: Call) -> float:
    """What a loss scaler multiplied the gradients of a call by; 1 where there was none."""
    record = next((r.record for r in call.refs if r.slot == INVERSE_SCALE), None)
    return 1.0 if record is None else float(run.array(record).reshape(-1)[0])
