"""Does a row depend on the rows beside it, on their number, or on its place among them?"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace

from whence.results.probe import Held, Property, PropertyAnswer, SpreadShare, Variant
from whence.workflows.probe.torch.answering import answer
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import Judge, guilty
from whence.workflows.probe.torch.regions import Row
from whence.workflows.probe.torch.spreading import shares_of_rows

SIZES = (2, 3, 8, 32)
_STATISTICS = ("batch_norm",)


def batch(judge: Judge, inputs: CallInputs) -> PropertyAnswer:
    """Put other rows beside a row, more of them, and in another order: it may not move."""
    if inputs.batch_axis is None:
        why = f"{inputs.main} has no axis of rows"
        return PropertyAnswer(Property.BATCH, Held.ABSENT, why=why)
    one = inputs.with_rows([0])
    first, second = (_beside(one, seed) for seed in (11, 23))
    beside, others = one.joined(first[:2]), one.joined(second[:2])
    middle = [1, 0, 2]
    content = judge.variant(
        "other rows beside it",
        beside.with_rows(middle),
        others.with_rows(middle),
        Row(3, 1, 1, at=1),
        twin=one,
    )
    turned = beside.with_rows([1, 2, 0])
    order = judge.variant("the rows in another order", beside, turned, Row(3, 1, 0, at=2), twin=one)
    sizes = [
        judge.variant(
            f"last in a batch of {size}",
            one,
            one.joined(first[: size - 1]).with_rows([*range(1, size), 0]),
            Row(1, size, 0, at=size - 1),
        )
        for size in SIZES
    ]
    variants = [content, order, *sizes]
    if inputs.rows > 1:
        name = f"in its own batch of {inputs.rows}"
        variants.append(judge.variant(name, one, inputs, Row(1, inputs.rows)))
    shares: tuple[SpreadShare, ...] = ()
    rounded = [v for v in sizes if v.held == Held.ROUNDING]
    if rounded:
        largest = max(rounded, key=lambda v: v.moved)
        size = SIZES[sizes.index(largest)]
        shares = shares_of_rows(judge, one, one.joined(first[: size - 1]), size)
    result = answer(Property.BATCH, variants, cause=_cause(variants, judge.subject.model))
    return replace(result, shares=shares)


def _beside(one: CallInputs, seed: int) -> list[torch.Tensor]:
    return [other_tokens(one.tensor, seed + n) for n in range(max(SIZES) - 1)]


def _cause(variants: list[Variant], model: Any) -> str:
    content, order = variants[:2]
    place = guilty(variants)
    if place is None and not any(v.held == Held.VIOLATED for v in variants):
        return ""
    if place is not None and any(word in place.operator for word in _STATISTICS):
        mode = "in training mode, " if model.training else ""
        return f"{mode}statistics are taken over the batch"
    if content.held == Held.VIOLATED:
        return "leak: what stands in other rows reaches this one"
    if order.held == Held.VIOLATED:
        return "the place of a row in the batch matters"
    return "the number of rows matters, by more than rounding"
