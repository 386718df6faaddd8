"""Attention, and the rotation of positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from whence.replay.onnx_translation.elementwise import stored
from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor


def heads(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshapes (batch, token, head x channel) to (batch, head, token, channel). shape: (batch,
    token, heads, channel).
    """
    return x.reshape(shape).permute([0, 2, 1, 3])


def joined(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshapes (batch, head, token, channel) to (batch, token, head x channel)."""
    batch, count, tokens, channels = shape
    return x.permute([0, 2, 1, 3]).reshape([batch, tokens, count * channels])


def repeated(x: Tensor, times: int) -> Tensor:
    """Repeats each head of keys or values for the `times` heads of queries that share it."""
    return x.repeat_interleave(times, 1) if times > 1 else x


def distances(w: Writer, rows: int, columns: int, offset: int) -> Tensor:
    """Returns how many positions each key lies before each query, (queries, keys); the first query
    has position `offset`.
    """
    queries = (w.counted(rows) + offset).reshape([rows, 1])
    return queries - w.counted(columns)


def attended(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1) @ v


def rotated(
    w: Writer, x: Tensor, channels: int, turned: int, tables: tuple[Tensor, Tensor]
) -> Tensor:
    """Rotates pairs of the first channels of x, (batch, head, token, channel). tables: cosine and
    sine, (batch, 1, token, rotated channels / 2).
    """
    cos, sin = tables
    head = x.part(3, 0, turned) if turned < channels else x
    if w.whole("interleaved", w.whole("rotary_interleaved", 0)):
        first, second = (head.part(3, start, turned, 2) for start in (0, 1))
    else:
        first, second = (head.part(3, a * turned // 2, (a + 1) * turned // 2) for a in (0, 1))
    real = cos * first - sin * second
    imaginary = sin * first + cos * second
    if w.whole("interleaved", w.whole("rotary_interleaved", 0)):
        pairs = w.do("stack", [real, imaginary], -1)
        parts = [pairs.flatten(3, 4)]
    else:
        parts = [real, imaginary]
    if turned < channels:
        parts.append(x.part(3, turned, channels))
    return w.do("cat", parts, 3) if len(parts) > 1 else parts[0]


def _rows(w: Writer, places: tuple[int, int], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of the cosine and sine tables at these positions, as (batch, 1,
    token, ...).
    """
    tables = []
    for place in places:
        row = w(place).index([positions.to("int64")])
        tables.append(row.unsqueeze(1))
    return tables[0], tables[1]


def _rotary(w: Writer) -> Tensor:
    """RotaryEmbedding of ONNX: (X, cos, sin, position_ids)."""
    return _turned(w, positions=3, tables=(1, 2))


def _rotary_of_runtime(w: Writer) -> Tensor:
    """RotaryEmbedding of ONNX Runtime: (X, position_ids, cos, sin)."""
    if w.number("scale", 1.0) != 1 or w.whole("is_packed_batching", 0):
        raise w.refuse("scaled or packed it is not known to whence")
    return _turned(w, positions=1, tables=(2, 3))


def _turned(w: Writer, positions: int, tables: tuple[int, int]) -> Tensor:
    shape, count = w.shape(0), w.whole("num_heads", 0)
    turned = w.whole("rotary_embedding_dim", 0)
    if len(shape) == 3:
        channels = shape[2] // count if count else 2 * w.extent(tables[0], -1)
        count = shape[2] // channels
        x = heads(w(0), [shape[0], shape[1], count, channels])
        tokens = shape[1]
    else:
        x, channels, tokens, count = w(0), shape[3], shape[2], shape[1]
    if not w.has(positions):
        rows = [w(place).unsqueeze(1) for place in tables]
        cos, sin = rows
    else:
        numbers = w(positions)
        if w.rank(positions) == 1:
            numbers = (numbers + w.counted(tokens)).reshape([1, tokens])
        cos, sin = _rows(w, tables, numbers)
    out = rotated(w, x, channels, turned or channels, (cos, sin))
    return joined(out, [shape[0], count, tokens, channels]) if len(shape) == 3 else out


# ---- of ONNX


def _attention(w: Writer) -> list[Tensor | None]:
    q, k, v, (batch, count, rows, channels), grouped, out_channels = _operands(w)
    if w.has(4):
        k, v = (w.do("cat", [w(p), x], 2) for p, x in ((4, k), (5, v)))
    past = w.extent(4, 2) if w.has(4) else 0
    columns = past + w.extent(1, 2 if w.rank(1) == 4 else 1)
    scale = w.number("scale", channels**-0.5) ** 0.5
    key = repeated(k, count // grouped)
    scores = q * scale @ (key * scale).transpose(-1, -2)
    mode, cap = w.whole("qk_matmul_output_mode", 0), w.number("softcap", 0.0)
    seen = scores
    if cap > 0:
        scores = (scores / cap).tanh() * cap
        seen = scores if mode == 1 else seen
    bias = _bias(w, batch, rows, columns, past)
    scores = scores + bias if bias is not None else scores
    seen = scores if mode == 2 else seen
    code = w.attribute("softmax_precision", None)
    wide = scores.to(stored(w, int(code))) if code else scores
    shares = wide.softmax(-1)
    if bias is not None:  # a query that may look at nothing gets nothing
        blind = bias.amax([-1], True).eq(-math.inf)
        shares = shares.masked_fill(blind, 0)
    shares = shares.to(w.dtype(0)) if code else shares
    seen = shares if mode == 3 else seen
    out = shares @ repeated(v, count // grouped)
    if w.rank(0) == 3:
        out = joined(out, [batch, count, rows, out_channels])
    return [out, k, v, seen]


def _operands(w: Writer) -> tuple[Tensor, Tensor, Tensor, tuple[int, int, int, int], int, int]:
    """Returns (q, k, v, shape of q, heads of keys, channels of values); q, k and v have a head
    axis.
    """
    if w.rank(0) == 4:
        batch, count, rows, channels = w.shape(0)
        shape = (batch, count, rows, channels)
        return w(0), w(1), w(2), shape, w.extent(1, 1), w.extent(2, 3)
    count, grouped = w.whole("q_num_heads"), w.whole("kv_num_heads")
    sides = []
    for place, number in ((0, count), (1, grouped), (2, grouped)):
        b, tokens, hidden = w.shape(place)
        sides.append(heads(w(place), [b, tokens, number, hidden // number]))
    batch, rows, hidden = w.shape(0)
    shape = (batch, count, rows, hidden // count)
    return sides[0], sides[1], sides[2], shape, grouped, w.extent(2, 2) // grouped


def _bias(w: Writer, batch: int, rows: int, columns: int, past: int) -> Tensor | None:
    """Returns the summand of the scores: the mask, and -inf for keys that a query must not attend
    to.
    """
    allowed: list[Tensor] = []
    bias: Tensor | None = None
    if w.has(3):
        short = columns - w.extent(3, -1)
        mask = w(3)
        if w.operand(3).dtype == "bool":
            allowed.append(mask.constant_pad_nd([0, short], False) if short else mask)
        else:
            bias = mask.constant_pad_nd([0, short], -math.inf) if short else mask
    left, right = w.whole("left_window_size", -1), w.whole("right_window_size", -1)
    causal = bool(w.whole("is_causal", 0))
    if past and (causal or left >= 0 or right >= 0) and columns - past != rows:
        raise w.refuse("which keys its queries may look at, engines do not agree on")
    if causal or left >= 0 or right >= 0:
        apart = distances(w, rows, columns, past)
        if w.has(6) and not w.has(4):  # behind each row's own last key
            own = w(6).to("int64") - rows
            apart = apart + own.reshape([batch, 1, 1, 1])
        if causal:
            allowed.append(apart >= 0)
        if left >= 0:
            allowed.append(apart <= left)
        if right >= 0:
            allowed.append(apart >= -right)
    if w.has(6):
        lengths = w(6).to("int64").reshape([batch, 1, 1, 1])
        allowed.append(w.counted(columns) < lengths)
    for each in allowed:
        if bias is None:
            bias = w.do("zeros", [rows, columns], dtype=w.dtype(0))
        bias = bias.masked_fill(~each, -math.inf)
    return bias


KNOWN: dict[str, Writes] = {
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
    "com.microsoft.RotaryEmbedding": _rotary_of_runtime,
}
