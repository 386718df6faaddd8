"""Tensors as codes of few bits: making them, reading them, and products of them.

Sums of products of codes are exact in float64, where every processor has a fast product.
"""

from __future__ import annotations

from whence import dtypes
from whence.replay.onnx_translation.convolution import convolved
from whence.replay.onnx_translation.elementwise import stored, to_dtype
from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor

_LIMITS = {
    "uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767),
    "int32": (-(2**31), 2**31 - 1),
}  # fmt: skip


def laid_out(w: Writer, place: int, data: int, axis: int) -> Tensor:
    """Reshapes a scale or zero point to broadcast over a tensor of codes: one for all elements, one
    for each index of an axis, or one for each block along it.
    """
    value, shape = w(place), w.operand(place).shape
    if all(n == 1 for n in shape):
        return value.reshape([])
    rank = w.rank(data)
    axis = w.axis(axis, rank)
    if len(shape) == 1 and not w.whole("block_size", 0):
        return value.along(rank, axis)
    block, extent = w.whole("block_size", 0), w.extent(data, axis)
    if len(shape) != rank or not block:
        raise w.refuse(f"a scale of shape {shape} is not known to whence")
    value = value.repeat_interleave(block, axis)
    return value.part(axis, 0, extent)


def codes(w: Writer, x: Tensor, scale: Tensor, zero: Tensor | None, dtype: str) -> Tensor:
    """Encodes x: divided by the scale, rounded half to even, shifted by the zero point
    and clipped.
    """
    if dtype not in _LIMITS:
        raise w.refuse(f"codes of type {dtype[:40]} are not known to whence")
    rounded = (x / scale).round()
    if zero is not None:
        rounded = rounded + zero.to("float32")
    low, high = _LIMITS[dtype]
    limited = rounded.clamp(low, high)
    return limited.to("int64" if dtype == "uint16" else dtype)


def shifted(x: Tensor, zero: Tensor | None, dtype: str = "int32") -> Tensor:
    """Returns the codes minus their zero point."""
    x = x.to(dtype)
    return x - zero.to(dtype) if zero is not None else x


def numbers(x: Tensor, scale: Tensor, zero: Tensor | None, dtype: str) -> Tensor:
    """Returns the values that codes represent."""
    return shifted(x, zero).to(dtype) * scale


def _quantize(w: Writer) -> Tensor:
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
        x = x.to("float32")
    if dtypes.is_half(w.dtype(1)):
        scale = scale.to("float32")
    if w.whole("precision", 0) not in (0, 1):
        raise w.refuse("in another precision than float32 it is not known to whence")
    if dtype.startswith("float8"):
        return to_dtype(w, x / scale, "float32", dtype, bool(w.whole("saturate", 1)))
    return codes(w, x, scale, zero, dtype)


def _dequantize(w: Writer) -> Tensor:
    axis = w.whole("axis", 1)
    scale = laid_out(w, 1, 0, axis)
    code = w.whole("output_dtype", 0)
    dtype = stored(w, code) if code else w.dtype(1)
    x, zero = w(0), laid_out(w, 2, 0, axis) if w.has(2) else None
    if w.operand(0).dtype.startswith("float8"):
        value = x.to(w.dtype(1)) * scale
    elif dtypes.named(w.dtype(0)).kind in ("int", "uint"):
        value = numbers(x, scale, zero, w.dtype(1))
    else:
        raise w.refuse(f"codes of type {w.dtype(0)} are not known to whence")
    return value if dtype == w.dtype(1) else value.to(dtype)


def dynamic(w: Writer, x: Tensor) -> list[Tensor]:
    """Encodes x in eight bits with a scale and zero point from its range: [codes, scale, zero
    point]. An empty range has scale 1.
    """
    low = x.min().clamp(None, 0)
    high = x.max().clamp(0)
    scale = (high - low) / 255
    scale = w.where(scale.eq(0), scale.ones_like(), scale)
    zero = (-(low / scale)).round()
    zero = zero.clamp(0, 255).to("uint8")
    return [codes(w, x, scale, zero, "uint8"), scale, zero]


def along_columns(w: Writer, place: int, rank: int) -> Tensor:
    """Returns a scale or zero point of the second factor: one, or one for each column."""
    shape = w.operand(place).shape
    if all(n == 1 for n in shape):
        return w(place).reshape([])
    if len(shape) not in (1, rank):
        raise w.refuse(f"a scale of shape {shape} is not known to whence")
    return w(place)


def along_rows(w: Writer, place: int, rank: int) -> Tensor:
    """Returns a scale or zero point of the first factor: one, or one for each row."""
    value, shape = along_columns(w, place, rank), w.operand(place).shape
    return value.reshape([-1, 1]) if len(shape) == 1 and shape != (1,) else value


def product(a: Tensor, a_zero: Tensor | None, b: Tensor, b_zero: Tensor | None) -> Tensor:
    """Returns the product of two matrices of codes, exact, in float64."""
    return shifted(a, a_zero, "float64") @ shifted(b, b_zero, "float64")


def coded_product(w: Writer, x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Multiplies floating x, which is quantised first, with quantised weights."""
    own, own_scale, own_zero = dynamic(w, x)
    total = product(own, own_zero, weight, zero)
    return total.to("float32") * (own_scale * scale)


def _matmul_integer(w: Writer) -> Tensor:
    a_zero = along_rows(w, 2, w.rank(0)) if w.has(2) else None
    b_zero = along_columns(w, 3, w.rank(1)) if w.has(3) else None
    return product(w(0), a_zero, w(1), b_zero).to("int32")


def _qlinear_matmul(w: Writer) -> Tensor:
    a_rank, b_rank = w.rank(0), w.rank(3)
    exact = product(w(0), along_rows(w, 2, a_rank), w(3), along_columns(w, 5, b_rank))
    scale = along_rows(w, 1, a_rank) * along_columns(w, 4, b_rank)
    total = exact.to(w.dtype(1)) * scale
    return codes(w, total, w(6).reshape([]), w(7).reshape([]), w.operand(7).dtype)


def _integer_convolution(
    w: Writer, x: tuple[int, int], weight: tuple[int, int], bias: Tensor | None, last: bool = False
) -> Tensor:
    """Returns the convolution of codes, exact, in float64. x, weight: places of codes and zero
    point.
    """
    x_zero = w(x[1]).reshape([]) if w.has(x[1]) else None
    weight_zero = laid_out(w, weight[1], weight[0], 0) if w.has(weight[1]) else None
    rank = w.rank(x[0])
    value, extents = shifted(w(x[0]), x_zero, "float64"), w.shape(x[0])[2:]
    if last:
        value = value.channels_first(rank)
        extents = w.shape(x[0])[1:-1]
    factors = shifted(w(weight[0]), weight_zero, "float64")
    out = convolved(w, value, factors, bias, extents, w.shape(weight[0])[2:])
    return out.channels_last(rank) if last else out


def _conv_integer(w: Writer) -> Tensor:
    return _integer_convolution(w, (0, 2), (1, 3), None).to("int32")


def _qlinear_conv(w: Writer) -> Tensor:
    last = bool(w.whole("channels_last", 0))
    bias = w(8).to("float64") if w.has(8) else None
    exact = _integer_convolution(w, (0, 2), (3, 5), bias, last)
    rank = w.rank(0)
    scale = laid_out(w, 4, 0, rank - 1 if last else 1)
    total = exact.to("float32") * (w(1).reshape([]) * scale)
    return codes(w, total, w(6).reshape([]), w(7).reshape([]), w.operand(7).dtype)


def _dynamic_quantize(w: Writer) -> list[Tensor | None]:
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
