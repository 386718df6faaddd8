"""Operators that ONNX Runtime fuses: activations with a bias, norms with a sum before them."""

from __future__ import annotations

from whence.replay.onnx_translation.elementwise import gelu, swish
from whence.replay.onnx_translation.normalisation import layer_norm, rms_norm
from whence.replay.onnx_translation.writer import Value, Writer, Writes


def _summed(w: Writer, places: tuple[int, ...]) -> Value:
    """The sum of what is there of these inputs."""
    value = w(places[0])
    for place in places[1:]:
        value = w.add(value, w(place)) if w.has(place) else value
    return value


def _bias_gelu(w: Writer) -> Value:
    return gelu(w, w.add(w(0), w(1)))


def _fast_gelu(w: Writer) -> Value:
    return gelu(w, _summed(w, (0, 1)), "tanh")


def _skip_layer_norm(w: Writer) -> list[Value | None]:
    total = _summed(w, (0, 1, 4))
    found = layer_norm(w, total, w.dtype(0), w.shape(0)[-1:], w(2), w.optional(3))
    return [*found, total]


def _skip_rms_norm(w: Writer) -> list[Value | None]:
    total = _summed(w, (0, 1, 3))
    out, inverse = rms_norm(w, total, w.dtype(0), [w.rank(0) - 1], w(2))
    return [out, None, inverse, total]


def _embedded_norm(w: Writer) -> list[Value | None]:
    """EmbedLayerNormalization(input_ids, segment_ids, word, position, segment, gamma, beta, mask,
    position_ids)
    """
    batch, tokens = w.shape(0)
    total = w.do("embedding.default", w(2), w.cast(w(0), "int64"))
    if w.has(8):
        positions = w.do("embedding.default", w(3), w.cast(w(8), "int64"))
    else:
        positions = w.part(w(3), 0, 0, tokens)
    total = w.add(total, positions)
    if w.has(4):
        total = w.add(total, w.do("embedding.default", w(4), w.cast(w(1), "int64")))
    norm = layer_norm(w, total, w.dtype(2), w.shape(2)[-1:], w(5), w(6))[0]
    if w.has(7):
        kept = w.cast(w.do("sum.dim_IntList", w.cast(w(7), "int64"), [1]), "int32")
    else:
        kept = w.do("zeros.default", [batch], dtype={"dtype": "int32"})
    return [norm, kept, total]


def _swiglu(w: Writer) -> Value:
    return w.mul(swish(w, w(0), w.number("alpha", 1.0)), w(1))


KNOWN: dict[str, Writes] = {
    "com.microsoft.Gelu": lambda w: gelu(w, w(0)),
    "com.microsoft.BiasGelu": _bias_gelu,
    "com.microsoft.FastGelu": _fast_gelu,
    "com.microsoft.QuickGelu": lambda w: swish(w, w(0), w.number("alpha", 1.702)),
    "com.microsoft.SkipLayerNormalization": _skip_layer_norm,
    "com.microsoft.SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "com.microsoft.EmbedLayerNormalization": _embedded_norm,
    "SwiGLU": _swiglu,
}
