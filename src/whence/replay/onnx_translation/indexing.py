"""Operators that pick elements by numbers or conditions, and put them there."""

from __future__ import annotations

import math

from whence.replay.onnx_translation.writer import Value, Writer, Writes

_REDUCED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _counted_from_start(w: Writer, axis: int) -> Value:
    """Numbers along an axis of the first input, of which negative ones count from the end."""
    extent = w.extent(0, axis)
    return w.do("remainder.Scalar", w.cast(w(1), "int64"), extent) if extent else w(1)


def gathered(w: Writer, data: Value, axis: int, indices: Value) -> Value:
    """The elements of an axis at these numbers, in the shape of the numbers."""
    return w.do("index.Tensor", data, [*([None] * axis), w.cast(indices, "int64")])


def _gather(w: Writer) -> Value:
    return gathered(w, w(0), w.axis(w.whole("axis", 0), w.rank(0)), w(1))


def _gather_elements(w: Writer) -> Value:
    axis = w.axis(w.whole("axis", 0), w.rank(0))
    return w.do("gather.default", w(0), axis, _counted_from_start(w, axis))


def _columns(w: Writer, count: int) -> list[Value]:
    """The numbers along each axis that the last axis of the indices holds."""
    indices = w.cast(w(1), "int64")
    return [w.do("select.int", indices, -1, i) for i in range(count)]


def _gather_nd(w: Writer) -> Value:
    batch, count = w.whole("batch_dims", 0), w.extent(1, -1)
    columns = _columns(w, count)
    rank = w.rank(1) - 1
    rows = [w.along(w.counted(w.extent(0, a)), rank, a) for a in range(batch)]
    return w.do("index.Tensor", w(0), [*rows, *columns])


def _put(w: Writer, data: Value, axis: int, indices: Value, updates: Value) -> Value:
    reduction = w.text("reduction", "none")
    if reduction == "none":
        return w.do("scatter.src", data, axis, indices, updates)
    if reduction not in _REDUCED:
        raise w.refuse(f"reduction {reduction[:40]} is not known to whence")
    return w.do("scatter_reduce.two", data, axis, indices, updates, _REDUCED[reduction])


def _scatter_elements(w: Writer) -> Value:
    axis = w.axis(w.whole("axis", 0), w.rank(0))
    return _put(w, w(0), axis, _counted_from_start(w, axis), w(2))


def _scatter_nd(w: Writer) -> Value:
    shape, count = w.shape(0), w.extent(1, -1)
    picked, inner = shape[:count], math.prod(shape[count:])
    number: Value | None = None
    for column, extent in zip(_columns(w, count), picked):
        column = w.do("remainder.Scalar", column, extent) if extent else column
        number = column if number is None else w.add(w.times(number, extent), column)
    if number is None:
        raise w.refuse("indices of no axis")
    rows = math.prod(w.shape(1)[:-1])
    indices = w.do("expand.default", w.reshape(number, [rows, 1]), [rows, inner])
    data = w.reshape(w(0), [math.prod(picked), inner])
    return w.reshape(_put(w, data, 0, indices, w.reshape(w(2), [rows, inner])), shape)


def _one_hot(w: Writer) -> Value:
    depth, rank = int(w.number_of(1)), w.rank(0) + 1
    axis = w.axis(w.whole("axis", -1), rank)
    indices = w.cast(w(0), "int64")
    indices = w.where(w.do("lt.Scalar", indices, 0), w.plus(indices, depth), indices)
    hot = w.do(
        "eq.Tensor",
        w.do("unsqueeze.default", indices, axis),
        w.along(w.counted(depth), rank, axis),
    )
    return w.where(hot, w.do("select.int", w(2), 0, 1), w.do("select.int", w(2), 0, 0))


def _non_zero(w: Writer) -> Value:
    if not w.rank(0):
        raise w.refuse("of a tensor without axes it is not known to whence")
    return w.permute(w.do("nonzero.default", w(0)), [1, 0])


def _compress(w: Writer) -> Value:
    kept = w.reshape(w.do("nonzero.default", w(1)), [-1])
    axis = w.attribute("axis", None)
    if axis is None:
        return w.do("index_select.default", w.reshape(w(0), [-1]), 0, kept)
    return w.do("index_select.default", w(0), w.axis(int(axis), w.rank(0)), kept)


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
    """What a slice picks: backwards, it begins at the first element at least."""
    first, last = (n + extent if n < 0 else n for n in (start, end))
    if step > 0:
        return range(min(max(first, 0), extent), min(max(last, 0), extent), step)
    return range(min(max(first, 0), extent - 1), min(max(last, -1), extent - 1), step)


def _slice(w: Writer) -> Value:
    value = w(0)
    for axis, start, end, step in zip(*_limits(w)):
        axis = w.axis(axis, w.rank(0))
        if step < 0 and end >= (1 << 31) - 1:
            raise w.refuse("backwards to the end: engines differ in what that picks")
        picked = _range(start, end, step, w.extent(0, axis))
        if not picked:
            value = w.part(value, axis, 0, 0)
        elif step > 0:
            value = w.part(value, axis, picked[0], picked[-1] + 1, step)
        else:
            value = w.part(value, axis, picked[-1], picked[0] + 1, -step)
            value = w.do("flip.default", value, [axis])
    return w.do("clone.default", value)


def _top_k(w: Writer) -> list[Value | None]:
    k = w.whole("k") if w.opset < 10 else int(w.number_of(1))
    if not w.whole("sorted", 1) and k > 1:
        raise w.refuse("unsorted, it may give its elements in any order")
    axis = w.axis(w.whole("axis", -1), w.rank(0))
    largest = bool(w.whole("largest", 1))
    kwargs = {"stable": True, "dim": axis, "descending": largest}  # of equal ones the first
    values, indices = w.several("sort.stable", 2, w(0), **kwargs)
    return [w.part(values, axis, 0, k), w.part(indices, axis, 0, k)]


def _reverse_sequence(w: Writer) -> Value:
    batch, time = w.whole("batch_axis", 1), w.whole("time_axis", 0)
    shape = w.shape(0)
    if {batch, time} != {0, 1}:
        raise w.refuse("axes other than the first two")
    lengths = w.along(w.cast(w(1), "int64"), 2, batch)
    steps = w.along(w.counted(shape[time]), 2, time)
    turned = w.plus(w.sub(lengths, steps), -1)
    inside = w.do("ge.Scalar", turned, 0)
    rows = w.along(w.counted(shape[batch]), 2, batch)
    places = w.where(inside, turned, steps)
    return w.do("index.Tensor", w(0), [rows, places] if batch == 0 else [places, rows])


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
