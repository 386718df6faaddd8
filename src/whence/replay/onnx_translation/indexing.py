"""Operators that pick elements by numbers or conditions, and put them there."""

from __future__ import annotations

import math

from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor

_REDUCED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _counted_from_start(w: Writer, axis: int) -> Tensor:
    """Returns the indices along an axis of the first input, with negative ones converted to
    non-negative.
    """
    extent = w.extent(0, axis)
    return w(1).to("int64") % extent if extent else w(1)


def gathered(data: Tensor, axis: int, indices: Tensor) -> Tensor:
    """Returns the elements of an axis at these indices, in the shape of the indices."""
    return data.index([*[None] * axis, indices.to("int64")])


def _gather(w: Writer) -> Tensor:
    return gathered(w(0), w.axis(w.whole("axis", 0), w.rank(0)), w(1))


def _gather_elements(w: Writer) -> Tensor:
    axis = w.axis(w.whole("axis", 0), w.rank(0))
    return w(0).gather(axis, _counted_from_start(w, axis))


def _columns(w: Writer, count: int) -> list[Tensor]:
    """Returns the indices along each of `count` axes, which the last axis of the second input
    holds.
    """
    indices = w(1).to("int64")
    return [indices.select(-1, i) for i in range(count)]


def _gather_nd(w: Writer) -> Tensor:
    batch, count = w.whole("batch_dims", 0), w.extent(1, -1)
    columns = _columns(w, count)
    rank = w.rank(1) - 1
    rows = [w.counted(w.extent(0, a)).along(rank, a) for a in range(batch)]
    return w(0).index([*rows, *columns])


def _put(w: Writer, data: Tensor, axis: int, indices: Tensor, updates: Tensor) -> Tensor:
    reduction = w.text("reduction", "none")
    if reduction == "none":
        return data.scatter(axis, indices, updates)
    if reduction not in _REDUCED:
        raise w.refuse(f"reduction {reduction[:40]} is not known to whence")
    return data.scatter_reduce(axis, indices, updates, _REDUCED[reduction])


def _scatter_elements(w: Writer) -> Tensor:
    axis = w.axis(w.whole("axis", 0), w.rank(0))
    return _put(w, w(0), axis, _counted_from_start(w, axis), w(2))


def _scatter_nd(w: Writer) -> Tensor:
    shape, count = w.shape(0), w.extent(1, -1)
    picked, inner = shape[:count], math.prod(shape[count:])
    number: Tensor | None = None
    for column, extent in zip(_columns(w, count), picked):
        column = column % extent if extent else column
        number = column if number is None else number * extent + column
    if number is None:
        raise w.refuse("indices of no axis")
    rows = math.prod(w.shape(1)[:-1])
    indices = number.reshape([rows, 1]).expand([rows, inner])
    data = w(0).reshape([math.prod(picked), inner])
    return _put(w, data, 0, indices, w(2).reshape([rows, inner])).reshape(shape)


def _one_hot(w: Writer) -> Tensor:
    depth, rank = int(w.number_of(1)), w.rank(0) + 1
    axis = w.axis(w.whole("axis", -1), rank)
    indices = w(0).to("int64")
    indices = w.where(indices < 0, indices + depth, indices)
    hot = indices.unsqueeze(axis).eq(w.counted(depth).along(rank, axis))
    return w.where(hot, w(2).select(0, 1), w(2).select(0, 0))


def _non_zero(w: Writer) -> Tensor:
    if not w.rank(0):
        raise w.refuse("of a tensor without axes it is not known to whence")
    return w(0).nonzero().permute([1, 0])


def _compress(w: Writer) -> Tensor:
    kept = w(1).nonzero().reshape([-1])
    axis = w.attribute("axis", None)
    if axis is None:
        return w(0).reshape([-1]).index_select(0, kept)
    return w(0).index_select(w.axis(int(axis), w.rank(0)), kept)


def _limits(w: Writer) -> tuple[list[int], list[int], list[int], list[int]]:
    """(axes, starts, ends, steps)"""
    if w.opset < 10:
        starts, ends = w.integers("starts"), w.integers("ends")
        axes, steps = w.integers("axes", list(range(len(starts)))), [1] * len(starts)
    else:
        starts, ends = w.integers_of(1), w.integers_of(2)
        axes = w.integers_of(3) if w.has(3) else list(range(len(starts)))
        steps = w.integers_of(4) if w.has(4) else [1] * len(starts)
    if not len(axes) == len(starts) == len(ends) == len(steps):
        raise w.refuse("its limits are of several lengths")
    return axes, starts, ends, steps


def _range(start: int, end: int, step: int, extent: int) -> range:
    """Returns the indices that a slice selects, with start and end clipped to the axis."""
    first, last = (n + extent if n < 0 else n for n in (start, end))
    if step > 0:
        return range(min(max(first, 0), extent), min(max(last, 0), extent), step)
    return range(min(max(first, 0), extent - 1), min(max(last, -1), extent - 1), step)


def _slice(w: Writer) -> Tensor:
    value = w(0)
    for axis, start, end, step in zip(*_limits(w)):
        axis = w.axis(axis, w.rank(0))
        if step < 0 and end >= (1 << 31) - 1:
            raise w.refuse("backwards to the end: engines differ in what that picks")
        picked = _range(start, end, step, w.extent(0, axis))
        if not picked:
            value = value.part(axis, 0, 0)
        elif step > 0:
            value = value.part(axis, picked[0], picked[-1] + 1, step)
        else:
            value = value.part(axis, picked[-1], picked[0] + 1, -step)
            value = value.flip([axis])
    return value.clone()


def _top_k(w: Writer) -> list[Tensor | None]:
    k = w.whole("k") if w.opset < 10 else int(w.number_of(1))
    if not w.whole("sorted", 1) and k > 1:
        raise w.refuse("unsorted, it may give its elements in any order")
    axis = w.axis(w.whole("axis", -1), w.rank(0))
    largest = bool(w.whole("largest", 1))
    kwargs = {"stable": True, "dim": axis, "descending": largest}  # of equal ones the first
    values, indices = w.several("sort.stable", 2, w(0), **kwargs)
    return [values.part(axis, 0, k), indices.part(axis, 0, k)]


def _reverse_sequence(w: Writer) -> Tensor:
    batch, time = w.whole("batch_axis", 1), w.whole("time_axis", 0)
    shape = w.shape(0)
    if {batch, time} != {0, 1}:
        raise w.refuse("axes other than the first two")
    lengths = w(1).to("int64").along(2, batch)
    steps = w.counted(shape[time]).along(2, time)
    turned = lengths - steps - 1
    inside = turned >= 0
    rows = w.counted(shape[batch]).along(2, batch)
    places = w.where(inside, turned, steps)
    return w(0).index([rows, places] if batch == 0 else [places, rows])


KNOWN: dict[str, Writes] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "com.microsoft.GatherND": _gather_nd,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "OneHot": _one_hot,
    "NonZero": _non_zero,
    "Compress": _compress,
    "Slice": _slice,
    "TopK": _top_k,
    "ReverseSequence": _reverse_sequence,
}
ANY_BITS = frozenset({
    "Gather", "GatherElements", "GatherND", "ScatterND", "ScatterElements", "Scatter", "Slice",
    "Compress", "NonZero", "ReverseSequence",
})  # fmt: skip
