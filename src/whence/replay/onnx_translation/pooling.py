"""Poolings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from whence import dtypes
from whence.replay.onnx_translation.windows import Windows, padded, windows
from whence.replay.onnx_translation.writer import Value, Writer, Writes


def _ends(w: Writer, window: Windows, extents: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """How far behind the last element the windows reach, by axis. made: extents of the result."""
    if tuple(sizes) != window.counts(extents):
        raise w.refuse(f"it made {tuple(sizes)} windows, and says {window.counts(extents)}")
    return [
        (count - 1) * stride + reach - n - before
        for count, stride, reach, n, before in zip(
            sizes, window.strides, window.reach, extents, window.before
        )
    ]


def pooled_max(w: Writer, x: Value, dtype: str, extents: Sequence[int], sizes: Sequence[int],
               *, indices: bool = False) -> list[Value | None]:  # fmt: skip
    """The largest element of each window and, if wanted, its number among all elements."""
    window = windows(w, extents)
    ends = _ends(w, window, extents, sizes)
    kind = dtypes.named(dtype)
    exact = x if kind.is_floating else w.cast(x, "float32")
    if not kind.is_floating and kind.bits > 8:
        raise w.refuse(f"of {dtype} it is not known to whence")
    lowest: Any = {"float": "-inf"}
    x = padded(w, exact, window.before, ends, lowest)
    single = len(extents) == 1
    if single:
        x = w.do("unsqueeze.default", x, -1)
    tail = [1] if single else []
    name = f"max_pool{3 if len(extents) == 3 else 2}d_with_indices.default"
    args = ([*window.kernel, *tail], [*window.strides, *tail], [0] * (len(extents) + single),
            [*window.dilations, *tail])  # fmt: skip
    value, index = w.several(name, 2, x, *args)
    if single:
        value, index = (w.do("squeeze.dim", v, -1) for v in (value, index))
    value = value if kind.is_floating else w.cast(value, dtype)
    if not indices:
        return [value, None]
    return [value, _numbers(w, index, window, ends, extents, sizes)]


def _numbers(
    w: Writer, index: Value, window: Windows, ends: Sequence[int], extents: Sequence[int],
    sizes: Sequence[int],
) -> Value:  # fmt: skip
    """Numbers in a padded plane as numbers among all elements of the tensor."""
    spans = [n + a + b for n, a, b in zip(extents, window.before, ends)]
    columns = w.whole("storage_order", 0)
    number: Value | None = None
    inner, own = 1, 1
    factors = [1] * len(extents)
    for axis in range(len(extents)) if columns else reversed(range(len(extents))):
        factors[axis], own = own, own * extents[axis]
    for axis in reversed(range(len(extents))):
        along = w.do("div.Scalar_mode", index, inner, rounding_mode="floor")
        along = w.plus(w.do("remainder.Scalar", along, spans[axis]), -window.before[axis])
        along = w.times(along, factors[axis])
        number = along if number is None else w.add(number, along)
        inner *= spans[axis]
    n, c = w.shape(0)[:2]
    planes = w.times(w.counted(n * c), math.prod(extents))
    assert number is not None
    return w.add(number, w.reshape(planes, [n, c, *([1] * len(sizes))]))


def _max_pool(w: Writer) -> list[Value | None]:
    extents, made = w.shape(0)[2:], w.made().shape[2:]
    return pooled_max(w, w(0), w.dtype(0), extents, made, indices=w.wants(1))


def _channels_last_max(w: Writer) -> Value:
    rank = w.rank(0)
    x = w.permute(w(0), [0, rank - 1, *range(1, rank - 1)])
    value, _ = pooled_max(w, x, w.dtype(0), w.shape(0)[1:-1], w.made().shape[1:-1])
    assert value is not None
    return w.permute(value, [0, *range(2, rank), 1])


def summed(w: Writer, x: Value, found: Windows, ends: Sequence[int], filled: float = 0) -> Value:
    """The sum of each window. x: (batch, channel, *), of floats."""
    x = padded(w, x, found.before, ends, filled)
    for axis, (k, s, d) in enumerate(zip(found.kernel, found.strides, found.dilations), 2):
        # Every d-th of so many neighbours, begun at every s-th element.
        spanned = w.do("unfold.default", x, axis, (k - 1) * d + 1, s)
        x = w.do("sum.dim_IntList", w.part(spanned, -1, 0, (k - 1) * d + 1, d), [-1])
    return x


def pooled_mean(
    w: Writer, x: Value, dtype: str, extents: Sequence[int], sizes: Sequence[int]
) -> Value:
    """The mean of each window."""
    window = windows(w, extents)
    ends = _ends(w, window, extents, sizes)
    total = summed(w, x, window, ends)
    with_pads = w.whole("count_include_pad", 0)
    cut = any(e > b for e, b in zip(ends, window.behind))
    if not cut and (with_pads or not any([*window.before, *(max(e, 0) for e in ends)])):
        return w.do("div.Scalar", total, math.prod(window.kernel))
    ones = w.do("ones.default", [1, 1, *extents], dtype={"dtype": dtype})
    if with_pads:  # what lies behind the pads does not count
        ones = padded(w, ones, window.before, window.behind, 1)
        rest = Windows(window.kernel, window.strides, window.dilations, (0,) * len(ends),
                       (0,) * len(ends), window.ceiled)  # fmt: skip
        return w.div(total, summed(w, ones, rest, [e - b for e, b in zip(ends, window.behind)]))
    return w.div(total, summed(w, ones, window, ends))


def _average_pool(w: Writer) -> Value:
    return pooled_mean(w, w(0), w.dtype(0), w.shape(0)[2:], w.made().shape[2:])


def _lp_pool(w: Writer) -> Value:
    p, extents = w.number("p", 2), w.shape(0)[2:]
    found = windows(w, extents)
    ends = _ends(w, found, extents, w.made().shape[2:])
    size = w.do("abs.default", w(0))
    total = summed(w, w.do("pow.Tensor_Scalar", size, p), found, ends)
    return w.do("pow.Tensor_Scalar", total, 1 / p)


def _global(name: str) -> Writes:
    return lambda w: w.do(name, w(0), list(range(2, w.rank(0))), True)


def _global_lp(w: Writer) -> Value:
    p = w.number("p", 2)
    powers = w.do("pow.Tensor_Scalar", w.do("abs.default", w(0)), p)
    total = w.do("sum.dim_IntList", powers, list(range(2, w.rank(0))), True)
    return w.do("pow.Tensor_Scalar", total, 1 / p)


def _max_unpool(w: Writer) -> Value:
    if w.has(2):
        raise w.refuse("with an output shape it is not known to whence")
    n, c, *extents = w.shape(0)
    found = windows(w, extents)
    sizes = [s * (m - 1) + k - a - b for s, m, k, a, b in zip(
        found.strides, extents, found.kernel, found.before, found.behind)]  # fmt: skip
    empty = w.do("zeros.default", [n * c * math.prod(sizes)], dtype={"dtype": w.dtype(0)})
    flat = [w.reshape(w(place), [-1]) for place in (1, 0)]
    return w.reshape(w.do("scatter.src", empty, 0, *flat), [n, c, *sizes])


KNOWN: dict[str, Writes] = {
    "MaxPool": _max_pool,
    "com.microsoft.NhwcMaxPool": _channels_last_max,
    "AveragePool": _average_pool,
    "com.microsoft.nchwc.MaxPool": _max_pool,
    "com.microsoft.nchwc.AveragePool": _average_pool,
    "com.microsoft.nchwc.GlobalAveragePool": _global("mean.dim"),
    "com.microsoft.nchwc.GlobalMaxPool": _global("amax.default"),
    "LpPool": _lp_pool,
    "GlobalAveragePool": _global("mean.dim"),
    "GlobalMaxPool": _global("amax.default"),
    "GlobalLpPool": _global_lp,
    "MaxUnpool": _max_unpool,
}
