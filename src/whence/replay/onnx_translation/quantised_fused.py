"""Operators of ONNX Runtime on codes of few bits, and products with packed weights."""

from __future__ import annotations

from collections.abc import Callable

from whence.replay.onnx_translation.pooling import pooled_mean
from whence.replay.onnx_translation.quantised import (
    along_columns,
    coded_product,
    codes,
    numbers,
    product,
)
from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor


def _one(w: Writer, place: int) -> Tensor:
    """Returns a scale or zero point that all elements share, as a scalar."""
    if any(n != 1 for n in w.operand(place).shape):
        raise w.refuse("several scales are not known to whence")
    return w(place).reshape([])


def _zero(w: Writer, place: int) -> Tensor | None:
    return _one(w, place) if w.has(place) else None


def _read(w: Writer, place: int) -> Tensor:
    """Returns the values of the codes at this place, whose scale and zero point are the next two
    inputs.
    """
    return numbers(w(place), _one(w, place + 1), _zero(w, place + 2), "float32")


def _made(w: Writer, x: Tensor, place: int, dtype: str) -> Tensor:
    """Encodes x with the scale at this place and the zero point at the next."""
    return codes(w, x, _one(w, place), _zero(w, place + 1), dtype)


def _binary(name: str) -> Writes:
    return lambda w: _made(w, w.do(name, _read(w, 0), _read(w, 3)), 6, w.operand(0).dtype)


def _unary(function: Callable[[Writer, Tensor], Tensor]) -> Writes:
    return lambda w: _made(w, function(w, _read(w, 0)), 3, w.operand(0).dtype)


def _softmax(w: Writer, x: Tensor) -> Tensor:
    axis = w.axis(w.whole("axis", -1), w.rank(0))
    if w.whole("opset") < 13 and axis != w.rank(0) - 1:
        raise w.refuse("over several axes it is not known to whence")
    return x.softmax(axis)


def _global_mean(w: Writer, x: Tensor) -> Tensor:
    rank = w.rank(0)
    axes = range(1, rank - 1) if w.whole("channels_last", 0) else range(2, rank)
    return x.mean(list(axes), True)


def _mean_pool(w: Writer, x: Tensor) -> Tensor:
    rank = w.rank(0)
    if not w.whole("channels_last", 0):
        return pooled_mean(w, x, "float32", w.shape(0)[2:], w.made().shape[2:])
    x = x.channels_first(rank)
    out = pooled_mean(w, x, "float32", w.shape(0)[1:-1], w.made().shape[1:-1])
    return out.channels_last(rank)


def _concat(w: Writer) -> Tensor:
    parts = [_read(w, place) for place in range(2, w.count, 3)]
    joined = w.do("cat", parts, w.axis(w.whole("axis"), w.rank(2)))
    return codes(w, joined, _one(w, 0), _zero(w, 1), w.operand(2).dtype)


def _where(w: Writer) -> Tensor:
    x = numbers(w(1), _one(w, 2), _zero(w, 3), "float32")
    y = numbers(w(4), _one(w, 5), _zero(w, 6), "float32")
    return _made(w, w.where(w(0), x, y), 7, w.operand(1).dtype)


def _gemm(w: Writer) -> Tensor:
    swap = [w(p).t() if w.whole(f"trans{s}", 0) else w(p) for p, s in ((0, "A"), (3, "B"))]
    b_zero = along_columns(w, 5, 2) if w.has(5) else None
    total = product(swap[0], _zero(w, 2), swap[1], b_zero)
    if w.has(6):
        total = total + w(6).to("float64")
    scale = _one(w, 1) * along_columns(w, 4, 2) * w.number("alpha", 1.0)
    value = total.to("float32") * scale
    return _made(w, value, 7, w.operand(0).dtype) if w.has(7) else value


def _to_float(w: Writer) -> Tensor:
    a_zero = _zero(w, 4)
    b_zero = along_columns(w, 5, w.rank(1)) if w.has(5) else None
    total = product(w(0), a_zero, w(1), b_zero)
    scale = _one(w, 2) * along_columns(w, 3, w.rank(1))
    return w.plus(total.to("float32") * scale, 6)


def _dynamic_product(w: Writer) -> Tensor:
    zero = along_columns(w, 3, w.rank(1)) if w.has(3) else w.scalar(0, "int32")
    value = coded_product(w, w(0), w(1), along_columns(w, 2, w.rank(1)), zero)
    return w.plus(value, 4)


def _unpacked(w: Writer, packed: Tensor, bits: int, shape: list[int]) -> Tensor:
    """Unpacks codes of `bits` bits from bytes, lowest bits first, along the last axis."""
    if bits == 8:
        return packed.reshape(shape)
    mask = (1 << bits) - 1
    parts = []
    for shift in range(0, 8, bits):
        part = packed
        if shift:
            part = w.do("bitwise_right_shift.Tensor_Scalar", packed, shift)
        parts.append(part.bitwise_and(mask))
    return w.do("stack", parts, -1).reshape(shape)


def _packed_product(w: Writer) -> Tensor:
    bits, block = w.whole("bits", 4), w.whole("block_size")
    rows, columns = w.whole("N"), w.whole("K")
    if bits not in (2, 4, 8) or w.whole("weight_prepacked", 0) or w.has(4):
        raise w.refuse("weights packed in this way are not known to whence")
    if w.whole("accuracy_level", 0) not in (0, 1):
        raise w.refuse("it may round its input to fewer bits")
    dtype = w.dtype(0)
    blocks = -(-columns // block)
    packed = w(1).reshape([rows, blocks, block * bits // 8])
    value = _unpacked(w, packed, bits, [rows, blocks, block]).to(dtype)
    if w.has(3) and w.is_float(3):
        value = value - w(3).reshape([rows, blocks, 1])
    elif w.has(3):
        each = -(-blocks * bits // 8)
        zeros = _unpacked(w, w(3).reshape([rows, each]), bits, [rows, each * 8 // bits])
        zeros = zeros.part(1, 0, blocks).reshape([rows, blocks, 1])
        value = value - zeros.to(dtype)
    else:
        value = value - float(1 << bits - 1)
    value = value * w(2).reshape([rows, blocks, 1])
    weight = value.reshape([rows, blocks * block]).part(1, 0, columns)
    return w.plus(w(0) @ weight.t(), 5)


KNOWN: dict[str, Writes] = {
    "com.microsoft.QLinearAdd": _binary("add.Tensor"),
    "com.microsoft.QLinearMul": _binary("mul.Tensor"),
    "com.microsoft.QLinearSigmoid": _unary(lambda w, x: x.sigmoid()),
    "com.microsoft.QLinearLeakyRelu": _unary(lambda w, x: x.leaky_relu(w.number("alpha", 0.01))),
    "com.microsoft.QLinearSoftmax": _unary(_softmax),
    "com.microsoft.QLinearGlobalAveragePool": _unary(_global_mean),
    "com.microsoft.QLinearAveragePool": _unary(_mean_pool),
    "com.microsoft.QLinearConcat": _concat,
    "com.microsoft.QLinearWhere": _where,
    "com.microsoft.QGemm": _gemm,
    "com.microsoft.MatMulIntegerToFloat": _to_float,
    "com.microsoft.DynamicQuantizeMatMul": _dynamic_product,
    "com.microsoft.MatMulNBits": _packed_product,
}
