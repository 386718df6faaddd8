"""Operators that compute each element from the elements at its place."""

from __future__ import annotations

from whence import dtypes
from whence.replay.onnx_translation.writer import Value, Writer, Writes

CODES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64",
    15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz",
}  # fmt: skip
"""TensorProto.DataType of the format."""
_EIGHT_BITS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_INFINITY = {"float": "inf"}


def stored(w: Writer, code: int) -> str:
    """The dtype that a number of the format names."""
    if code not in CODES:
        raise w.refuse(f"element type {code} of the format is not known to whence")
    return CODES[code]


def pair(w: Writer) -> tuple[Value, Value]:
    """Both operands, broadcast as opsets before 7 asked for it."""
    a, b = w(0), w(1)
    if w.opset >= 7 or w.node.domain not in ("", "ai.onnx") or not w.whole("broadcast", 0):
        return a, b
    axis = w.attribute("axis", None)
    if axis is not None:
        behind = w.rank(0) - w.axis(int(axis), w.rank(0)) - w.rank(1)
        b = w.reshape(b, [*w.shape(1), *([1] * behind)])
    return a, b


def _binary(name: str) -> Writes:
    def write(w: Writer) -> Value:
        return w.do(name, *pair(w))

    return write


def _unary(name: str) -> Writes:
    return lambda w: w.do(name, w(0))


def _div(w: Writer) -> Value:
    a, b = pair(w)
    if w.is_float(0):
        return w.div(a, b)
    return w.do("div.Tensor_mode", a, b, rounding_mode="trunc")


def _mod(w: Writer) -> Value:
    if w.whole("fmod", 0):
        return w.do("fmod.Tensor", w(0), w(1))
    return w.do("remainder.Tensor", w(0), w(1))


def _pow(w: Writer) -> Value:
    a, b = pair(w)
    if not w.is_float(0):  # as a number of 64 bits, cut off
        power = w.do("pow.Tensor_Tensor", w.cast(a, "float64"), w.cast(b, "float64"))
        return w.cast(power, w.dtype(0))
    power = w.do("pow.Tensor_Tensor", a, b)
    return power if w.dtype(0) == w.dtype(1) or not w.is_float(1) else w.cast(power, w.dtype(0))


def _chain(name: str) -> Writes:
    def write(w: Writer) -> Value:
        value = w.do("clone.default", w(0)) if w.count == 1 else w(0)
        for place in range(1, w.count):
            value = w.do(name, value, w(place))
        return value

    return write


def _mean(w: Writer) -> Value:
    return w.do("div.Scalar", _chain("add.Tensor")(w), w.count)


def _shift(w: Writer) -> Value:
    left = w.text("direction") == "LEFT"
    if not left and w.operand(0).dtype == "uint64":
        raise w.refuse("torch does not compute with uint64")
    return w.do(f"bitwise_{'left' if left else 'right'}_shift.Tensor", w(0), w(1))


def _is_infinite(w: Writer) -> Value:
    positive, negative = w.whole("detect_positive", 1), w.whole("detect_negative", 1)
    if positive and negative:
        return w.do("isinf.default", w(0))
    if positive or negative:
        return w.do("isposinf.default" if positive else "isneginf.default", w(0))
    return w.do("zeros_like.default", w(0), dtype={"dtype": "bool"})


def softplus(w: Writer, x: Value) -> Value:
    """log(1 + exp(x)), for large x too."""
    tail = w.do("log1p.default", w.do("exp.default", w.do("neg.default", w.do("abs.default", x))))
    return w.add(w.do("relu.default", x), tail)


def hard_sigmoid(w: Writer, x: Value, alpha: float, beta: float) -> Value:
    return w.do("clamp.default", w.plus(w.times(x, alpha), beta), 0, 1)


def swish(w: Writer, x: Value, alpha: float) -> Value:
    return w.mul(x, w.do("sigmoid.default", w.times(x, alpha)))


def _shrink(w: Writer) -> Value:
    if not w.is_float(0):
        raise w.refuse("of integers it is not known to whence")
    x, limit, bias = w(0), w.number("lambd", 0.5), w.number("bias", 0.0)
    above = w.where(w.do("gt.Scalar", x, limit), w.plus(x, -bias), w.do("zeros_like.default", x))
    return w.where(w.do("lt.Scalar", x, -limit), w.plus(x, bias), above)


def _prelu(w: Writer) -> Value:
    x, slope = w(0), w(1)
    if w.opset < 7 and w.rank(1) == 1 and w.rank(0) > 1:
        slope = w.reshape(slope, [-1, *([1] * (w.rank(0) - 2))])
    return w.where(w.do("lt.Scalar", x, 0), w.mul(x, slope), x)


def _clip(w: Writer) -> Value:
    if w.opset >= 11:
        if not (w.has(1) or w.has(2)):
            return w.do("clone.default", w(0))
        return w.do("clamp.Tensor", w(0), w.optional(1), w.optional(2))
    low, high = w.attribute("min", None), w.attribute("max", None)
    if low is None and high is None:
        return w.do("clone.default", w(0))
    return w.do("clamp.default", w(0), low, high)


def to_dtype(w: Writer, value: Value, source: str, dtype: str, saturate: bool = True) -> Value:
    """A cast as ONNX defines it, which saturates floats of eight bits."""
    if source == dtype:
        return w.do("clone.default", value)
    if dtype in ("uint16", "uint32", "uint64"):
        return w.cast(value, "int64")  # what the node made says the rest
    if dtype in _EIGHT_BITS:
        if not saturate:
            raise w.refuse("releases of torch differ in what they make of numbers out of range")
        largest = dtypes.named(dtype).max_finite
        value = w.do("clamp.default", value, -largest if largest else None, largest)
    return w.cast(value, dtype)


def _cast(w: Writer) -> Value:
    code = w.attribute("to")
    dtype = str(code).lower() if isinstance(code, str) else stored(w, int(code))
    dtype = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    return _to(w, dtype)


def _to(w: Writer, dtype: str) -> Value:
    if dtype not in CODES.values():
        raise w.refuse(f"element type {dtype[:40]} is not known to whence")
    source = w.operand(0).dtype
    floating = dtype in dtypes.DTYPES and dtypes.named(dtype).is_floating
    if source == "uint64" and (floating or dtype == "uint64"):
        raise w.refuse("torch does not compute with uint64")
    return to_dtype(w, w(0), source, dtype, bool(w.whole("saturate", 1)))


def _cast_like(w: Writer) -> Value:
    w.raw(1)  # it is read, though only its dtype matters
    return _to(w, w.operand(1).dtype)


def _dropout(w: Writer) -> list[Value | None]:
    if w.opset < 7:
        training = not w.whole("is_test", 0)
    else:
        training = w.has(2) and bool(w.number_of(2))
    if training:
        raise w.refuse("it draws random numbers")
    kept = w.do("ones_like.default", w(0), dtype={"dtype": "bool"}) if w.wants(1) else None
    return [w.do("clone.default", w(0)), kept if w.opset >= 10 else None]


def gelu(w: Writer, x: Value, approximate: str = "none") -> Value:
    return w.do("gelu.default", x, approximate=approximate)


_FLOATS = {name: f"{name.lower()}.default" for name in (
    "Abs", "Neg", "Ceil", "Floor", "Round", "Sqrt", "Exp", "Log", "Sin", "Cos", "Tan", "Asin",
    "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh", "Acosh", "Atanh", "Erf", "Sigmoid", "Sign",
    "Reciprocal", "Relu", "IsNaN", "Mish",
)}  # fmt: skip
KNOWN: dict[str, Writes] = {
    **{name: _unary(aten) for name, aten in _FLOATS.items()},
    "HardSwish": _unary("hardswish.default"),
    "Identity": _unary("clone.default"),
    "Not": _unary("logical_not.default"),
    "BitwiseNot": _unary("bitwise_not.default"),
    "Add": _binary("add.Tensor"),
    "Sub": _binary("sub.Tensor"),
    "Mul": _binary("mul.Tensor"),
    "Div": _div,
    "Mod": _mod,
    "Pow": _pow,
    "Equal": _binary("eq.Tensor"),
    "Less": _binary("lt.Tensor"),
    "LessOrEqual": _binary("le.Tensor"),
    "Greater": _binary("gt.Tensor"),
    "GreaterOrEqual": _binary("ge.Tensor"),
    "And": _binary("logical_and.default"),
    "Or": _binary("logical_or.default"),
    "Xor": _binary("logical_xor.default"),
    "BitwiseAnd": _binary("bitwise_and.Tensor"),
    "BitwiseOr": _binary("bitwise_or.Tensor"),
    "BitwiseXor": _binary("bitwise_xor.Tensor"),
    "BitShift": _shift,
    "Max": _chain("maximum.default"),
    "Min": _chain("minimum.default"),
    "Sum": _chain("add.Tensor"),
    "Mean": _mean,
    "Where": lambda w: w.where(w(0), w(1), w(2)),
    "Clip": _clip,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Dropout": _dropout,
    "IsInf": _is_infinite,
    "Softplus": lambda w: softplus(w, w(0)),
    "Softsign": lambda w: w.div(w(0), w.plus(w.do("abs.default", w(0)), 1)),
    "LeakyRelu": lambda w: w.do("leaky_relu.default", w(0), w.number("alpha", 0.01)),
    "PRelu": _prelu,
    "Elu": lambda w: w.do("elu.default", w(0), w.number("alpha", 1.0)),
    "Selu": lambda w: w.do(
        "elu.default",
        w(0),
        w.number("alpha", 1.67326319217681884765625),
        w.number("gamma", 1.05070102214813232421875),
    ),
    "Celu": lambda w: w.do("celu.default", w(0), w.number("alpha", 1.0)),
    "ThresholdedRelu": lambda w: w.do("threshold.default", w(0), w.number("alpha", 1.0), 0),
    "HardSigmoid": lambda w: hard_sigmoid(w, w(0), w.number("alpha", 0.2), w.number("beta", 0.5)),
    "Gelu": lambda w: gelu(w, w(0), w.text("approximate", "none")),
    "Swish": lambda w: swish(w, w(0), w.number("alpha", 1.0)),
    "Shrink": _shrink,
}
ANY_BITS = frozenset({
    "Add", "Sub", "Mul", "Identity", "Equal", "Where", "BitwiseAnd", "BitwiseOr", "BitwiseXor",
    "BitwiseNot", "BitShift", "Sum", "Cast", "CastLike", "Dropout",
})  # fmt: skip
