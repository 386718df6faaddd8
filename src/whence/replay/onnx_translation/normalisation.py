"""Norms, and the softmax family. A norm is computed step by step or by the aten operator of its
name, with the node's own epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from whence import dtypes
from whence.replay.onnx_translation.writer import Value, Writer, Writes


def mean_of_squares(w: Writer, x: Value, axes: Sequence[int]) -> Value:
    return w.do("mean.dim", w.mul(x, x), list(axes), True)


def widened(w: Writer, x: Value, dtype: str) -> Value:
    """A half-precision value in float32, as the specification computes norms."""
    return w.cast(x, "float32") if dtypes.is_half(dtype) else x


def layer_norm(
    w: Writer, x: Value, dtype: str, over: Sequence[int], scale: Value | None, bias: Value | None
) -> list[Value]:
    """Norm, mean, and inverse deviation. over: extents of the last axes."""
    epsilon = w.number("epsilon", 1e-5)
    wide = widened(w, x, dtype)
    found = w.several("native_layer_norm.default", 3, wide, list(over), None, None, epsilon)
    out = found[0] if wide is x else w.cast(found[0], dtype)
    out = w.mul(out, scale) if scale is not None else out
    return [w.add(out, bias) if bias is not None else out, found[1], found[2]]


def rms_norm(
    w: Writer, x: Value, dtype: str, axes: Sequence[int], scale: Value | None
) -> list[Value]:
    """Norm and inverse root mean square, step by step."""
    wide = widened(w, x, dtype)
    mean = w.plus(mean_of_squares(w, wide, axes), w.number("epsilon", 1e-5))
    inverse = w.do("rsqrt.default", mean)
    out = w.mul(wide, inverse)
    out = out if wide is x else w.cast(out, dtype)
    return [w.mul(out, scale) if scale is not None else out, inverse]


def _layer_norm(w: Writer) -> list[Value | None]:
    axis = w.axis(w.whole("axis", -1), w.rank(0))
    found = layer_norm(w, w(0), w.dtype(0), w.shape(0)[axis:], w(1), w.optional(2))
    return [*found]


def _rms_norm(w: Writer) -> Value:
    rank = w.rank(0)
    axis = w.axis(w.whole("axis", -1), rank)
    return rms_norm(w, w(0), w.dtype(0), range(axis, rank), w(1))[0]


def _simplified(w: Writer) -> list[Value | None]:
    rank = w.rank(0)
    axis = w.axis(w.whole("axis", -1), rank)
    return [*rms_norm(w, w(0), w.dtype(0), range(axis, rank), w(1))]


def _batch_norm(w: Writer) -> Value:
    if w.whole("training_mode", 0) or (w.opset < 7 and not w.whole("is_test", 0)):
        raise w.refuse("in training it is not known to whence")
    if w.opset < 9 and not w.whole("spatial", 1):
        raise w.refuse("of each element by itself it is not known to whence")
    epsilon = w.number("epsilon", 1e-5)
    return w.do("batch_norm.default", w(0), w(1), w(2), w(3), w(4), False, 0.0, epsilon, False)


def _instance_norm(w: Writer) -> Value:
    rank = w.rank(0)
    return _standardised(w, w(0), list(range(2, rank)), w(1), w(2), [-1, *([1] * (rank - 2))])


def _standardised(
    w: Writer, x: Value, axes: list[int], scale: Value, bias: Value, shape: Sequence[int]
) -> Value:
    """(x - mean) / sqrt(variance + epsilon) over these axes, scaled and shifted by channel."""
    centred = w.sub(x, w.do("mean.dim", x, axes, True))
    variance = w.plus(mean_of_squares(w, centred, axes), w.number("epsilon", 1e-5))
    out = w.mul(centred, w.do("rsqrt.default", variance))
    return w.add(w.mul(out, w.reshape(scale, shape)), w.reshape(bias, shape))


def _group_norm(w: Writer) -> Value:
    groups, channels = w.whole("num_groups"), w.extent(0, 1)
    scale, bias = w(1), w(2)
    if w.opset < 21:  # one for each group
        each = channels // groups
        scale, bias = (w.do("repeat_interleave.self_int", v, each, 0) for v in (scale, bias))
    dtype = w.dtype(0)
    x = widened(w, w(0), dtype)
    out = w.do("group_norm.default", x, groups, None, None, w.number("epsilon", 1e-5), False)
    out = w.cast(out, dtype) if dtypes.is_half(dtype) else out
    shape = [-1, *([1] * (w.rank(0) - 2))]
    return w.add(w.mul(out, w.reshape(scale, shape)), w.reshape(bias, shape))


def _lp_norm(w: Writer) -> Value:
    axis, p = w.axis(w.whole("axis", -1), w.rank(0)), w.whole("p", 2)
    if p not in (1, 2):
        raise w.refuse(f"of order {p}")
    x = w(0)
    size = w.do("linalg_vector_norm.default", x, p, [axis], True)
    zeros = w.do("zeros_like.default", x)
    return w.where(w.do("eq.Scalar", size, 0), zeros, w.div(x, size))


def _mean_variance(w: Writer) -> Value:
    axes = [w.axis(a, w.rank(0)) for a in w.integers("axes", [0, 2, 3])]
    x = w(0)
    centred = w.sub(x, w.do("mean.dim", x, axes, True))
    deviation = w.do("sqrt.default", mean_of_squares(w, centred, axes))
    return w.div(centred, w.plus(deviation, 1e-9))


def _response_norm(w: Writer) -> Value:
    size, rank = w.whole("size"), w.rank(0)
    x = w(0)
    sides = [0, 0] * (rank - 2) + [(size - 1) // 2, size - 1 - (size - 1) // 2]
    squares = w.do("constant_pad_nd.default", w.mul(x, x), sides, 0)
    total = w.do("sum.dim_IntList", w.do("unfold.default", squares, 1, size, 1), [-1])
    factor = w.plus(w.times(total, w.number("alpha", 1e-4) / size), w.number("bias", 1.0))
    return w.div(x, w.do("pow.Tensor_Scalar", factor, w.number("beta", 0.75)))


def _hardmax(w: Writer, x: Value, axis: int) -> Value:
    largest = w.do("argmax.default", x, axis, True)
    return w.do("scatter.value", w.do("zeros_like.default", x), axis, largest, 1)


def _along(function: str) -> Writes:
    """Softmax and its like: since opset 13 along one axis, before over all axes from one on."""

    def write(w: Writer) -> Value:
        def applied(x: Value, axis: int) -> Value:
            return _hardmax(w, x, axis) if function == "hardmax" else w.do(function, x, axis)

        if w.opset >= 13:
            return applied(w(0), w.axis(w.whole("axis", -1), w.rank(0)))
        axis, shape = w.axis(w.whole("axis", 1), w.rank(0)), w.shape(0)
        flat = w.reshape(w(0), [math.prod(shape[:axis]), math.prod(shape[axis:])])
        return w.reshape(applied(flat, 1), shape)

    return write


KNOWN: dict[str, Writes] = {
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "SimplifiedLayerNormalization": _simplified,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance,
    "LRN": _response_norm,
    "Softmax": _along("softmax.int"),
    "LogSoftmax": _along("log_softmax.int"),
    "Hardmax": _along("hardmax"),
}
