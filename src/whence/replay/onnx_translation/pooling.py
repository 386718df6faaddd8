"""Poolings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from whence import dtypes
from whence.replay.onnx_translation.windows import Windows, windows
from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor


def _ends(w: Writer, window: Windows, extents: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Returns how far the windows reach beyond the last element, by axis. sizes: extents of the
    result.
    """
    if tuple(sizes) != window.counts(extents):
        raise w.refuse(f"it made {tuple(sizes)} windows, and says {window.counts(extents)}")
    return [
        (count - 1) * stride + reach - n - before
        for count, stride, reach, n, before in zip(
            sizes, window.strides, window.reach, extents, window.before
        )
    ]


def pooled_max(
    w: Writer,
    x: Tensor,
    dtype: str,
    extents: Sequence[int],
    sizes: Sequence[int],
    *,
    indices: bool = False,
) -> list[Tensor | None]:
    """Returns the largest element of each window and, if wanted, its index in the
    flattened input.
    """
    window = windows(w, extents)
    ends = _ends(w, window, extents, sizes)
    kind = dtypes.named(dtype)
    exact = x if kind.is_floating else x.to("float32")
    if not kind.is_floating and kind.bits > 8:
        raise w.refuse(f"of {dtype} it is not known to whence")
    x = exact.padded(window.before, ends, -math.inf)
    single = len(extents) == 1
    if single:
        x = x.unsqueeze(-1)
    tail = [1] if single else []
    name = f"max_pool{3 if len(extents) == 3 else 2}d_with_indices.default"
    args = (
        [*window.kernel, *tail],
        [*window.strides, *tail],
        [0] * (len(extents) + single),
        [*window.dilations, *tail],
    )
    value, index = w.several(name, 2, x, *args)
    if single:
        value, index = (v.squeeze(-1) for v in (value, index))
    value = value if kind.is_floating else value.to(dtype)
    if not indices:
        return [value, None]
    return [value, _numbers(w, index, window, ends, extents, sizes)]


def _numbers(
    w: Writer, index: Tensor, window: Windows, ends: Sequence[int], extents: Sequence[int],
    sizes: Sequence[int],
) -> Tensor:  # fmt: skip
    """Converts indices in a padded plane to indices in the flattened tensor."""
    spans = [n + a + b for n, a, b in zip(extents, window.before, ends)]
    columns = w.whole("storage_order", 0)
    number: Tensor | None = None
    inner, own = 1, 1
    factors = [1] * len(extents)
    for axis in range(len(extents)) if columns else reversed(range(len(extents))):
        factors[axis], own = own, own * extents[axis]
    for axis in reversed(range(len(extents))):
        along = index.div(inner, rounding_mode="floor") % spans[axis] - window.before[axis]
        along = along * factors[axis]
        number = along if number is None else number + along
        inner *= spans[axis]
    n, c = w.shape(0)[:2]
    planes = w.counted(n * c) * math.prod(extents)
    assert number is not None
    return number + planes.reshape([n, c, *[1] * len(sizes)])


def _max_pool(w: Writer) -> list[Tensor | None]:
    extents, made = w.shape(0)[2:], w.made().shape[2:]
    return pooled_max(w, w(0), w.dtype(0), extents, made, indices=w.wants(1))


def _channels_last_max(w: Writer) -> Tensor:
    rank = w.rank(0)
    x = w(0).channels_first(rank)
    value, _ = pooled_max(w, x, w.dtype(0), w.shape(0)[1:-1], w.made().shape[1:-1])
    assert value is not None
    return value.channels_last(rank)


def summed(x: Tensor, found: Windows, ends: Sequence[int], filled: float = 0) -> Tensor:
    """Returns the sum of each window. x: (batch, channel, *), floating."""
    x = x.padded(found.before, ends, filled)
    for axis, (k, s, d) in enumerate(zip(found.kernel, found.strides, found.dilations), 2):
        # Windows start at every s-th element and take every d-th neighbour.
        spanned = x.unfold(axis, (k - 1) * d + 1, s)
        x = spanned.part(-1, 0, (k - 1) * d + 1, d).sum([-1])
    return x


def pooled_mean(
    w: Writer, x: Tensor, dtype: str, extents: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """Returns the mean of each window."""
    window = windows(w, extents)
    ends = _ends(w, window, extents, sizes)
    total = summed(x, window, ends)
    with_pads = w.whole("count_include_pad", 0)
    cut = any(e > b for e, b in zip(ends, window.behind))
    if not cut and (with_pads or not any([*window.before, *(max(e, 0) for e in ends)])):
        return total / math.prod(window.kernel)
    ones = w.do("ones", [1, 1, *extents], dtype=dtype)
    if with_pads:  # what lies behind the pads does not count
        ones = ones.padded(window.before, window.behind, 1)
        nothing = (0,) * len(ends)
        rest = replace(window, before=nothing, behind=nothing)
        return total / summed(ones, rest, [e - b for e, b in zip(ends, window.behind)])
    return total / summed(ones, window, ends)


def _average_pool(w: Writer) -> Tensor:
    return pooled_mean(w, w(0), w.dtype(0), w.shape(0)[2:], w.made().shape[2:])


def _lp_pool(w: Writer) -> Tensor:
    p, extents = w.number("p", 2), w.shape(0)[2:]
    found = windows(w, extents)
    ends = _ends(w, found, extents, w.made().shape[2:])
    return summed(w(0).abs() ** p, found, ends) ** (1 / p)


def _global(name: str) -> Writes:
    return lambda w: w.do(name, w(0), range(2, w.rank(0)), True)


def _global_lp(w: Writer) -> Tensor:
    p = w.number("p", 2)
    return (w(0).abs() ** p).sum(range(2, w.rank(0)), True) ** (1 / p)


def _max_unpool(w: Writer) -> Tensor:
    if w.has(2):
        raise w.refuse("with an output shape it is not known to whence")
    n, c, *extents = w.shape(0)
    found = windows(w, extents)
    sizes = [
        s * (m - 1) + k - a - b
        for s, m, k, a, b in zip(found.strides, extents, found.kernel, found.before, found.behind)
    ]
    empty = w.do("zeros", [n * c * math.prod(sizes)], dtype=w.dtype(0))
    flat = [w(place).reshape([-1]) for place in (1, 0)]
    return empty.scatter(0, *flat).reshape([n, c, *sizes])


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
