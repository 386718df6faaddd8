"""Tensors as codes of few bits: making them, reading them, and products of them.

Sums of products of codes are exact in float64, where every processor has a fast product.
"""

from __future__ import annotations

from whence import dtypes
from whence.replay.onnx_translation.convolution import convolved
from whence.replay.onnx_translation.elementwise import stored, to_dtype
from whence.replay.onnx_translation.writer import Value, Writer, Writes

_LIMITS = {
    "uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767),
    "int32": (-(2**31), 2**31 - 1),
}  # fmt: skip


def laid_out(w: Writer, place: int, data: int, axis: int) -> Value:
    """A scale or zero point beside a tensor of codes: one for all, for each element of an axis, or
    for each block of them.
    """
    value, shape = w(place), w.operand(place).shape
    if all(n == 1 for n in shape):
        return w.reshape(value, [])
    rank = w.rank(data)
    axis = w.axis(axis, rank)
    if len(shape) == 1 and not w.whole("block_size", 0):
        return w.along(value, rank, axis)
    block, extent = w.whole("block_size", 0), w.extent(data, axis)
    if len(shape) != rank or not block:
        raise w.refuse(f"a scale of shape {shape} is not known to whence")
    value = w.do("repeat_interleave.self_int", value, block, axis)
    return w.part(value, axis, 0, extent)


def codes(w: Writer, x: Value, scale: Value, zero: Value | None, dtype: str) -> Value:
    """x as codes: divided, rounded to even, shifted and limited."""
    if dtype not in _LIMITS:
        raise w.refuse(f"codes of type {dtype[:40]} are not known to whence")
    rounded = w.do("round.default", w.div(x, scale))
    if zero is not None:
        rounded = w.add(rounded, w.cast(zero, "float32"))
    low, high = _LIMITS[dtype]
    limited = w.do("clamp.default", rounded, low, high)
    return w.cast(limited, "int64" if dtype == "uint16" else dtype)


def shifted(w: Writer, x: Value, zero: Value | None, dtype: str = "int32") -> Value:
    """Codes less their zero point."""
    x = w.cast(x, dtype)
    return w.sub(x, w.cast(zero, dtype)) if zero is not None else x


def numbers(w: Writer, x: Value, scale: Value, zero: Value | None, dtype: str) -> Value:
    """The numbers that codes stand for."""
    return w.mul(w.cast(shifted(w, x, zero), dtype), scale)


def _quantize(w: Writer) -> Value:
    axis = w.whole("axis", 1)
    scale = laid_out(w, 1, 0, axis)
    zero = laid_out(w, 2, 0, axis) if w.has(2) else None
    if w.has(2):
        dtype = w.operand(2).dtype
    else:
        code = w.whole("output_dtype", 0)
        dtype = stored(w, code) if code else "uint8"
    x = w(0)
    if not w.is_float(0) or dtypes.is_half(w.dtype(0)):
        x = w.cast(x, "float32")
    if dtypes.is_half(w.dtype(1)):
        scale = w.cast(scale, "float32")
    if w.whole("precision", 0) not in (0, 1):
        raise w.refuse("in another precision than float32 it is not known to whence")
    if dtype.startswith("float8"):
        return to_dtype(w, w.div(x, scale), "float32", dtype, bool(w.whole("saturate", 1)))
    return codes(w, x, scale, zero, dtype)


def _dequantize(w: Writer) -> Value:
    axis = w.whole("axis", 1)
    scale = laid_out(w, 1, 0, axis)
    code = w.whole("output_dtype", 0)
    dtype = stored(w, code) if code else w.dtype(1)
    x, zero = w(0), laid_out(w, 2, 0, axis) if w.has(2) else None
    if w.operand(0).dtype.startswith("float8"):
        value = w.mul(w.cast(x, w.dtype(1)), scale)
    elif dtypes.named(w.dtype(0)).kind in ("int", "uint"):
        value = numbers(w, x, scale, zero, w.dtype(1))
    else:
        raise w.refuse(f"codes of type {w.dtype(0)} are not known to whence")
    return value if dtype == w.dtype(1) else w.cast(value, dtype)


def dynamic(w: Writer, x: Value) -> list[Value]:
    """Codes of eight bits with the scale and zero point that fit the elements: [codes, scale, zero
    point]. A range of nothing has the scale 1.
    """
    low = w.do("clamp.default", w.do("min.default", x), None, 0)
    high = w.do("clamp.default", w.do("max.default", x), 0)
    scale = w.do("div.Scalar", w.sub(high, low), 255)
    scale = w.where(w.do("eq.Scalar", scale, 0), w.do("ones_like.default", scale), scale)
    zero = w.do("round.default", w.do("neg.default", w.div(low, scale)))
    zero = w.cast(w.do("clamp.default", zero, 0, 255), "uint8")
    return [codes(w, x, scale, zero, "uint8"), scale, zero]


def along_columns(w: Writer, place: int, rank: int) -> Value:
    """A scale or zero point of the second factor: one, or one for each column."""
    shape = w.operand(place).shape
    if all(n == 1 for n in shape):
        return w.reshape(w(place), [])
    if len(shape) == 1:
        return w(place)
    if len(shape) == rank:
        return w(place)
    raise w.refuse(f"a scale of shape {shape} is not known to whence")


def along_rows(w: Writer, place: int, rank: int) -> Value:
    """A scale or zero point of the first factor: one, or one for each row."""
    shape = w.operand(place).shape
    if all(n == 1 for n in shape):
        return w.reshape(w(place), [])
    if len(shape) == 1:
        return w.reshape(w(place), [-1, 1])
    if len(shape) == rank:
        return w(place)
    raise w.refuse(f"a scale of shape {shape} is not known to whence")


def product(w: Writer, a: Value, a_zero: Value | None, b: Value, b_zero: Value | None) -> Value:
    """The product of two matrices of codes, exact, in float64."""
    return w.matmul(shifted(w, a, a_zero, "float64"), shifted(w, b, b_zero, "float64"))


def coded_product(w: Writer, x: Value, weight: Value, scale: Value, zero: Value) -> Value:
    """The product of numbers, which become codes first, with weights that are codes."""
    own, own_scale, own_zero = dynamic(w, x)
    total = product(w, own, own_zero, weight, zero)
    return w.mul(w.cast(total, "float32"), w.mul(own_scale, scale))


def _matmul_integer(w: Writer) -> Value:
    a_zero = along_rows(w, 2, w.rank(0)) if w.has(2) else None
    b_zero = along_columns(w, 3, w.rank(1)) if w.has(3) else None
    return w.cast(product(w, w(0), a_zero, w(1), b_zero), "int32")


def _qlinear_matmul(w: Writer) -> Value:
    a_rank, b_rank = w.rank(0), w.rank(3)
    exact = product(w, w(0), along_rows(w, 2, a_rank), w(3), along_columns(w, 5, b_rank))
    scale = w.mul(along_rows(w, 1, a_rank), along_columns(w, 4, b_rank))
    total = w.mul(w.cast(exact, w.dtype(1)), scale)
    return codes(w, total, w.reshape(w(6), []), w.reshape(w(7), []), w.operand(7).dtype)


def _by_channel(w: Writer, place: int, rank: int) -> Value:
    """A scale or zero point of weights: one, or one for each channel that is made."""
    if all(n == 1 for n in w.operand(place).shape):
        return w.reshape(w(place), [])
    return w.along(w(place), rank, 0)


def _integer_convolution(
    w: Writer, x: tuple[int, int], weight: tuple[int, int], bias: Value | None, last: bool = False
) -> Value:
    """The convolution of codes, exact, in float64. x, weight: places of codes and zero point."""
    x_zero = w.reshape(w(x[1]), []) if w.has(x[1]) else None
    weight_zero = _by_channel(w, weight[1], w.rank(weight[0])) if w.has(weight[1]) else None
    rank = w.rank(x[0])
    value, extents = shifted(w, w(x[0]), x_zero, "float64"), w.shape(x[0])[2:]
    if last:
        value = w.permute(value, [0, rank - 1, *range(1, rank - 1)])
        extents = w.shape(x[0])[1:-1]
    factors = shifted(w, w(weight[0]), weight_zero, "float64")
    out = convolved(w, value, factors, bias, extents, w.shape(weight[0])[2:])
    return w.permute(out, [0, *range(2, rank), 1]) if last else out


def _conv_integer(w: Writer) -> Value:
    return w.cast(_integer_convolution(w, (0, 2), (1, 3), None), "int32")


def _qlinear_conv(w: Writer) -> Value:
    last = bool(w.whole("channels_last", 0))
    bias = w.cast(w(8), "float64") if w.has(8) else None
    exact = _integer_convolution(w, (0, 2), (3, 5), bias, last)
    rank = w.rank(0)
    weights = w.operand(4).shape
    if all(n == 1 for n in weights):
        scale = w.reshape(w(4), [])
    else:
        scale = w.along(w(4), rank, rank - 1 if last else 1)
    total = w.mul(w.cast(exact, "float32"), w.mul(w.reshape(w(1), []), scale))
    return codes(w, total, w.reshape(w(6), []), w.reshape(w(7), []), w.operand(7).dtype)


def _dynamic_quantize(w: Writer) -> list[Value | None]:
    return [*dynamic(w, w(0))]


KNOWN: dict[str, Writes] = {
    "QuantizeLinear": _quantize,
    "com.microsoft.QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "com.microsoft.DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic_quantize,
    "MatMulInteger": _matmul_integer,
    "QLinearMatMul": _qlinear_matmul,
    "ConvInteger": _conv_integer,
    "QLinearConv": _qlinear_conv,
    "com.microsoft.QLinearConv": _qlinear_conv,
}
