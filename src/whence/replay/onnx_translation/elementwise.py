"""Operators that compute each element from the elements at its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from whence import dtypes
from whence.replay.onnx_translation.writer import UNSIGNED, Writer, Writes
from whence.replay.program_writing import Tensor

CODES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64",
    15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz",
}  # fmt: skip
"""TensorProto.DataType of ONNX -> dtype."""
_EIGHT_BITS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")


def stored(w: Writer, code: int) -> str:
    """Returns the dtype of a TensorProto.DataType number."""
    if code not in CODES:
        raise w.refuse(f"element type {code} of the format is not known to whence")
    return CODES[code]


def pair(w: Writer) -> tuple[Tensor, Tensor]:
    """Returns both operands, the second reshaped as opsets before 7 broadcast it."""
    a, b = w(0), w(1)
    if w.opset >= 7 or w.node.domain not in ("", "ai.onnx") or not w.whole("broadcast", 0):
        return a, b
    axis = w.attribute("axis", None)
    if axis is not None:
        behind = w.rank(0) - w.axis(int(axis), w.rank(0)) - w.rank(1)
        b = b.reshape([*w.shape(1), *[1] * behind])
    return a, b


def _binary(name: str) -> Writes:
    def write(w: Writer) -> Tensor:
        return w.do(name, *pair(w))

    return write


def _div(w: Writer) -> Tensor:
    a, b = pair(w)
    if w.is_float(0):
        return a / b
    return a.div(b, rounding_mode="trunc")


def _mod(w: Writer) -> Tensor:
    if w.whole("fmod", 0):
        return w(0).fmod(w(1))
    return w(0).remainder(w(1))


def _pow(w: Writer) -> Tensor:
    a, b = pair(w)
    if not w.is_float(0):  # as a number of 64 bits, cut off
        power = a.to("float64").pow(b.to("float64"))
        return power.to(w.dtype(0))
    power = a.pow(b)
    return power if w.dtype(0) == w.dtype(1) or not w.is_float(1) else power.to(w.dtype(0))


def _chained(w: Writer, name: str) -> Tensor:
    value = w(0).clone() if w.count == 1 else w(0)
    for place in range(1, w.count):
        value = w.do(name, value, w(place))
    return value


def _shift(w: Writer) -> Tensor:
    left = w.text("direction") == "LEFT"
    if not left and w.operand(0).dtype == "uint64":
        raise w.refuse("torch does not compute with uint64")
    return w.do(f"bitwise_{'left' if left else 'right'}_shift.Tensor", w(0), w(1))


def _is_infinite(w: Writer) -> Tensor:
    positive, negative = w.whole("detect_positive", 1), w.whole("detect_negative", 1)
    if positive and negative:
        return w(0).isinf()
    if positive or negative:
        return w.do("isposinf.default" if positive else "isneginf.default", w(0))
    return w(0).zeros_like(dtype="bool")


def softplus(x: Tensor) -> Tensor:
    """Computes log(1 + exp(x)), also for large x."""
    tail = (-x.abs()).exp().log1p()
    return x.relu() + tail


def hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    return (x * alpha + beta).clamp(0, 1)


def swish(x: Tensor, alpha: float) -> Tensor:
    return x * (x * alpha).sigmoid()


def _shrink(w: Writer) -> Tensor:
    if not w.is_float(0):
        raise w.refuse("of integers it is not known to whence")
    x, limit, bias = w(0), w.number("lambd", 0.5), w.number("bias", 0.0)
    above = w.where(x > limit, x - bias, x.zeros_like())
    return w.where(x < -limit, x + bias, above)


def _prelu(w: Writer) -> Tensor:
    x, slope = w(0), w(1)
    if w.opset < 7 and w.rank(1) == 1 and w.rank(0) > 1:
        slope = slope.reshape([-1, *[1] * (w.rank(0) - 2)])
    return w.where(x < 0, x * slope, x)


def _clip(w: Writer) -> Tensor:
    if w.opset >= 11:
        if not (w.has(1) or w.has(2)):
            return w(0).clone()
        return w.do("clamp.Tensor", w(0), w.optional(1), w.optional(2))
    low, high = w.attribute("min", None), w.attribute("max", None)
    if low is None and high is None:
        return w(0).clone()
    return w(0).clamp(low, high)


def to_dtype(w: Writer, value: Tensor, source: str, dtype: str, saturate: bool = True) -> Tensor:
    """Casts as ONNX defines it: floats of eight bits saturate."""
    if source == dtype:
        return value.clone()
    if dtype in UNSIGNED:
        return value.to("int64")  # what the node made says the rest
    if dtype in _EIGHT_BITS:
        if not saturate:
            raise w.refuse("releases of torch differ in what they make of numbers out of range")
        largest = dtypes.named(dtype).max_finite
        value = value.clamp(-largest if largest else None, largest)
    return value.to(dtype)


def _cast(w: Writer) -> Tensor:
    code = w.attribute("to")
    dtype = str(code).lower() if isinstance(code, str) else stored(w, int(code))
    dtype = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    return _to(w, dtype)


def _to(w: Writer, dtype: str) -> Tensor:
    if dtype not in CODES.values():
        raise w.refuse(f"element type {dtype[:40]} is not known to whence")
    source = w.operand(0).dtype
    floating = dtype in dtypes.DTYPES and dtypes.named(dtype).is_floating
    if source == "uint64" and (floating or dtype == "uint64"):
        raise w.refuse("torch does not compute with uint64")
    return to_dtype(w, w(0), source, dtype, bool(w.whole("saturate", 1)))


def _cast_like(w: Writer) -> Tensor:
    w.raw(1)  # it is read, though only its dtype matters
    return _to(w, w.operand(1).dtype)


def _dropout(w: Writer) -> list[Tensor | None]:
    if w.opset < 7:
        training = not w.whole("is_test", 0)
    else:
        training = w.has(2) and bool(w.number_of(2))
    if training:
        raise w.refuse("it draws random numbers")
    kept = w(0).ones_like(dtype="bool") if w.wants(1) else None
    return [w(0).clone(), kept if w.opset >= 10 else None]


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of each element. numbers: attribute -> its default, for the numbers that the
    function takes.
    """

    of: Callable[..., Tensor]
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, w: Writer) -> Tensor:
        return self.of(w(0), *(w.number(*item) for item in self.numbers.items()))


def _plain(name: str) -> Activation:
    return Activation(lambda x: getattr(x, name)())


_FLOATS = {name: name.lower() for name in (
    "Abs", "Neg", "Ceil", "Floor", "Round", "Sqrt", "Exp", "Log", "Sin", "Cos", "Tan", "Asin",
    "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Erf", "Sign",
    "Reciprocal", "IsNaN", "Mish",
)}  # fmt: skip
ACTIVATIONS: dict[str, Activation] = {
    **{name: _plain(name.lower()) for name in ("Relu", "Tanh", "Sigmoid", "HardSwish")},
    "Softplus": Activation(softplus),
    "Softsign": Activation(lambda x: x / (x.abs() + 1)),
    "LeakyRelu": Activation(lambda x, alpha: x.leaky_relu(alpha), {"alpha": 0.01}),
    "Elu": Activation(lambda x, alpha: x.elu(alpha), {"alpha": 1.0}),
    "ThresholdedRelu": Activation(lambda x, alpha: x.threshold(alpha, 0), {"alpha": 1.0}),
    "HardSigmoid": Activation(hard_sigmoid, {"alpha": 0.2, "beta": 0.5}),
}
"""Activations that other operators also refer to by name."""
KNOWN: dict[str, Writes] = {
    **ACTIVATIONS,
    "Celu": Activation(lambda x, alpha: x.celu(alpha), {"alpha": 1.0}),
    "Swish": Activation(swish, {"alpha": 1.0}),
    "Selu": Activation(
        lambda x, alpha, gamma: x.elu(alpha, gamma),
        {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875},
    ),
    **{name: _plain(aten) for name, aten in _FLOATS.items()},
    "Identity": _plain("clone"),
    "Not": _plain("logical_not"),
    "BitwiseNot": _plain("bitwise_not"),
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
    "Max": lambda w: _chained(w, "maximum"),
    "Min": lambda w: _chained(w, "minimum"),
    "Sum": lambda w: _chained(w, "add"),
    "Mean": lambda w: _chained(w, "add") / w.count,
    "Where": lambda w: w.where(w(0), w(1), w(2)),
    "Clip": _clip,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Dropout": _dropout,
    "IsInf": _is_infinite,
    "PRelu": _prelu,
    "Gelu": lambda w: w(0).gelu(approximate=w.text("approximate", "none")),
    "Shrink": _shrink,
}
ANY_BITS = frozenset({
    "Add", "Sub", "Mul", "Identity", "Equal", "Where", "BitwiseAnd", "BitwiseOr", "BitwiseXor",
    "BitwiseNot", "BitShift", "Sum", "Cast", "CastLike", "Dropout",
})  # fmt: skip
