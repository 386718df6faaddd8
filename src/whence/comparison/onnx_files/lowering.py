"""Fused nodes as the plain ones that they stand for, as the specifications of ONNX and of ONNX
Runtime's own operators write them out; nodes that have no other form stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from whence.comparison.onnx_files.folding import transposed
from whence.comparison.onnx_files.graph import Graph, Node, held

_MICROSOFT = "com.microsoft."


def lowered(graph: Graph, node: Node) -> list[Node]:
    """The nodes that one stands for: itself, where it has no other form."""
    write = _FORMS.get(node.op_type)
    parts = write(graph, node) if write is not None else None
    if parts is None:
        return [node]
    return [inner for part in parts for inner in ([part] if part is node else lowered(graph, part))]


def _part(node: Node, op_type: str, inputs: list[str], output: str, **attributes: Any) -> Node:
    return Node(
        op_type,
        node.name,
        inputs,
        [output],
        attributes,
        opset=0 if node.op_type.startswith(_MICROSOFT) else node.opset,
        place=node.place,
        said=node.said,
    )


def _inner(node: Node, number: int = 0) -> str:
    """A name for what lies between two parts."""
    return f"{node.outputs[0]} inside {number}"


def _gemm(graph: Graph, node: Node) -> list[Node] | None:
    attributes = node.attributes
    weight = graph.weights.get(node.inputs[1])
    if weight is None or attributes["transA"]:
        return None
    name = node.inputs[1]
    if attributes["transB"]:
        name = f"{name} transposed"
        graph.weights[name] = transposed(weight.name, weight)
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    alpha, beta = {"alpha": attributes["alpha"]}, {"beta": attributes["beta"]}
    if not bias:
        return [_part(node, "MatMul", [node.inputs[0], name], node.outputs[0], **alpha)]
    between = _inner(node)
    return [
        _part(node, "MatMul", [node.inputs[0], name], between, **alpha),
        _part(node, "Add", [between, bias], node.outputs[0], **beta),
    ]


def _matmul(graph: Graph, node: Node) -> list[Node] | None:
    """FusedMatMul that only multiplies, or scales too."""
    attributes = node.attributes
    if any(attributes.get(k) for k in ("transA", "transBatchA", "transBatchB")):
        return None
    first, second = node.inputs
    if attributes.get("transB"):
        weight = graph.weights.get(second)
        if weight is None or len(weight.shape) != 2:
            return None
        second = f"{second} transposed"
        graph.weights[second] = transposed(weight.name, weight)
    alpha = attributes.get("alpha", 1.0)
    if alpha != 1.0:
        return None
    return [_part(node, "MatMul", [first, second], node.outputs[0])]


def _activation(node: Node, source: str) -> Node | None:
    """The activation that a fused node applies last."""
    name = node.attributes.get("activation", "")
    numbers = node.attributes.get("activation_params", [])
    output = node.outputs[0]
    if name in ("Relu", "Sigmoid", "Tanh"):
        return _part(node, name, [source], output)
    if name == "LeakyRelu" and len(numbers) == 1:
        return _part(node, name, [source], output, alpha=numbers[0])
    if name == "HardSigmoid" and len(numbers) == 2:
        return _part(node, name, [source], output, alpha=numbers[0], beta=numbers[1])
    if name == "Clip" and len(numbers) == 2:
        return _part(node, name, [source], output, min=[numbers[0]], max=[numbers[1]])
    return None


def _convolution(graph: Graph, node: Node) -> list[Node] | None:
    between = _inner(node)
    end = _activation(node, between)
    if end is None:
        return None
    given = {k: v for k, v in node.attributes.items() if not k.startswith("activation")}
    summed = node.inputs[3] if len(node.inputs) > 3 else ""
    first = _part(node, "Conv", node.inputs[:3], _inner(node, 1) if summed else between, **given)
    if not summed:
        return [first, end]
    return [first, _part(node, "Add", [first.outputs[0], summed], between), end]


def _fused_gemm(graph: Graph, node: Node) -> list[Node] | None:
    between = _inner(node)
    end = _activation(node, between)
    if end is None:
        return None
    defaults = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
    given = {k: v for k, v in node.attributes.items() if not k.startswith("activation")}
    return [_part(node, "Gemm", node.inputs, between, **{**defaults, **given}), end]


def _gelu(approximate: str) -> Callable[[Graph, Node], list[Node]]:
    def write(graph: Graph, node: Node) -> list[Node]:
        bias = node.inputs[1] if len(node.inputs) > 1 else ""
        source, parts = node.inputs[0], list[Node]()
        if bias:
            source = _inner(node)
            parts = [_part(node, "Add", node.inputs[:2], source)]
        return [*parts, _part(node, "Gelu", [source], node.outputs[0], approximate=approximate)]

    return write


def _quick_gelu(graph: Graph, node: Node) -> list[Node]:
    alpha = float(node.attributes.get("alpha", 1.702))
    source, between = node.inputs[0], _inner(node)
    parts, scaled = [], source
    if alpha != 1:
        name, scaled = f"{node.name} alpha", _inner(node, 1)
        graph.weights[name] = held(name, np.asarray(alpha, np.float32))
        parts = [_part(node, "Mul", [source, name], scaled)]
    return [
        *parts,
        _part(node, "Sigmoid", [scaled], between),
        _part(node, "Mul", [source, between], node.outputs[0]),
    ]


def _skip_norm(kind: str) -> Callable[[Graph, Node], list[Node] | None]:
    """A norm of a sum. kind: of the norm."""

    def write(graph: Graph, node: Node) -> list[Node] | None:
        inputs = [*node.inputs, "", "", "", ""]
        place = 4 if kind == "LayerNormalization" else 3
        scale, shift = inputs[2], inputs[3] if place == 4 else ""
        if any(node.outputs[1:3]):
            return None
        bias = inputs[place]
        total = node.outputs[3] if len(node.outputs) > 3 and node.outputs[3] else _inner(node)
        parts = [_part(node, "Add", inputs[:2], _inner(node, 1) if bias else total)]
        if bias:
            parts.append(_part(node, "Add", [parts[0].outputs[0], bias], total))
        epsilon = node.attributes.get("epsilon", 9.999999960041972e-13)
        operands = [v for v in (total, scale, shift) if v]
        given = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
        return [*parts, _part(node, kind, operands, node.outputs[0], **given)]

    return write


def _rms(graph: Graph, node: Node) -> list[Node] | None:
    if any(node.outputs[1:]):
        return None
    given = {"axis": -1, "epsilon": 9.999999747378752e-06, "stash_type": 1} | node.attributes
    return [_part(node, "RMSNormalization", node.inputs, node.outputs[0], **given)]


def _reciprocal(graph: Graph, node: Node) -> list[Node]:
    name = f"{node.name} one"
    graph.weights[name] = held(name, np.asarray(1, np.float32))
    return [_part(node, "Div", [name, node.inputs[0]], node.outputs[0])]


def _sum(graph: Graph, node: Node) -> list[Node] | None:
    if len(node.inputs) != 2:
        return None
    return [_part(node, "Add", node.inputs, node.outputs[0])]


_FORMS: dict[str, Callable[[Graph, Node], list[Node] | None]] = {
    "Gemm": _gemm,
    "Reciprocal": _reciprocal,
    "SimplifiedLayerNormalization": _rms,
    "Sum": _sum,
    f"{_MICROSOFT}BiasGelu": _gelu("none"),
    f"{_MICROSOFT}FastGelu": _gelu("tanh"),
    f"{_MICROSOFT}FusedConv": _convolution,
    f"{_MICROSOFT}FusedGemm": _fused_gemm,
    f"{_MICROSOFT}FusedMatMul": _matmul,
    f"{_MICROSOFT}Gelu": _gelu("none"),
    f"{_MICROSOFT}QuickGelu": _quick_gelu,
    f"{_MICROSOFT}SkipLayerNormalization": _skip_norm("LayerNormalization"),
    f"{_MICROSOFT}SkipSimplifiedLayerNormalization": _skip_norm("RMSNormalization"),
}
