"""Values in blocks of channels, the layout of ONNX Runtime's CPU kernels: their number of channels,
and their names in the user's graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from whence.instrument.onnxruntime.nodes import BLOCKED, in_user_graph
from whence.instrument.onnxruntime.original_graph import OriginalGraph, channels_of

_NAMED = "_nchwc"
_SUMS = ("Add", "Sum")


class Convolution(NamedTuple):
    """A convolution with weights in blocks of channels. is_blocked: whether its input is in blocks
    too.
    """

    weight: str
    outputs: int
    inputs: int
    is_blocked: bool
    group: int


class BlockedValues(NamedTuple):
    """The blocked values of a graph. channels: number by value, 0 where unknown. names: in the
    user's graph by value, where known.
    """

    channels: dict[str, int]
    names: dict[str, str]


def blocked_values(graph: Any, original: OriginalGraph | None) -> BlockedValues:
    """The blocked values of an optimised graph. original: the user's graph, None if unknown."""
    channels: dict[str, int] = {}
    names: dict[str, str] = {}
    for node in graph.nodes:
        if node.domain == BLOCKED and node.op_type == "ReorderOutput":
            stated = int(node.attributes.get("channels", 0))
            channels[node.inputs[0]] = stated or channels.get(node.inputs[0], 0)
            result = in_user_graph(node.outputs[0])
            if original is not None and result in original.makers:
                names[node.inputs[0]] = result
            continue
        counts = [channels[v] for v in node.inputs if v in channels]
        if node.domain != BLOCKED and not counts:
            continue
        name = _name(node, names, original) if original is not None else ""
        if node.domain == BLOCKED and node.op_type in ("Conv", "ReorderInput"):
            held = exact = _held(node, graph)
            if original is not None and node.op_type == "Conv":
                exact = original.channels(name)
            count = exact[0] or held[0] or _stated(node, graph)
            data = node.inputs[0]
            if node.op_type == "Conv" and not channels.get(data, 1):
                channels[data] = exact[1] or held[1]
        elif node.op_type == "Concat":
            count = sum(counts) if all(counts) and len(counts) == len(node.inputs) else 0
        else:
            count = counts[0] if len(set(counts)) == 1 else 0
        channels.update(dict.fromkeys(filter(None, node.outputs), count))
        if name:
            names.setdefault(node.outputs[0], name)
    return BlockedValues(channels, names)


def _stated(node: Any, graph: Any) -> int:
    """Number of channels of the input of a node that reorders into blocks, as the graph states it;
    else 0.
    """
    shape = graph.shapes.get(node.inputs[0], ())
    axis = len(shape) - 1 if node.attributes.get("channels_last") else 1
    known = node.op_type == "ReorderInput" and 0 <= axis < len(shape)
    return max(shape[axis], 0) if known else 0


def _held(node: Any, graph: Any) -> tuple[int, int]:
    """Numbers of output and input channels of a convolution's weight, including the padding of the
    last block; zeros for another node. A file that was already optimised tells no more.
    """
    weight = graph.initializers.get(node.inputs[1]) if node.op_type == "Conv" else None
    return channels_of(weight.shape if weight is not None else (), node)


def convolution(
    node: Any, blocked: BlockedValues, initializers: Mapping[str, Any]
) -> Convolution | None:
    """The data needed to restore the plain layout of a node's weights, None where they already are
    plain.
    """
    if node.domain != BLOCKED or node.op_type != "Conv" or node.inputs[1] not in initializers:
        return None
    channels, data, weight = blocked.channels, node.inputs[0], node.inputs[1]
    group = int(node.attributes.get("group", 1))
    outputs = channels.get(node.outputs[0], 0)
    # depthwise: the number of groups includes the channels that pad a block
    depthwise = tuple(initializers[weight].shape[:2]) == (group, 1)
    group = outputs if depthwise and outputs else group
    return Convolution(weight, outputs, channels.get(data, 0), data in channels, group)


def _name(node: Any, names: dict[str, str], original: OriginalGraph) -> str:
    """Name of a node's result in the user's graph, "" where unknown."""
    if node.domain != BLOCKED:
        return ""
    if node.op_type == "ReorderInput":
        value = str(node.inputs[0])
        return names.get(value, value)
    # the node is named after its result before a sum and an activation were fused into it
    value = in_user_graph(str(node.name.rpartition(_NAMED)[0]))
    maker = original.makers.get(value)
    if maker is None:
        return ""
    if node.op_type != "Conv":
        return value
    if len(node.inputs) > 3 and node.inputs[3]:
        value = original.next_value(value, _SUMS)
        maker = original.makers.get(value)
    activation = str(node.attributes.get("activation", ""))
    if activation and maker is not None and maker.op_type != activation:
        value = original.next_value(value, (activation,))
    return value
