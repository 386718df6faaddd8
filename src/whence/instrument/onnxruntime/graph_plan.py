"""The graph that a session runs, as calls of it will be written: one form a node, worked out once.

A value has one name in a graph, and passes of the runtime mostly keep the name of what a group of
nodes computes: a node is called after its first output, as operators of Paddle are.

What values that the runtime named itself are called in the user's graph: those that hold the
elements of a value of it in another form, before or behind a node that only moves or casts them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import msgspec

from whence.frameworks import host
from whence.frameworks.onnx_names import outer_values, scope_of
from whence.instrument.engines.watched import NodeForm as CommonForm
from whence.instrument.onnxruntime.blocked_values import (
    BlockedValues,
    Convolution,
    blocked_values,
    convolution,
)
from whence.instrument.onnxruntime.nodes import (
    BLOCKED,
    all_nodes,
    in_user_graph,
    is_random,
    module_of,
    op_type_of,
    source_of,
)
from whence.instrument.onnxruntime.original_graph import OriginalGraph, names_of
from whence.records.marks import Mark, mark

_OF_CODES = ("DequantizeLinear", "QuantizeLinear")
_LARGEST = 4096  # elements of an attribute that are written down


class NodeForm(CommonForm, frozen=True):
    """With the convolution that a node is, where its channels lie in blocks."""

    convolution: Convolution | None


class GraphPlan(NamedTuple):
    """The nodes of a graph in order of execution. blocked: number of channels of the values in
    blocks of channels (0 where unknown). draws: types of nodes that draw random numbers. constants:
    values that nodes compute from initialisers alone; these nodes are left out (folded: their
    number), and their values become parameters of the nodes that read them, as if a pass had folded
    them.
    """

    nodes: tuple[NodeForm, ...]
    blocked: dict[str, int]
    draws: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: frozenset[str]
    folded: int


def planned(model: Any, original: Any, array_of: Callable[[Any], Any]) -> GraphPlan:
    """The plan of a graph. model: as the session runs it. original: as in the user's file, None if
    unreadable. array_of: returns the elements of a tensor attribute.
    """
    graph = model.graph
    source = OriginalGraph(original) if original is not None else None
    blocked = blocked_values(graph, source)
    names, owners = blocked.names, dict[str, str]()
    if source is not None:
        names = _moved_names(graph, source) | names
        owners = _inlined(graph, source)
    constants: set[str] = set()
    held = {*graph.initializers, *graph.sparse}
    nodes = []
    for node in graph.nodes:
        if _is_constant(node, held, graph.outputs):
            constants.update(filter(None, node.outputs))
            held |= constants
        else:
            form = _form(node, model, held, source, blocked, names, array_of)
            owner = owners.get(node.outputs[0], "")
            nodes.append(
                msgspec.structs.replace(form, origins=(scope_of(owner),)) if owner else form
            )
    return GraphPlan(
        tuple(nodes),
        blocked.channels,
        tuple(dict.fromkeys(node.op_type for node in all_nodes(graph) if is_random(node))),
        tuple(graph.outputs),
        frozenset(constants),
        len(graph.nodes) - len(nodes),
    )


def _is_constant(node: Any, held: Collection[str], outputs: Collection[str]) -> bool:
    """Whether a node computes values for other nodes from initialisers alone. Dequantisation of
    weights does not count, so that the quantised weights are recorded.
    """
    return (
        not node.domain
        and not node.graphs
        and not is_random(node)
        and node.op_type not in _OF_CODES
        and all(value in held for value in node.inputs if value)
        and not any(value in outputs for value in node.outputs)
    )


def _form(
    node: Any,
    model: Any,
    parameters: Collection[str],
    source: OriginalGraph | None,
    blocked: BlockedValues,
    names: dict[str, str],
    array_of: Callable[[Any], Any],
) -> NodeForm:
    inputs = [(f"input.{k}", v) for k, v in enumerate(node.inputs) if v and v not in parameters]
    outer = [v for v in outer_values(node) if v not in parameters]
    inputs += [(f"input.outer.{v}", v) for v in outer if v not in node.inputs]
    held = [(k, v) for k, v in enumerate(node.inputs) if v in parameters]
    outputs = [(f"output.{k}", v) for k, v in enumerate(node.outputs) if v]
    notes = [mark(Mark.OPSET, version)] if (version := model.opsets.get(node.domain)) else []
    if node.graphs:
        notes.insert(0, mark(Mark.HIDDEN, f"{node.op_type}: "))
    notes += [mark(Mark.TAKES, f"{v} as {k}") for k, v in held]
    arguments = {name: _plain(v, array_of) for name, v in node.attributes.items()}
    arguments |= {name: {"graph": True} for name in node.graphs}
    blocks = convolution(node, blocked, model.graph.initializers)
    if blocks is not None and "group" in arguments:
        arguments["group"] = blocks.group
    makes = [blocked.names.get(v, in_user_graph(v)) for _, v in outputs]
    scope = scope_of(makes[0]) if makes else node.name or node.op_type
    origins: tuple[str, ...] = ()
    where = source_of(node)
    is_reordered = node.domain == BLOCKED and node.op_type.startswith("Reorder")
    if is_reordered:
        scope = f"{scope}.{node.op_type}"
    if source is not None:
        makes = [names.get(v, in_user_graph(v)) for _, v in outputs]
        members = source.members(makes, {names.get(v, in_user_graph(v)) for _, v in inputs})
        where = where or source.source(makes, members)
        # one alone of the same name is the node itself
        if not is_reordered and names_of(members) != (scope,):
            origins = names_of(members)
    maker = source.makers.get(makes[0]) if source is not None and makes else node
    if maker is not None and (module := module_of(maker)):
        notes.append(mark(Mark.OF_MODULE, module))
    return NodeForm(
        op_type_of(node),
        scope,
        where,
        arguments,
        tuple(notes),
        origins,
        tuple(inputs),
        tuple((f"param.{v}", v) for v in dict.fromkeys(v for _, v in held)),
        tuple(outputs),
        _shape_slot(node, held),
        blocks,
    )


def _shape_slot(node: Any, held: list[tuple[int, str]]) -> str:
    if node.op_type != "Reshape" or node.domain or node.attributes.get("allowzero"):
        return ""
    return next((f"param.{v}" for k, v in held if k == 1), "")


def _plain(value: Any, array_of: Callable[[Any], Any]) -> Any:
    """An attribute as plain JSON. A tensor is given by its elements, a large one by its hash."""
    if isinstance(value, list):
        return [_plain(item, array_of) for item in value]
    if value is None or isinstance(value, (bool, int, float, str, dict)):
        return value
    form: dict[str, Any] = {"dtype": value.dtype, "shape": list(value.shape)}
    array = array_of(value)
    if array is None:
        return form
    if array.size > _LARGEST:
        return form | {"hash": host.digest(array.reshape(-1).view("u1")).hex()}
    return form | {"values": [_number(v) for v in array.reshape(-1).tolist()]}


def _number(value: Any) -> Any:
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return {"float": str(value)}
    return value


_SHAPES = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
_INLINED = "_inlfunc_"
"""Prefix of the runtime's names of values inside a function."""
_MOVES = _SHAPES | {"Cast"}


def _moved_names(graph: Any, original: OriginalGraph) -> dict[str, str]:
    """Names in the user's graph for values that the runtime named: those with the same elements as
    a value of the user's, before or after a node that only reshapes or casts.
    """
    known = {*original.makers, *graph.inputs}
    names: dict[str, str] = {}
    moves = [
        node
        for node in graph.nodes
        if node.op_type in _MOVES and not node.domain and node.inputs and node.inputs[0]
    ]
    for node in moves:
        source, result = node.inputs[0], node.outputs[0]
        if result not in known and (source in known or source in names):
            names[result] = names.get(source, source)
    for node in reversed(moves):
        source, result = node.inputs[0], node.outputs[0]
        if source in known or source in names or source in graph.initializers:
            continue
        maker = original.makers.get(names.get(result, result))
        if maker is not None and maker.op_type != node.op_type:
            names[source] = names.get(result, result)
        elif maker is not None and node.op_type in _SHAPES:
            # two changes of shape have become one: what the user's own reads has the same elements
            names[source] = maker.inputs[0]
    return names


def _inlined(graph: Any, original: OriginalGraph) -> dict[str, str]:
    """Maps each value that the runtime created when it inlined a function to the value of the
    user's graph that it leads to.
    """
    owners: dict[str, str] = {}
    for node in reversed(graph.nodes):
        result = in_user_graph(node.outputs[0])
        owner = result if result in original.makers else owners.get(node.outputs[0], "")
        for value in node.inputs:
            if in_user_graph(value).startswith(_INLINED) and owner:
                owners[value] = owner
    return owners
