"""A graph of ONNX nodes with its weights, as the comparison of two files works on it: made of a
model's file, or of a captured session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from whence import dtypes
from whence.align.quantised.operands import domain_of, operands
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.readers.encodings.onnx_model import OnnxGraph, OnnxModel, OnnxNode
from whence.readers.encodings.onnx_tensor import OnnxTensor
from whence.readers.formats import onnx_model
from whence.readers.source import Place
from whence.records import Call, Run, in_order
from whence.records.marks import Mark, mark_value
from whence.records.slots import is_param, param_name, split_slot

_ATTRIBUTE_OF_CONSTANT = {
    "value_float": np.float32, "value_floats": np.float32,
    "value_int": np.int64, "value_ints": np.int64,
}  # fmt: skip


@dataclass(slots=True, eq=False)
class Weight:
    """A tensor that the graph holds. load: its elements; raises ElementsMissing. step: of a weight
    that is stored as codes, how far apart two codes are, broadcastable to it. how: what was done to
    get it from what the file holds, "" where nothing was.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Array]
    step: Array | None = None
    how: str = ""

    def elements(self) -> Array | None:
        """Its elements, None where they are not there."""
        try:
            return self.load()
        except ElementsMissing:
            return None


@dataclass(slots=True, eq=False)
class Node:
    """A node. op_type: with its domain, where that is not ONNX's own. name: as calls of runs have
    it. place: its number in the run, -1 of one that a rewriting made. said: the type that the file
    has. inputs, outputs: names of values, "" where an optional one is absent; behind the inputs
    come the values of this graph that graphs inside of the node read.
    """

    op_type: str
    name: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)
    inner: dict[str, list[OnnxGraph]] = field(default_factory=dict)
    opset: int = 0
    place: int = -1
    said: str = ""


@dataclass(slots=True)
class Graph:
    """Nodes in an order in which they can run. shapes, ranks: of values, as far as they are known.
    functions: a hash of each that the model defines, by name. casts: floating types that values are
    cast to on the way. quantised: nodes that bring values back from codes; ranges: of values that
    are rounded to codes, the least and the largest number of these.
    """

    path: str
    nodes: list[Node] = field(default_factory=list)
    weights: dict[str, Weight] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    opsets: dict[str, int] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    casts: list[str] = field(default_factory=list)
    quantised: list[str] = field(default_factory=list)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)

    def rank(self, value: str) -> int | None:
        """How many axes a value has, None where that is not known."""
        if value in self.weights:
            return len(self.weights[value].shape)
        return len(self.shapes[value]) if value in self.shapes else self.ranks.get(value)

    def precision(self) -> str:
        """The floating type of most weights, "" without any."""
        counts = Counter(w.dtype for w in self.weights.values() if dtypes.is_floating(w.dtype))
        return counts.most_common(1)[0][0] if counts else ""

    def living(self) -> set[int]:
        """Nodes that an output depends on, by identity."""
        needed, alive = set(self.outputs), set[int]()
        for node in reversed(self.nodes):
            if node.inner or any(v in needed for v in node.outputs if v):
                needed.update(node.inputs)
                alive.add(id(node))
        return alive

    def makers(self) -> dict[str, Node]:
        """The node that makes a value."""
        return {value: node for node in self.nodes for value in node.outputs if value}


# ---- a file


def of_file(run: Run) -> Graph:
    """The graph of a run that a model's file was opened as."""
    place = Place(Path(run.path))
    model = onnx_model.described(place)
    places = {(c.scope, c.occurrence): c.id for c in run.calls}
    return of_model(model, model.graph, place.inside, run.path, places)


def of_model(
    model: OnnxModel,
    graph: OnnxGraph,
    inside: Callable[[str], Path],
    path: str,
    places: Mapping[tuple[str, int], int] = {},
) -> Graph:
    """A graph of a model, its own or one inside of a node. places: numbers of calls by name and how
    many came before.
    """
    from whence.frameworks.onnx_names import outer_values, scope_of

    result = Graph(
        path,
        outputs=list(graph.outputs),
        shapes=dict(graph.shapes),
        dtypes=dict(graph.dtypes),
        opsets=dict(model.opsets),
        functions=dict(model.bodies),
    )
    result.weights = {n: _weight(n, t, inside) for n, t in graph.initializers.items()}
    for name in graph.sparse:
        result.weights[name] = Weight(name, "undefined", (), partial(_missing, "it is sparse"))
    result.inputs = [name for name in graph.inputs if name not in result.weights]
    seen: dict[str, int] = {}
    for node in graph.nodes:
        constant = _constant(node, inside)
        if constant is not None:
            result.weights[node.outputs[0]] = constant
            continue
        outputs = [v for v in node.outputs if v]
        name = scope_of(outputs[0]) if outputs else node.name or node.op_type
        number = seen[name] = seen.get(name, -1) + 1
        op_type = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        result.nodes.append(
            Node(
                op_type,
                name,
                [*node.inputs, *outer_values(node)],
                list(node.outputs),
                {key: _attribute(value, inside) for key, value in node.attributes.items()},
                dict(node.graphs),
                model.opsets.get(node.domain, 0),
                places.get((name, number), -1),
                op_type,
            )
        )
    return result


def _weight(name: str, tensor: OnnxTensor, inside: Callable[[str], Path]) -> Weight:
    why = tensor.why()
    load = partial(_missing, why) if why else partial(tensor.array, inside)
    return Weight(name, tensor.dtype, tensor.shape, load)


def _missing(why: str) -> Array:
    raise ElementsMissing(why)


def _constant(node: OnnxNode, inside: Callable[[str], Path]) -> Weight | None:
    """What a Constant node holds; None of another node, or of a text."""
    if node.op_type != "Constant" or node.domain or not node.outputs:
        return None
    tensor = onnx_model.constant_of(node)
    if tensor is not None:
        return _weight(node.outputs[0], tensor, inside)
    for key, kind in _ATTRIBUTE_OF_CONSTANT.items():
        if key in node.attributes:
            return held(node.outputs[0], np.asarray(node.attributes[key], kind))
    return None


def held(name: str, array: Array, how: str = "") -> Weight:
    """A weight whose elements are in memory."""
    return Weight(name, dtypes.of(array).name, tuple(array.shape), lambda: array, how=how)


def _attribute(value: Any, inside: Callable[[str], Path]) -> Any:
    """An attribute as it is compared: tensors by their elements."""
    if isinstance(value, list):
        return [_attribute(item, inside) for item in value]
    if not isinstance(value, OnnxTensor):
        return value
    try:
        array = value.array(inside)
    except ElementsMissing as error:
        return {"tensor": str(error)}
    return {"dtype": value.dtype, "shape": list(value.shape), "values": array.reshape(-1).tolist()}


# ---- a capture


def is_session(run: Run) -> bool:
    """Was the run captured of ONNX Runtime, or another engine whose calls are ONNX nodes?"""
    return any(c.leaf and mark_value(c, Mark.OPSET) for c in run.calls)


def of_session(run: Run) -> Graph:
    """The graph of the first step of the first session that a run holds. Initialisers lie in it as
    parameters, constants that were folded too.
    """
    calls = [c for c in run.calls if c.leaf and mark_value(c, Mark.OPSET)]
    first = min(calls, key=lambda c: c.order)
    calls = [c for c in calls if (c.root, c.step, c.rank) == (first.root, first.step, first.rank)]
    graph = Graph(run.path)
    for call in in_order(calls):
        graph.nodes.append(_node(run, call, graph))
    written = {v for node in graph.nodes for v in node.outputs}
    read = {v for node in graph.nodes for v in node.inputs}
    root = next(
        c for c in run.calls if c.root == first.root and c.step == first.step and not c.leaf
    )
    graph.inputs = [_value(r.record) for r in root.slots("input")]
    graph.inputs += sorted(read - written - {*graph.weights, *graph.inputs, ""})
    graph.outputs = [_value(r.record) for r in root.slots("output")]
    return graph


def _node(run: Run, call: Call, graph: Graph) -> Node:
    inputs: dict[int, str] = {}
    for place, ref in operands(call).items():
        if is_param(ref.slot):
            name, form = param_name(ref.slot), run.records[ref.record]
            load = partial(run.array, ref.record)
            graph.weights[name] = Weight(name, form.dtype, form.shape, load)
        else:
            name = _value(ref.record)
            _remember(run, graph, name, ref.record)
        inputs[place] = name
    outputs: dict[int, str] = {}
    for ref in call.slots("output"):
        outputs[int(split_slot(ref.slot)[1])] = _value(ref.record)
        _remember(run, graph, _value(ref.record), ref.record)
    op_type = call.op_type
    version = mark_value(call, Mark.OPSET)
    if version.isdigit():
        graph.opsets.setdefault(domain_of(op_type), int(version))
    return Node(
        op_type,
        call.scope,
        [inputs.get(k, "") for k in range(max(inputs, default=-1) + 1)],
        [outputs.get(k, "") for k in range(max(outputs, default=-1) + 1)],
        {k: v for k, v in call.arguments.items() if v != {"graph": True}},
        opset=int(version) if version.isdigit() else 0,
        place=call.id,
        said=op_type,
    )


def _remember(run: Run, graph: Graph, value: str, record: int) -> None:
    graph.shapes[value] = run.records[record].shape
    graph.dtypes[value] = run.records[record].dtype


def _value(record: int) -> str:
    """What a value of a capture is called: it has no name, but a record."""
    return f"#{record}"
