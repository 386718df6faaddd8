"""ModelProto, the file of an ONNX model: nodes, attributes and the headers of initialisers, without
decoding their elements and without the onnx package.

Source: onnx/onnx.proto3 of onnx 1.19; field numbers are part of the format. A message that stands
twice is merged, as protobuf does.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

from whence.readers.encodings import onnx_tensor, protobuf
from whence.readers.encodings.onnx_tensor import OnnxTensor

_FLOAT, _INT, _STRING, _TENSOR, _GRAPH = 1, 2, 3, 4, 5
_FLOATS, _INTS, _STRINGS, _TENSORS, _GRAPHS = 6, 7, 8, 9, 10
_VALUES = {2: _FLOAT, 3: _INT, 4: _STRING, 5: _TENSOR, 6: _GRAPH, 7: _FLOATS, 8: _INTS,
           9: _STRINGS, 10: _TENSORS, 11: _GRAPHS}  # fmt: skip
_ZERO: dict[int, Any] = {_FLOAT: 0.0, _INT: 0, _STRING: "", _TENSOR: None}
_DEPTH = 32  # of graphs inside graphs


@dataclass(slots=True)
class OnnxNode:
    """One node. domain: "" for ONNX's own. inputs, outputs: names of values, "" for an optional one
    that is absent. attributes: plain values, tensors as `OnnxTensor`, without graphs; graphs:
    those, by attribute. metadata: what the exporter left.
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
    """Nodes in the order of the file, which is one of execution. initializers: by name. shapes,
    dtypes: of values, as far as they are stated; -1 of an extent that is not.
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
    """A model. opsets: version by domain. functions: names of functions that it defines itself;
    bodies: a hash of what each does, by that name.
    """

    ir_version: int = 0
    producer: str = ""
    graph: OnnxGraph = field(default_factory=OnnxGraph)
    opsets: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)
    bodies: dict[str, str] = field(default_factory=dict)


def parse(message: protobuf.Buffer) -> OnnxModel:
    """The model that a file holds. Raises ValueError when it is none."""
    model, producer = OnnxModel(), ["", ""]
    for number, kind, value in protobuf.fields(message):
        if number == 1 and kind == protobuf.VARINT:
            model.ir_version = protobuf.signed(value)
        elif kind != protobuf.BYTES:
            continue
        elif number in (2, 3):
            producer[number - 2] = protobuf.text(value)
        elif number == 7:
            _graph(value, model.graph, 0)
        elif number == 8:
            domain, version = "", 0
            for n, k, v in protobuf.fields(value):
                if n == 1 and k == protobuf.BYTES:
                    domain = protobuf.text(v)
                elif n == 2 and k == protobuf.VARINT:
                    version = protobuf.signed(v)
            model.opsets[plain_domain(domain)] = version
        elif number == 14:
            _pair(value, model.metadata)
        elif number == 25:
            names = {
                n: protobuf.text(v)
                for n, k, v in protobuf.fields(value)
                if n in (1, 10) and k == protobuf.BYTES
            }
            model.functions.append(".".join(filter(None, (names.get(10), names.get(1)))))
            model.bodies[model.functions[-1]] = hashlib.sha256(value).hexdigest()
    if not model.graph.nodes and not model.graph.outputs:
        raise ValueError("it holds no graph")
    model.producer = " ".join(filter(None, producer))
    return model


def plain_domain(domain: str) -> str:
    """ONNX's own domain has two names."""
    return "" if domain == "ai.onnx" else domain


def _graph(message: protobuf.Buffer, graph: OnnxGraph, depth: int) -> None:
    if depth > _DEPTH:
        raise ValueError("graphs are nested too deeply")
    for number, kind, value in protobuf.fields(message):
        if kind != protobuf.BYTES:
            continue
        if number == 1:
            graph.nodes.append(_node(value, depth))
        elif number == 5:
            tensor = onnx_tensor.parse(value)
            graph.initializers[tensor.name] = tensor
        elif number == 15:
            graph.sparse.add(_sparse_name(value))
        elif number in (11, 12, 13):
            name, dtype, shape = _value(value)
            if number != 13:
                (graph.inputs if number == 11 else graph.outputs).append(name)
            if shape is not None:
                graph.shapes[name] = shape
            if dtype:
                graph.dtypes[name] = dtype


def _sparse_name(message: protobuf.Buffer) -> str:
    for number, kind, value in protobuf.fields(message):
        if number == 1 and kind == protobuf.BYTES:
            return onnx_tensor.parse(value).name
    return ""


def _value(message: protobuf.Buffer) -> tuple[str, str, tuple[int, ...] | None]:
    """Name, dtype and shape of a value; "" and None where that is no tensor, or has none."""
    name, dtype, shape = "", "", None
    for number, kind, value in protobuf.fields(message):
        if kind == protobuf.BYTES and number == 1:
            name = protobuf.text(value)
        elif kind == protobuf.BYTES and number == 2:
            kinds = _messages_of(value, 1)
            for n, k, number_of_type in (f for kind in kinds for f in protobuf.fields(kind)):
                if n == 1 and k == protobuf.VARINT:
                    dtype = onnx_tensor.dtype_of(number_of_type)
            for form in _messages(kinds, 2):
                shape = tuple(_extent(extent) for extent in _messages([form], 1))
    return name, dtype, shape


def _messages_of(message: protobuf.Buffer, number: int) -> list[protobuf.Buffer]:
    return [v for n, k, v in protobuf.fields(message) if n == number and k == protobuf.BYTES]


def _messages(messages: list[protobuf.Buffer], number: int) -> list[protobuf.Buffer]:
    """The messages of a field in several."""
    return [inner for message in messages for inner in _messages_of(message, number)]


def _extent(message: protobuf.Buffer) -> int:
    stated = [protobuf.signed(v) for n, k, v in protobuf.fields(message) if n == 1 and k == 0]
    return stated[-1] if stated else -1


def _pair(message: protobuf.Buffer, into: dict[str, str]) -> None:
    texts = {n: protobuf.text(v) for n, k, v in protobuf.fields(message) if k == protobuf.BYTES}
    into[texts.get(1, "")] = texts.get(2, "")


def _node(message: protobuf.Buffer, depth: int) -> OnnxNode:
    node = OnnxNode()
    for number, kind, value in protobuf.fields(message):
        if kind != protobuf.BYTES:
            continue
        if number == 1:
            node.inputs.append(protobuf.text(value))
        elif number == 2:
            node.outputs.append(protobuf.text(value))
        elif number == 3:
            node.name = protobuf.text(value)
        elif number == 4:
            node.op_type = protobuf.text(value)
        elif number == 5:
            _attribute(value, node, depth)
        elif number == 6:
            node.doc = protobuf.text(value)
        elif number == 7:
            node.domain = plain_domain(protobuf.text(value))
        elif number == 9:
            _pair(value, node.metadata)
    return node


def _attribute(message: protobuf.Buffer, node: OnnxNode, depth: int) -> None:
    name, stated = "", 0
    values: dict[int, list[Any]] = {}
    for number, kind, value in protobuf.fields(message):
        if number == 1 and kind == protobuf.BYTES:
            name = protobuf.text(value)
        elif number == 20 and kind == protobuf.VARINT:
            stated = value
        elif number in _VALUES:
            sort = _VALUES[number]
            values.setdefault(sort, []).extend(_read(sort, kind, value, depth))
    if graphs := [*values.get(_GRAPH, ()), *values.get(_GRAPHS, ())]:
        node.graphs[name] = graphs
        return
    # writers before ONNX 1.3 left the type out
    sort = stated or next(iter(values), 0)
    if sort in (_FLOATS, _INTS, _STRINGS, _TENSORS):
        node.attributes[name] = values.get(sort, [])
    elif sort in _ZERO:
        # proto3 leaves a zero out
        node.attributes[name] = (values.get(sort) or [_ZERO[sort]])[-1]


def _read(sort: int, kind: int, value: Any, depth: int) -> list[Any]:
    """What one field of an attribute holds."""
    if sort in (_FLOAT, _FLOATS):
        return [_float(number) for number in protobuf.floats(kind, value)]
    if sort in (_INT, _INTS):
        return list(protobuf.packed(kind, value))
    if kind != protobuf.BYTES:
        return []
    if sort in (_STRING, _STRINGS):
        return [protobuf.text(value)]
    if sort in (_TENSOR, _TENSORS):
        return [onnx_tensor.parse(value)]
    graph = OnnxGraph()
    _graph(value, graph, depth + 1)
    return [graph]


def _float(value: float) -> Any:
    """A number as plain JSON can hold it."""
    return value if math.isfinite(value) else {"float": str(value)}
