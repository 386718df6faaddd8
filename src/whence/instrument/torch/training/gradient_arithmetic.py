"""What functions of torch do to gradients before a step, as operations of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Operand = dict[str, Any]
Run = Callable[..., Operand]
"""Adds an operation to a program: its name and arguments, to its result."""
Change = Callable[[Sequence[Operand], Run, Sequence[Operand]], list[Operand]]
"""From the operands of gradients, and those of what the change reads beside them, to what they are
after it.
"""


def unscale(gradients: Sequence[Operand], run: Run, beside: Sequence[Operand]) -> list[Operand]:
    """What a loss scaler does: every gradient times the inverse of the scale, the first of
    `beside`.
    """
    return [run("aten.mul.Tensor", gradient, beside[0]) for gradient in gradients]


def divide_unless_infinite(
    gradients: Sequence[Operand], run: Run, beside: Sequence[Operand]
) -> list[Operand]:
    """What a fused step does with gradients: divides them by the scale, the first of `beside`,
    unless the second says that one of them is not finite.
    """
    divided = [run("aten.div.Tensor", gradient, beside[0]) for gradient in gradients]
    return unless_infinite(gradients, divided, run, beside[1]) if len(beside) > 1 else divided


def unless_infinite(
    before: Sequence[Operand], after: Sequence[Operand], run: Run, found_inf: Operand
) -> list[Operand]:
    """What a fused step leaves: nothing is changed where `found_inf` is more than 0."""
    skipped = run("aten.gt.Scalar", found_inf, 0)
    return [run("aten.where.self", skipped, old, new) for old, new in zip(before, after)]


def clip_norm(limit: float, kind: float) -> Change:
    """What `clip_grad_norm_` does: the norm of all norms, and every gradient times
    min(1, limit / (norm + 1e-6)).
    """
    order: Any = {"float": "inf"} if kind == float("inf") else kind

    def change(gradients: Sequence[Operand], run: Run, _: Sequence[Operand]) -> list[Operand]:
        norms = [run("aten.linalg_vector_norm.default", g, order) for g in gradients]
        total = run("aten.linalg_vector_norm.default", run("aten.stack.default", norms), order)
        inverse = run("aten.reciprocal.default", run("aten.add.Tensor", total, 1e-6))
        share = run("aten.mul.Tensor", inverse, limit)
        factor = run("aten.clamp.default", share, None, 1.0)
        return [run("aten.mul.Tensor", g, factor) for g in gradients]

    return change


def clip_elements(limit: float) -> Change:
    """What `clip_grad_value_` does: every element between the value and its negative."""

    def change(gradients: Sequence[Operand], run: Run, _: Sequence[Operand]) -> list[Operand]:
        return [run("aten.clamp.default", g, -limit, limit) for g in gradients]

    return change
