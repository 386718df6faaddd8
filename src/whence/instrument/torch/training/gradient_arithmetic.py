"""What is done to gradients before a step, as operations of one program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from whence.frameworks.torch_arrays import NAMES
from whence.records import Operation, Program, Ref
from whence.records.program import identified

Operand = dict[str, Any]
Run = Callable[[Operation], Operand]
"""Adds an operation to a program: to its result."""
Change = Callable[[Sequence[Operand], Run, Sequence[Operand]], list[Operand]]
"""From the operands of gradients, and those of what the change reads beside them, to what they are
after it.
"""


class ReadBeside(NamedTuple):
    """A tensor that a change reads beside the gradients."""

    ref: Ref
    dtype: str


class RecordedChange(NamedTuple):
    """A change that was recorded. parameters: by identity; change: None where it depends on what is
    not known.
    """

    what: str
    parameters: tuple[int, ...]
    change: Change | None
    arguments: dict[str, Any]
    read: tuple[ReadBeside, ...] = ()


def _op(name: str, *args: Any) -> Operation:
    return Operation(name, args)


def unscale(gradients: Sequence[Operand], run: Run, inverse: Sequence[Operand]) -> list[Operand]:
    """What a loss scaler does: every gradient times the inverse of the scale."""
    return [run(_op("aten.mul.Tensor", gradient, *inverse)) for gradient in gradients]


def divide_unless_infinite(
    gradients: Sequence[Operand], run: Run, beside: Sequence[Operand]
) -> list[Operand]:
    """What a fused step does with gradients: divides them by the scale, the first of `beside`,
    unless the second says that one of them is not finite.
    """
    divided = [run(_op("aten.div.Tensor", gradient, beside[0])) for gradient in gradients]
    return unless_infinite(gradients, divided, run, beside[1]) if len(beside) > 1 else divided


def unless_infinite(
    before: Sequence[Operand], after: Sequence[Operand], run: Run, found_inf: Operand
) -> list[Operand]:
    """What a fused step leaves: nothing is changed where `found_inf` is more than 0."""
    skipped = run(_op("aten.gt.Scalar", found_inf, 0))
    return [run(_op("aten.where.self", skipped, old, new)) for old, new in zip(before, after)]


def clip_norm(limit: float, kind: float) -> Change:
    """What `clip_grad_norm_` does: the norm of all norms, and every gradient times
    min(1, limit / (norm + 1e-6)).
    """
    order: Any = {"float": "inf"} if kind == float("inf") else kind
    norm = "aten.linalg_vector_norm.default"

    def change(gradients: Sequence[Operand], run: Run, _: Sequence[Operand]) -> list[Operand]:
        norms = run(_op("aten.stack.default", [run(_op(norm, g, order)) for g in gradients]))
        positive = run(_op("aten.add.Tensor", run(_op(norm, norms, order)), 1e-6))
        share = run(_op("aten.mul.Tensor", run(_op("aten.reciprocal.default", positive)), limit))
        factor = run(_op("aten.clamp.default", share, None, 1.0))
        return [run(_op("aten.mul.Tensor", g, factor)) for g in gradients]

    return change


def clip_elements(limit: float) -> Change:
    """What `clip_grad_value_` does: every element between the value and its negative."""

    def change(gradients: Sequence[Operand], run: Run, _: Sequence[Operand]) -> list[Operand]:
        return [run(_op("aten.clamp.default", g, -limit, limit)) for g in gradients]

    return change


def composed(
    changes: Sequence[RecordedChange],
    named: Mapping[int, str],
    dtypes: Mapping[int, str],
    unknown: Collection[int],
    taken: Sequence[str],
) -> Program | None:
    """All changes as one program, None where it has nothing to make.

    named, dtypes: path and dtype of the gradients that it reads, by identity of their parameter.
    unknown: those that something else changed. taken: paths of what the optimiser takes.
    """
    operations: list[Operation] = []

    def run(operation: Operation) -> Operand:
        operations.append(operation)
        return {"op": [len(operations) - 1, 0]}

    operands: dict[int, Operand | None] = {
        i: {"in": k} if i not in unknown else None for k, i in enumerate(named)
    }
    reads = {read.ref.slot: read.dtype for recorded in changes for read in recorded.read}
    places = {slot: {"in": len(named) + k} for k, slot in enumerate(reads)}
    for recorded in changes:
        before = [operands.get(i) for i in recorded.parameters]
        whole = [operand for operand in before if operand is not None]
        if recorded.change is None or len(whole) < len(before):
            operands.update(dict.fromkeys(recorded.parameters))
        else:
            beside = [places[read.ref.slot] for read in recorded.read]
            changed = recorded.change(whole, run, beside)
            operands.update(zip(recorded.parameters, changed, strict=True))
    made = {path: operands.get(i) for i, path in named.items()}
    outputs = [(f"output.{path}", made[path]) for path in taken if made[path] is not None]
    if not outputs:
        return None
    every = (*(dtypes[i] for i in named), *reads.values())
    return identified(
        Program(
            id="",
            operations=tuple(operations),
            inputs=(*(f"input.{path}" for path in named.values()), *reads),
            outputs=tuple(outputs),
            base=every[0],
            input_dtypes=every,
            default_dtype=NAMES[torch.get_default_dtype()],
        )
    )
