"""Norms, and the softmax family. A norm is computed step by step or by the aten operator of its
name, with the node's own epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from whence import dtypes
from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor


def mean_of_squares(x: Tensor, axes: Sequence[int]) -> Tensor:
    return (x * x).mean(list(axes), True)


def widened(x: Tensor, dtype: str) -> Tensor:
    """Converts a half-precision value to float32, in which the specification computes norms."""
    return x.to("float32") if dtypes.is_half(dtype) else x


def layer_norm(
    w: Writer, x: Tensor, dtype: str, over: Sequence[int], scale: Tensor | None, bias: Tensor | None
) -> list[Tensor]:
    """Returns norm, mean and inverse standard deviation. over: extents of the last axes."""
    epsilon = w.number("epsilon", 1e-5)
    wide = widened(x, dtype)
    found = w.several("native_layer_norm.default", 3, wide, list(over), None, None, epsilon)
    out = found[0] if wide is x else found[0].to(dtype)
    out = out * scale if scale is not None else out
    return [out + bias if bias is not None else out, found[1], found[2]]


def rms_norm(
    w: Writer, x: Tensor, dtype: str, axes: Sequence[int], scale: Tensor | None
) -> list[Tensor]:
    """Returns norm and inverse root mean square, computed step by step."""
    wide = widened(x, dtype)
    mean = mean_of_squares(wide, axes) + w.number("epsilon", 1e-5)
    inverse = mean.rsqrt()
    out = wide * inverse
    out = out if wide is x else out.to(dtype)
    return [out * scale if scale is not None else out, inverse]


def _layer_norm(w: Writer) -> list[Tensor | None]:
    axis = w.axis(w.whole("axis", -1), w.rank(0))
    found = layer_norm(w, w(0), w.dtype(0), w.shape(0)[axis:], w(1), w.optional(2))
    return [*found]


def _rms_norm(w: Writer) -> Tensor:
    rank = w.rank(0)
    axis = w.axis(w.whole("axis", -1), rank)
    return rms_norm(w, w(0), w.dtype(0), range(axis, rank), w(1))[0]


def _simplified(w: Writer) -> list[Tensor | None]:
    rank = w.rank(0)
    axis = w.axis(w.whole("axis", -1), rank)
    return [*rms_norm(w, w(0), w.dtype(0), range(axis, rank), w(1))]


def _batch_norm(w: Writer) -> Tensor:
    if w.whole("training_mode", 0) or (w.opset < 7 and not w.whole("is_test", 0)):
        raise w.refuse("in training it is not known to whence")
    if w.opset < 9 and not w.whole("spatial", 1):
        raise w.refuse("of each element by itself it is not known to whence")
    epsilon = w.number("epsilon", 1e-5)
    return w(0).batch_norm(w(1), w(2), w(3), w(4), False, 0.0, epsilon, False)


def _instance_norm(w: Writer) -> Tensor:
    rank = w.rank(0)
    return _standardised(w, w(0), list(range(2, rank)), w(1), w(2), [-1, *([1] * (rank - 2))])


def _standardised(
    w: Writer, x: Tensor, axes: list[int], scale: Tensor, bias: Tensor, shape: Sequence[int]
) -> Tensor:
    """Returns (x - mean) / sqrt(variance + epsilon) over these axes, scaled and shifted
    by channel.
    """
    centred = x - x.mean(axes, True)
    variance = mean_of_squares(centred, axes) + w.number("epsilon", 1e-5)
    out = centred * variance.rsqrt()
    return out * scale.reshape(shape) + bias.reshape(shape)


def _group_norm(w: Writer) -> Tensor:
    groups, channels = w.whole("num_groups"), w.extent(0, 1)
    scale, bias = w(1), w(2)
    if w.opset < 21:  # one for each group
        each = channels // groups
        scale, bias = (v.repeat_interleave(each, 0) for v in (scale, bias))
    dtype = w.dtype(0)
    x = widened(w(0), dtype)
    out = x.group_norm(groups, None, None, w.number("epsilon", 1e-5), False)
    out = out.to(dtype) if dtypes.is_half(dtype) else out
    shape = [-1, *([1] * (w.rank(0) - 2))]
    return out * scale.reshape(shape) + bias.reshape(shape)


def _lp_norm(w: Writer) -> Tensor:
    axis, p = w.axis(w.whole("axis", -1), w.rank(0)), w.whole("p", 2)
    if p not in (1, 2):
        raise w.refuse(f"of order {p}")
    x = w(0)
    size = x.linalg_vector_norm(p, [axis], True)
    zeros = x.zeros_like()
    return w.where(size.eq(0), zeros, x / size)


def _mean_variance(w: Writer) -> Tensor:
    axes = [w.axis(a, w.rank(0)) for a in w.integers("axes", [0, 2, 3])]
    x = w(0)
    centred = x - x.mean(axes, True)
    deviation = mean_of_squares(centred, axes).sqrt()
    return centred / (deviation + 1e-9)


def _response_norm(w: Writer) -> Tensor:
    size, rank = w.whole("size"), w.rank(0)
    x = w(0)
    sides = [0, 0] * (rank - 2) + [(size - 1) // 2, size - 1 - (size - 1) // 2]
    squares = (x * x).constant_pad_nd(sides, 0)
    total = squares.unfold(1, size, 1).sum([-1])
    factor = total * (w.number("alpha", 1e-4) / size) + w.number("bias", 1.0)
    return x / factor ** w.number("beta", 0.75)


def _hardmax(x: Tensor, axis: int) -> Tensor:
    largest = x.argmax(axis, True)
    return x.writer.do("scatter.value", x.zeros_like(), axis, largest, 1)


def _along(function: str) -> Writes:
    """Softmax and its like: along one axis since opset 13, before that over all axes from `axis`
    on.
    """

    def write(w: Writer) -> Tensor:
        def applied(x: Tensor, axis: int) -> Tensor:
            return _hardmax(x, axis) if function == "hardmax" else w.do(function, x, axis)

        if w.opset >= 13:
            return applied(w(0), w.axis(w.whole("axis", -1), w.rank(0)))
        axis, shape = w.axis(w.whole("axis", 1), w.rank(0)), w.shape(0)
        flat = w(0).reshape([math.prod(shape[:axis]), math.prod(shape[axis:])])
        return applied(flat, 1).reshape(shape)

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
