"""How the gradients of two runs are in proportion as an optimiser's step begins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence.comparison.paired_runs import PairedRuns
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Operation, Run
from whence.records.slots import (
    GRAD_SCALE,
    INVERSE_SCALE,
    is_input,
    is_of_loss_scaler,
    is_read_beside,
)
from whence.records.training import GRADIENTS

_OFF = 0.02
"""How far the scale of gradients may be from 1, as a share of what the loss is off by: the question
is which of two scales reaches the optimiser. A small ResNet under bfloat16 autocast leaves 1.5 %.
"""
_LEFT = 0.25
"""What may be left of all gradients once their scale is taken out, as that share: a small network
with batch norms under autocast leaves 0.24. More, and their scale says little.
"""
_CARRIES = 0.1
"""What is left of the gradient of one parameter whose scale is known."""


_OperandKey = tuple[str, Any]
"""An operand as it can be looked up."""


class Fit(NamedTuple):
    """The least squares target = scale x reference; residual: what is left, over the 2-norm of the
    reference's.
    """

    scale: float
    residual: float

    def is_one(self, size: float) -> bool:
        """Is the scale 1, where another would be off by `size`?"""
        return abs(self.scale - 1) <= _OFF * size and self.residual <= _LEFT * size

    def is_of(self, factor: float, size: float) -> bool:
        """Is the scale known, and nearer to this factor than to 1?"""
        is_known = self.residual <= _CARRIES * size * abs(self.scale)
        return is_known and abs(self.scale - factor) < abs(self.scale - 1)


class StepGradients(NamedTuple):
    """The gradients of one step. whole: the fit of all; each: of every one. is_moved: are they
    multiplied by other numbers before the optimiser takes them?
    """

    whole: Fit
    each: tuple[Fit, ...]
    is_moved: bool

    def agree(self, factor: float) -> bool:
        """Does the scale of a loss that is off by this factor reach none of them? All together are
        of one scale then, or most are: others may have a fault of their own. None is off by just
        this factor, however small it is beside the others.
        """
        size = min(abs(factor - 1), abs(1 / factor - 1), 1.0)
        if any(fit.is_of(factor, size) for fit in self.each):
            return False
        agreeing = sum(fit.is_one(size) for fit in self.each)
        return self.whole.is_one(size) or 2 * agreeing > len(self.each)


def gradients_of_steps(
    paired: PairedRuns,
) -> Iterator[tuple[tuple[int, str, int], StepGradients]]:
    """By (rank, root, step), of gradients as the last backward pass left them, times the numbers
    that they are multiplied by before anything else is done to them. Steps of which a gradient has
    no partner or no elements are left out.
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
    """Is it what code reads that changes gradients, and no gradient?"""
    return is_of_loss_scaler(slot) or is_read_beside(slot)


def fit(pairs: Sequence[tuple[Array, Array]], scales: Sequence[tuple[float, float]]) -> Fit | None:
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
    return Fit(product / own, math.sqrt(left / own))


def _factors(run: Run, call: Call) -> dict[str, float]:
    """By slot of a gradient, the product of the numbers that a call first multiplies it by: those
    that its code has, and the settings of a loss scaler. Raises ElementsMissing.
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
    """(number of its output, operand, number that it is multiplied by) of an operation that
    multiplies or divides tensors by one number. numbers: operands that are one.
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
    """An input of a program or the result of an operation, as it can be looked up; ("", None) for
    anything else.
    """
    kind = next(iter(value), "") if isinstance(value, dict) else ""
    if kind not in ("in", "op"):
        return "", None
    return kind, tuple(value[kind]) if kind == "op" else value[kind]


def _scaler_settings(run: Run, call: Call) -> dict[str, float]:
    """What the loss scaler of a call of `gradients` is set to, by slot. Raises ElementsMissing."""
    return {
        ref.slot: float(run.array(ref.record).reshape(-1)[0])
        for ref in call.refs
        if is_of_loss_scaler(ref.slot)
    }
