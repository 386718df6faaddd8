"""ModelProto, the file of an ONNX model: nodes, attributes and the headers of initialisers, without
decoding their elements and without the onnx package.

Source: onnx/onnx.proto3 of onnx 1.19; field numbers are part of the format. A message that stands
twice is merged, as protobuf does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from whence.readers.encodings import onnx_tensor, protobuf
from whence.readers.encodings.onnx_tensor import OnnxTensor
from whence.readers.encodings.protobuf import (
    PAIRS,
    Message,
    Schema,
    floats,
    integers,
    messages,
    packed,
    raw,
    texts,
)

_DEPTH = 32  # of graphs inside graphs


@dataclass(slots=True)
class OnnxNode:
    """One node. domain: "" for ONNX's own. inputs, outputs: names of values, "" for an absent
    optional one. attributes: plain values, tensors as `OnnxTensor`. graphs: attributes that are
    graphs. metadata: entries that the exporter wrote.
    """

    op_type: str = ""
    domain: str = ""
    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, list[OnnxGraph]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    doc: str = ""


@dataclass(slots=True)
class OnnxGraph:
    """Nodes in the order of the file, which is an execution order. initializers: by name. shapes,
    dtypes: of values, where stated; -1 for an unknown extent.
    """

    nodes: list[OnnxNode] = field(default_factory=list)
    initializers: dict[str, OnnxTensor] = field(default_factory=dict)
    sparse: set[str] = field(default_factory=set)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class OnnxModel:
    """A model. opsets: version by domain. functions: names of functions that it defines itself.
    bodies: function name -> hash of its body.
    """

    ir_version: int = 0
    producer: str = ""
    graph: OnnxGraph = field(default_factory=OnnxGraph)
    opsets: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)
    bodies: dict[str, str] = field(default_factory=dict)


_TENSOR_TYPE: Schema = {
    1: ("dtype", integers),
    2: ("shapes", messages({1: ("extents", messages({1: ("size", integers)}))})),
}
_VALUE = messages(
    {1: ("name", texts), 2: ("types", messages({1: ("tensors", messages(_TENSOR_TYPE))}))}
)
_GRAPH: Schema = {
    1: ("nodes", raw), 5: ("initializers", raw), 11: ("inputs", _VALUE), 12: ("outputs", _VALUE),
    13: ("inner", _VALUE), 15: ("sparse", messages({1: ("values", raw)})),
}  # fmt: skip
_NODE: Schema = {
    1: ("inputs", texts), 2: ("outputs", texts), 3: ("name", texts), 4: ("op_type", texts),
    5: ("attributes", raw), 6: ("doc", texts), 7: ("domain", texts), 9: ("metadata", PAIRS),
}  # fmt: skip
_ATTRIBUTE: Schema = {
    1: ("name", texts), 2: ("1", floats), 3: ("2", packed), 4: ("3", texts), 5: ("4", raw),
    6: ("graphs", raw), 7: ("6", floats), 8: ("7", packed), 9: ("8", texts), 10: ("9", raw),
    11: ("graphs", raw), 20: ("type", integers),
}  # fmt: skip
"""Values have the number of their type as name."""
_ZERO: dict[int, Any] = {1: 0.0, 2: 0, 3: "", 4: None}
"""Type of a single value -> its value where proto3 omits it."""
_MODEL: Schema = {
    1: ("ir_version", integers), 2: ("producer", texts), 3: ("release", texts), 7: ("graphs", raw),
    8: ("opsets", messages({1: ("domain", texts), 2: ("version", integers)})),
    14: ("metadata", PAIRS), 25: ("functions", raw),
}  # fmt: skip


def parse(message: protobuf.Buffer) -> OnnxModel:
    """Returns the model in a file. Raises ValueError when the file holds none."""
    fields = protobuf.read(message, _MODEL)
    model = OnnxModel(
        fields.last("ir_version", 0),
        " ".join(filter(None, (fields.last("producer"), fields.last("release")))),
        opsets={plain_domain(o.last("domain")): o.last("version", 0) for o in fields["opsets"]},
        metadata=protobuf.table(fields["metadata"]),
    )
    for graph in fields["graphs"]:
        _graph(graph, model.graph, 0)
    for function in fields["functions"]:
        about = protobuf.read(function, {1: ("name", texts), 10: ("domain", texts)})
        name = ".".join(filter(None, (about.last("domain"), about.last("name"))))
        model.functions.append(name)
        model.bodies[name] = hashlib.sha256(function).hexdigest()
    if not model.graph.nodes and not model.graph.outputs:
        raise ValueError("it holds no graph")
    return model


def plain_domain(domain: str) -> str:
    """Returns "" for both names of ONNX's own domain."""
    return "" if domain == "ai.onnx" else domain


def _graph(message: protobuf.Buffer, graph: OnnxGraph, depth: int) -> OnnxGraph:
    """Adds the content of a message to a graph."""
    if depth > _DEPTH:
        raise ValueError("graphs are nested too deeply")
    fields = protobuf.read(message, _GRAPH)
    graph.nodes += [_node(node, depth) for node in fields["nodes"]]
    for tensor in map(onnx_tensor.parse, fields["initializers"]):
        graph.initializers[tensor.name] = tensor
    for sparse in fields["sparse"]:
        graph.sparse.update(onnx_tensor.parse(values).name for values in sparse["values"])
    graph.inputs += [value.last("name") for value in fields["inputs"]]
    graph.outputs += [value.last("name") for value in fields["outputs"]]
    for value in (*fields["inputs"], *fields["outputs"], *fields["inner"]):
        _describe(value, graph)
    return graph


def _describe(value: Message, graph: OnnxGraph) -> None:
    """Records dtype and shape of a value, where stated."""
    name = value.last("name")
    for tensor in (tensor for kind in value["types"] for tensor in kind["tensors"]):
        if dtype := onnx_tensor.dtype_of(tensor.last("dtype", 0)):
            graph.dtypes[name] = dtype
        for shape in tensor["shapes"]:
            graph.shapes[name] = tuple(extent.last("size", -1) for extent in shape["extents"])


def _node(message: protobuf.Buffer, depth: int) -> OnnxNode:
    fields = protobuf.read(message, _NODE)
    node = OnnxNode(
        fields.last("op_type"), plain_domain(fields.last("domain")), fields.last("name"),
        fields["inputs"], fields["outputs"], metadata=protobuf.table(fields["metadata"]),
        doc=fields.last("doc"),
    )  # fmt: skip
    for attribute in fields["attributes"]:
        _attribute(protobuf.read(attribute, _ATTRIBUTE), node, depth)
    return node


def _attribute(fields: Message, node: OnnxNode, depth: int) -> None:
    name = fields.last("name")
    if graphs := [_graph(graph, OnnxGraph(), depth + 1) for graph in fields["graphs"]]:
        node.graphs[name] = graphs
        return
    # writers before ONNX 1.3 left the type out
    kind = fields.last("type", 0) or next((n for n in range(1, 10) if fields.get(str(n))), 0)
    plain = _PLAIN.get(kind)
    values = fields.get(str(kind), [])
    values = values if plain is None else list(map(plain, values))
    if kind in _ZERO:
        node.attributes[name] = values[-1] if values else _ZERO[kind]
    elif str(kind) in fields:
        node.attributes[name] = values


def _float(value: float) -> Any:
    """Returns a number in a form that plain JSON can hold."""
    return value if math.isfinite(value) else {"float": str(value)}


_PLAIN: dict[int, Callable[[Any], Any]] = {
    1: _float, 6: _float, 4: onnx_tensor.parse, 9: onnx_tensor.parse,
}  # fmt: skip
