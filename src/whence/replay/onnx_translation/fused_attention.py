"""Attention of ONNX Runtime's own kinds."""

from __future__ import annotations

import math

from whence.replay.onnx_translation.attention import (
    attended,
    distances,
    heads,
    joined,
    repeated,
    rotated,
)
from whence.replay.onnx_translation.quantised import along_columns, product
from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor


def _filtered(w: Writer, place: int, sizes: tuple[int, int, int]) -> Tensor:
    """Returns the summand of the scores for a mask of keys. sizes: (batch, queries, keys)."""
    batch, rows, columns = sizes
    shape, filled = w.operand(place).shape, w.number("mask_filter_value", -10000.0)
    mask, keys = (w(place).to("int64"), w.counted(columns))
    if len(shape) == 2:
        kept = (mask > 0).reshape([batch, 1, 1, columns])
    elif len(shape) == 3:
        kept = (mask > 0).reshape([batch, 1, rows, columns])
    elif shape == (batch,):
        kept = keys < mask.reshape([batch, 1, 1, 1])
    elif shape == (2 * batch,):
        ends, starts = (
            mask.part(0, i * batch, (i + 1) * batch).reshape([batch, 1, 1, 1]) for i in (0, 1)
        )
        kept = (keys < ends) & (keys >= starts)
    else:
        raise w.refuse(f"a mask of shape {shape} is not known to whence")
    dtype = w.dtype(0) if w.is_float(0) else "float32"
    zeros = kept.to(dtype).zeros_like()
    return zeros.masked_fill(~kept, filled)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return q @ k.transpose(-1, -2) * scale


def _scale(w: Writer, channels: int) -> float:
    return w.number("scale", 0.0) or channels**-0.5


def _fused_attention(w: Writer) -> list[Tensor | None]:
    """Attention(input, weights, bias, mask_index, past, attention_bias, past_sequence_length)"""
    if w.has(6):
        raise w.refuse("with a shared buffer it is not known to whence")
    return _projected(w, w.plus(w(0) @ w(1), 2), mask=3, past=4, bias=5)


def _coded_attention(w: Writer) -> list[Tensor | None]:
    """QAttention(input, weight, bias, input_scale, weight_scale, mask_index, input_zero_point,
    weight_zero_point, past)
    """
    zeros = [along_columns(w, p, 2) if w.has(p) else None for p in (6, 7)]
    total = product(w(0), zeros[0], w(1), zeros[1])
    scale = along_columns(w, 3, 2) * along_columns(w, 4, 2)
    projected = total.to("float32") * scale + w(2)
    return _projected(w, projected, mask=5, past=8, bias=9)


def _projected(w: Writer, x: Tensor, mask: int, past: int, bias: int) -> list[Tensor | None]:
    """Computes attention from queries, keys and values that are concatenated along the last axis of
    x. mask, past, bias: places of inputs.
    """
    if w.whole("do_rotary", 0) or w.whole("past_present_share_buffer", 0):
        raise w.refuse("rotary or with a shared buffer it is not known to whence")
    batch, rows, _ = w.shape(0)
    count = w.whole("num_heads")
    sizes = w.integers("qkv_hidden_sizes", [w.extent(1, 1) // 3] * 3)
    parts, start = [], 0
    for size in sizes:
        part = x.part(-1, start, start + size)
        parts.append(heads(part, [batch, rows, count, size // count]))
        start += size
    q, k, v = parts
    length = 0
    if w.has(past):
        length = w.extent(past, 3)
        k, v = (w.do("cat", [w(past).select(0, i), side], 2) for i, side in enumerate((k, v)))
    present = w.do("stack", [k, v]) if w.wants(1) else None
    scores = _scores(q, k, _scale(w, sizes[0] // count))
    scores = _masked(w, scores, (mask, bias), (batch, rows, length + rows), length)
    out = attended(scores, v)
    return [joined(out, [batch, count, rows, sizes[2] // count]), present]


def _masked(
    w: Writer, scores: Tensor, places: tuple[int, int], sizes: tuple[int, int, int], past: int
) -> Tensor:
    """Returns scores plus the mask and bias at these places; if the node is unidirectional, later
    keys become -inf.
    """
    mask, bias = places
    if w.has(mask):
        scores = scores + _filtered(w, mask, sizes)
    if w.has(bias):
        scores = scores + w(bias)
    if w.whole("unidirectional", 0):
        later = distances(w, sizes[1], sizes[2], past) < 0
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _multi_head(w: Writer) -> list[Tensor | None]:
    """MultiHeadAttention(query, key, value, bias, key_padding_mask, attention_bias, past_key,
    past_value, ...)
    """
    if not (w.has(1) and w.has(2)) or w.rank(0) != 3 or w.has(8) or w.has(9):
        raise w.refuse("packed or with a shared buffer it is not known to whence")
    batch, rows, hidden = w.shape(0)
    count = w.whole("num_heads")
    widths = [w.extent(p, 2) if w.rank(p) == 3 else count * w.extent(p, 3) for p in (0, 1, 2)]
    sides, start = [], 0
    for place, width in enumerate(widths):
        value = w(place)
        if w.rank(place) == 4:
            if w.has(3):
                raise w.refuse("a bias of keys with heads is not known to whence")
            sides.append(value)
            continue
        if w.has(3):
            value = value + w(3).part(0, start, start + width)
        start += width
        shape = [batch, w.extent(place, 1), count, width // count]
        sides.append(heads(value, shape))
    q, k, v = sides
    past = w.extent(6, 2) if w.has(6) else 0
    if past and not w.wants(1):
        raise w.refuse("a cache that is read and not kept")
    if past:
        k, v = (w.do("cat", [w(p), x], 2) for p, x in ((6, k), (7, v)))
    columns = past + w.extent(1, 2 if w.rank(1) == 4 else 1)
    scores = _scores(q, k, _scale(w, hidden // count))
    scores = _masked(w, scores, (4, 5), (batch, rows, columns), past)
    out = attended(scores, v)
    return [joined(out, [batch, count, rows, widths[2] // count]), k, v]


_GROUPED_ONLY = (11, 12, 13, 14, 15)  # a sink, scales of caches, norms of queries and keys


def _grouped(w: Writer) -> list[Tensor | None]:
    """GroupQueryAttention(query, key, value, past_key, past_value, seqlens_k,
    total_sequence_length, cos_cache, sin_cache, position_ids, attention_bias, ...)
    """
    plain = ("smooth_softmax", "qk_output", "sliding_window_cache", "kv_cache_bit_width")
    if any(w.has(p) for p in _GROUPED_ONLY) or any(w.whole(name, 0) > 0 for name in plain):
        raise w.refuse("with a sink, norms or a packed cache it is not known to whence")
    batch, rows, hidden = w.shape(0)
    count, groups = w.whole("num_heads"), w.whole("kv_num_heads")
    total = int(w.number_of(6))
    if any(n != total - 1 for n in w.integers_of(5)):
        raise w.refuse("rows of several lengths are not known to whence")
    packed = not w.has(1)
    channels = hidden // (count + 2 * groups) if packed else hidden // count
    q, k, v = _grouped_operands(w, (batch, rows, count, groups, channels), packed)
    past = total - rows
    if past < 0:
        raise w.refuse(f"{rows} queries and {total} keys")
    if w.whole("do_rotary", 0):
        q, k = _grouped_rotation(w, (q, k), (rows, past, channels))
    if past:
        if w.extent(3, 2) < past:
            raise w.refuse(f"a cache of {w.extent(3, 2)} elements for {past}")
        k, v = (w.do("cat", [w(p).part(2, 0, past), x], 2) for p, x in ((3, k), (4, v)))
    scores = _scores(q, repeated(k, count // groups), _scale(w, channels))
    cap = w.number("softcap", 0.0)
    if cap > 0:
        scores = (scores / cap).tanh() * cap
    if w.has(10):
        scores = scores + w(10)
    apart, window = distances(w, rows, total, past), w.whole("local_window_size", -1)
    if w.whole("causal", 1):
        scores = scores.masked_fill(apart < 0, -math.inf)
    if window >= 0:
        scores = scores.masked_fill(apart >= window, -math.inf)
    out = attended(scores, repeated(v, count // groups))
    out = joined(out, [batch, count, rows, channels])
    whole = not w.wants(1) or w.made(1).shape[2] == total
    return [out, k if whole else None, v if whole else None]


def _grouped_operands(
    w: Writer, sizes: tuple[int, int, int, int, int], packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, count, groups, channels = sizes
    values, start = [], 0
    for place, number in ((0, count), (1, groups), (2, groups)):
        width = number * channels
        value = w(0).part(-1, start, start + width) if packed else w(place)
        start += width
        values.append(heads(value, [batch, rows, number, channels]))
    return values[0], values[1], values[2]


def _grouped_rotation(
    w: Writer, sides: tuple[Tensor, Tensor], sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    rows, past, channels = sizes
    turned = 2 * w.extent(7, -1)
    if w.has(9):
        numbers = w(9).to("int64")
    else:
        numbers = (w.counted(rows) + past).reshape([1, rows])
    tables = [w(p).index([numbers]).unsqueeze(1) for p in (7, 8)]
    both = [rotated(w, side, channels, turned, (tables[0], tables[1])) for side in sides]
    return both[0], both[1]


KNOWN: dict[str, Writes] = {
    "com.microsoft.Attention": _fused_attention,
    "com.microsoft.QAttention": _coded_attention,
    "com.microsoft.MultiHeadAttention": _multi_head,
    "com.microsoft.GroupQueryAttention": _grouped,
}
