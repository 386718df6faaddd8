"""What functions of torch do to gradients before a step, as operations of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Operand = dict[str, Any]
Run = Callable[..., Operand]
"""Adds an operation to a program: its name and arguments, to its result."""
Change = Callable[[Sequence[Operand], Run, Operand | None], list[Operand]]
"""From the operands of gradients, and that of what the change reads beside them, to what they are
after it.
"""


def unscale(gradients: Sequence[Operand], run: Run, inverse: Operand | None) -> list[Operand]:
    """What a loss scaler does: every gradient times the inverse of the scale."""
    return [run("aten.mul.Tensor", gradient, inverse) for gradient in gradients]


def clip_norm(limit: float, kind: float) -> Change:
    """What `clip_grad_norm_` does: the norm of all norms, and every gradient times
    min(1, limit / (norm + 1e-6)).
    """
    order: Any = {"float": "inf"} if kind == float("inf") else kind

    def change(gradients: Sequence[Operand], run: Run, _: Operand | None) -> list[Operand]:
        norms = [run("aten.linalg_vector_norm.default", g, order) for g in gradients]
        total = run("aten.linalg_vector_norm.default", run("aten.stack.default", norms), order)
        inverse = run("aten.reciprocal.default", run("aten.add.Tensor", total, 1e-6))
        share = run("aten.mul.Tensor", inverse, limit)
        factor = run("aten.clamp.default", share, None, 1.0)
        return [run("aten.mul.Tensor", g, factor) for g in gradients]

    return change


def clip_elements(limit: float) -> Change:
    """What `clip_grad_value_` does: every element between the value and its negative."""

    def change(gradients: Sequence[Operand], run: Run, _: Operand | None) -> list[Operand]:
        return [run("aten.clamp.default", g, -limit, limit) for g in gradients]

    return change
