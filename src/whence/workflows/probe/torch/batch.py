"""Does a row depend on the rows beside it, on their number, or on its place among them?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from whence.results.probe import Held, Property, PropertyAnswer, SpreadShare, Variant
from whence.workflows.probe.torch.answering import answer
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import Judge, Trial, compared_outputs, guilty, traced
from whence.workflows.probe.torch.regions import Row, axes
from whence.workflows.probe.torch.trace import Key, Trace

SIZES = (2, 3, 8, 32)
_STATISTICS = ("batch_norm",)
_MOST_SHARES = 4
_LOOKS_UP = ("index", "gather", "scatter", "embedding", "take")
"""Operators that are no arithmetic on rows: cut into rows, they point outside of them."""


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
        shares = spread_shares(judge, one, one.joined(first[: size - 1]), size)
    result = answer(Property.BATCH, variants, cause=_cause(variants, judge.subject.model))
    return _with(result, shares)


def _with(result: PropertyAnswer, shares: tuple[SpreadShare, ...]) -> PropertyAnswer:
    from msgspec.structs import replace

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


# ---- where a spread comes from


def spread_shares(
    judge: Judge, one: CallInputs, many: CallInputs, size: int
) -> tuple[SpreadShare, ...]:
    """Which operators make a row round otherwise in a batch: each computed row by row in turn."""
    region = Row(1, size)
    begun = judge.begins(Trial(one, many, region))
    counts = Counter(b.operator.key[2] for b in begun)
    try:
        base = traced(judge.subject, one, 1 << 60)
        whole = _spread(judge, one, many, region, None)
        shares = [
            (name, count, _spread(judge, one, many, region, _RowByRow(name, base, size)))
            for name, count in counts.most_common(_MOST_SHARES)
        ]
    except Exception:  # noqa: BLE001 - an operator that cannot be cut into rows has no share
        return ()
    found = [
        SpreadShare(name.removesuffix(".default"), count, max(0.0, 1 - left / whole))
        for name, count, left in shares
        if whole
    ]
    return tuple(sorted(found, key=lambda share: -share.share))


def _spread(judge: Judge, one: CallInputs, many: CallInputs, region: Row, change: Any) -> float:
    trace = Trace(judge.subject.model, begin=1 << 60, change=change)
    outputs = judge.subject.run(many, trace.listening())
    far, _, _ = compared_outputs(judge.base(one), outputs, region, None)
    return far.moved


class _RowByRow:
    """Computes the first row of every call of one operator alone, as in a batch of one.

    base: the trace of a batch of one, whose shapes tell the axis of rows.
    """

    def __init__(self, operator: str, base: Trace, size: int) -> None:
        self._operator, self._base, self._size = operator, base, size

    def __call__(self, key: Key, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        at = self._base.by_key.get(key)
        is_lookup = any(word in key[2] for word in _LOOKS_UP)  # of places in other rows, too
        if key[2] != self._operator or at is None or func._schema.is_mutable or is_lookup:
            return out
        twin = self._base.operators[at]
        shapes = iter(twin.read)

        def cut(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._first(value, next(shapes))
            if isinstance(value, (list, tuple)):
                return type(value)(cut(item) for item in value)
            return value

        row = func(*cut(args), **{name: cut(value) for name, value in kwargs.items()})
        many, alone = (r if isinstance(r, (list, tuple)) else (r,) for r in (out, row))
        for whole, part, shape in zip(many, alone, twin.shapes):
            if isinstance(whole, torch.Tensor) and tuple(part.shape) == shape:
                self._first(whole, shape).copy_(part)
        return out

    def _first(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        for axis in axes(shape, tuple(tensor.shape), 1, self._size) or ():
            tensor = tensor.narrow(axis.number, 0, axis.times)
        return tensor
