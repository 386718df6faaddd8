"""Operators that ONNX Runtime fuses: activations with a bias, norms with a sum before them."""

from __future__ import annotations

from whence.replay.onnx_translation.elementwise import swish
from whence.replay.onnx_translation.normalisation import layer_norm, rms_norm
from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor


def _skip_layer_norm(w: Writer) -> list[Tensor | None]:
    total = w.plus(w(0), 1, 4)
    found = layer_norm(w, total, w.dtype(0), w.shape(0)[-1:], w(2), w.optional(3))
    return [*found, total]


def _skip_rms_norm(w: Writer) -> list[Tensor | None]:
    total = w.plus(w(0), 1, 3)
    out, inverse = rms_norm(w, total, w.dtype(0), [w.rank(0) - 1], w(2))
    return [out, None, inverse, total]


def _embedded_norm(w: Writer) -> list[Tensor | None]:
    """EmbedLayerNormalization(input_ids, segment_ids, word, position, segment, gamma, beta, mask,
    position_ids)
    """
    batch, tokens = w.shape(0)
    total = w(2).embedding(w(0).to("int64"))
    if w.has(8):
        positions = w(3).embedding(w(8).to("int64"))
    else:
        positions = w(3).part(0, 0, tokens)
    total = total + positions
    if w.has(4):
        total = total + w(4).embedding(w(1).to("int64"))
    norm = layer_norm(w, total, w.dtype(2), w.shape(2)[-1:], w(5), w(6))[0]
    if w.has(7):
        kept = w(7).to("int64").sum([1]).to("int32")
    else:
        kept = w.do("zeros", [batch], dtype="int32")
    return [norm, kept, total]


KNOWN: dict[str, Writes] = {
    "com.microsoft.Gelu": lambda w: w(0).gelu(approximate="none"),
    "com.microsoft.BiasGelu": lambda w: (w(0) + w(1)).gelu(approximate="none"),
    "com.microsoft.FastGelu": lambda w: w.plus(w(0), 1).gelu(approximate="tanh"),
    "com.microsoft.QuickGelu": lambda w: swish(w(0), w.number("alpha", 1.702)),
    "com.microsoft.SkipLayerNormalization": _skip_layer_norm,
    "com.microsoft.SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "com.microsoft.EmbedLayerNormalization": _embedded_norm,
    "SwiGLU": lambda w: swish(w(0), w.number("alpha", 1.0)) * w(1),
}
