"""Tells which operands of a node are codes, and which are their scales and zero points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from whence.records import Call, Ref
from whence.records.marks import taken_parameters
from whence.records.quantised import Packed
from whence.records.slots import input_name

QUANTIZE = frozenset(("QuantizeLinear", "com.microsoft.QuantizeLinear"))
DEQUANTIZE = frozenset(("DequantizeLinear", "com.microsoft.DequantizeLinear"))
MEASURE = frozenset(("DynamicQuantizeLinear",))
"""Nodes that quantise their input by its own range."""
PRODUCTS: Mapping[str, str] = {
    "MatMulInteger": "com.microsoft.DynamicQuantizeMatMul", "ConvInteger": "DynamicQuantizeConv"
}  # fmt: skip
"""Nodes that multiply codes, with the operator that does so and gives numbers."""
_DOMAINS = ("com.microsoft.nchwc", "com.microsoft", "ai.onnx.ml", "ai.onnx.training")
_OWN_DOMAINS = ("com.microsoft.nhwc.", "com.microsoft.")


def domain_of(op_type: str) -> str:
    """The domain of a node's operator type; "" for ONNX's own domain."""
    return next((domain for domain in _DOMAINS if op_type.startswith(f"{domain}.")), "")


class Triple(NamedTuple):
    """Positions of the operands that hold codes, their scale and their zero point. axis: of the
    scales, where there are several; None where the node's `axis` attribute says it.
    """

    codes: int
    scale: int
    zero: int
    axis: int | None = 0


class Form(NamedTuple):
    """A type of node that computes with codes. kind: the operator on numbers that it stands for.
    reads: operands that are codes. makes: positions of (scale, zero point) of the result; None
    where the result is floating. bias: position of the integer bias, whose scale is the product of
    the scales of the first two operands; -1 for none. rounds: position of a float operand that the
    node itself quantises to 8 bits by its range; -1 for none. is_turned: whether the operator on
    numbers has the last two axes of its weights in the other order.
    """

    kind: str
    reads: tuple[Triple, ...]
    makes: tuple[int, int] | None
    bias: int = -1
    rounds: int = -1
    is_turned: bool = False


_ONE = (Triple(0, 1, 2),)
_TWO = (Triple(0, 1, 2), Triple(3, 4, 5))
_FORMS: Mapping[str, Form] = {
    "QLinearConv": Form("Conv", _TWO, (6, 7), 8),
    "QLinearMatMul": Form("MatMul", (Triple(0, 1, 2), Triple(3, 4, 5, -1)), (6, 7)),
    "QLinearAdd": Form("Add", _TWO, (6, 7)),
    "QLinearMul": Form("Mul", _TWO, (6, 7)),
    "QLinearSigmoid": Form("Sigmoid", _ONE, (3, 4)),
    "QLinearLeakyRelu": Form("LeakyRelu", _ONE, (3, 4)),
    "QLinearSoftmax": Form("Softmax", _ONE, (3, 4)),
    "QLinearGlobalAveragePool": Form("GlobalAveragePool", _ONE, (3, 4)),
    "QLinearAveragePool": Form("AveragePool", _ONE, (3, 4)),
    "QLinearWhere": Form("Where", (Triple(1, 2, 3), Triple(4, 5, 6)), (7, 8)),
    "MatMulIntegerToFloat": Form("MatMul", (Triple(0, 2, 4), Triple(1, 3, 5, -1)), None),
    "DynamicQuantizeMatMul": Form("MatMul", (Triple(1, 2, 3, -1),), None, rounds=0),
    "DynamicQuantizeConv": Form("Conv", (Triple(1, 2, 3),), None, rounds=0),
    "MatMulNBits": Form("MatMul", (Triple(1, 2, 3),), None),
    "DynamicQuantizeLSTM": Form(
        "LSTM", (Triple(1, 8, 9), Triple(2, 10, 11)), None, rounds=0, is_turned=True
    ),
    "QAttention": Form("com.microsoft.Attention", (Triple(0, 3, 6), Triple(1, 4, 7, -1)), None),
}
KEEPS = frozenset((
    "MaxPool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Slice",
    "Split", "DepthToSpace", "SpaceToDepth", "Resize", "Gather", "GatherElements", "GatherND",
    "Expand", "Tile", "Pad",
))  # fmt: skip
"""Operators that pass on codes, or a part of them, unchanged; what Pad adds is a code too."""


def plain_type(call: Call) -> str:
    """The type of a node without the domain of the runtime's own operators."""
    for domain in _OWN_DOMAINS:
        if call.op_type.startswith(domain):
            return call.op_type.removeprefix(domain)
    return call.op_type


def operands(call: Call) -> dict[int, Ref]:
    """The operands of a node by their position in ONNX's signature, parameters included."""
    by_slot = {ref.slot: ref for ref in call.refs}
    reads = {
        int(name): ref for ref in call.slots("input") if (name := input_name(ref.slot)).isdigit()
    }
    for name, place in taken_parameters(call):
        if place.isdigit() and f"param.{name}" in by_slot:
            reads[int(place)] = by_slot[f"param.{name}"]
    return reads


def form_of(call: Call) -> Form | None:
    """The form of a node that computes with codes; None for all other nodes."""
    kind = plain_type(call)
    if call.op_type in DEQUANTIZE:
        return Form("Identity", (Triple(0, 1, 2, None),), None)
    if call.op_type in QUANTIZE:
        return Form("Identity", (), (1, 2))
    if kind == "QLinearConcat":
        places = range(2, max(operands(call), default=1) + 1, 3)
        return Form("Concat", tuple(Triple(k, k + 1, k + 2) for k in places), (0, 1))
    if kind == "QGemm":
        axis = 0 if call.arguments.get("transB") else -1
        reads = (Triple(0, 1, 2), Triple(3, 4, 5, axis))
        return Form("Gemm", reads, (7, 8) if 7 in operands(call) else None, 6)
    return _FORMS.get(kind)


def is_coded(call: Call) -> bool:
    """Whether a node quantises numbers or computes with codes."""
    return plain_type(call) in MEASURE or form_of(call) is not None


def packed(call: Call) -> Packed | None:
    """How the weight of a node lies in bytes; None where it does not."""
    if plain_type(call) != "MatMulNBits":
        return None
    bits = call.arguments.get("bits", 4)
    rows, columns, block = (call.arguments[name] for name in ("N", "K", "block_size"))
    return Packed(bits, block, rows, columns)


def triples(call: Call, form: Form) -> Iterator[tuple[Triple, int]]:
    """The operands that are codes, each with the axis of its scales."""
    for triple in form.reads:
        own = call.arguments.get("axis", 1)
        yield triple, int(own) if triple.axis is None else triple.axis
