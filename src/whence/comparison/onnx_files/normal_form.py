"""A graph without what exporters and passes may write in one way or another: constants, aliases,
defaults, inputs that were attributes, fused nodes whose parts the specification gives.

Everything done here is exact, but for BatchNormalization folded into the weights before it; the
result computes what the graph does.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np

from whence.comparison.onnx_files import operator_sets as sets
from whence.comparison.onnx_files.folding import MOST, fold
from whence.comparison.onnx_files.graph import Graph, Node, Weight, held
from whence.comparison.onnx_files.lowering import lowered
from whence.dtypes import is_floating
from whence.errors import ElementsMissing
from whence.readers.encodings.onnx_tensor import dtype_of

_SMALL = 64  # elements of an input that is compared as an attribute
_NOT_AT_INFERENCE = frozenset(("momentum", "consumed_inputs", "seed", "is_test", "spatial"))
_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "Pow": 1}
_WIDEST = 3.4028234663852886e38  # the bounds of Clip where older versions state none


def has_codes(graph: Graph) -> bool:
    """Does the graph round to codes?"""
    return any("QuantizeLinear" in node.op_type for node in graph.nodes)


def normal_form(graph: Graph, *, without_codes: bool) -> Graph:
    """The graph in its normal form; `graph` stays as it is. without_codes: of a quantised graph
    the one that was quantised.
    """
    out = copy.copy(graph)
    out.nodes = [copy.copy(node) for node in graph.nodes]
    out.weights = dict(graph.weights)
    out.casts, out.quantised, out.clipped = [], [], set()
    _in_order(out)
    fold(out)
    if without_codes:
        _without_codes(out)
    _without_aliases(out)
    fold(out)
    for node in out.nodes:
        _attributes(out, node)
    out.nodes = [part for node in out.nodes for part in lowered(out, node)]
    for node in out.nodes:
        _attributes(out, node)
    _fold_norms(out)
    out.ranks = {}
    _ranks(out)
    return out


def _in_order(graph: Graph) -> None:
    """Put each node behind those that it reads from, otherwise in the order of the file: converters
    append what they add.
    """
    makers, done, ordered = graph.makers(), set[int](), list[Node]()
    for first in graph.nodes:
        stack = [first]
        while stack:
            node = stack[-1]
            waiting = [makers[v] for v in node.inputs if v in makers and id(makers[v]) not in done]
            if id(node) in done or not waiting or len(stack) > len(graph.nodes):
                stack.pop()
                if id(node) not in done:
                    done.add(id(node))
                    ordered.append(node)
            else:
                stack.append(waiting[0])
    graph.nodes = ordered


# ---- aliases


def _without_aliases(graph: Graph) -> None:
    """Leave out nodes that hand on what they read."""
    alias: dict[str, str] = {}
    left = []
    for node in graph.nodes:
        node.inputs = [alias.get(v, v) for v in node.inputs]
        if _hands_on(graph, node):
            alias[node.outputs[0]] = node.inputs[0]
        else:
            left.append(node)
    graph.nodes = left
    graph.outputs = [alias.get(v, v) for v in graph.outputs]


def _hands_on(graph: Graph, node: Node) -> bool:
    if node.op_type == "Identity":
        return True
    if node.op_type == "Dropout":
        mode = node.inputs[2] if len(node.inputs) > 2 else ""
        if any(node.outputs[1:]):
            return False
        return not mode or (mode in graph.weights and not _any(graph.weights[mode]))
    if node.op_type == "Transpose":
        order = node.attributes.get("perm")
        return order is not None and list(order) == list(range(len(order)))
    if node.op_type == "Concat":
        return len(node.inputs) == 1
    if node.op_type in _NEUTRAL:
        return _is_neutral(graph, node)
    if node.op_type != "Cast":
        return False
    to, source = dtype_of(node.attributes.get("to", 0)), graph.dtypes.get(node.inputs[0])
    if to == source:
        return True
    if is_floating(to) and (source is None or is_floating(source)):
        graph.casts.append(to)
        return True
    return False


def _is_neutral(graph: Graph, node: Node) -> bool:
    """Does it add a zero, or multiply with a one?"""
    weight = graph.weights.get(node.inputs[1])
    if weight is None or np.prod(weight.shape, dtype=np.int64) != 1 or len(weight.shape) > 1:
        return False
    numbers = _numbers(weight)
    return numbers is not None and numbers == [_NEUTRAL[node.op_type]]


def _any(weight: Weight) -> bool:
    array = weight.elements()
    return array is None or bool(np.any(array))


# ---- codes


def _without_codes(graph: Graph) -> None:
    """Weights that are stored as codes become what the codes stand for; values that are rounded to
    codes and back become what they were.
    """
    makers, alias = graph.makers(), dict[str, str]()
    left = []
    for node in graph.nodes:
        node.inputs = [alias.get(v, v) for v in node.inputs]
        if node.op_type.removeprefix("com.microsoft.") != "DequantizeLinear":
            left.append(node)
            continue
        source = node.inputs[0]
        maker = makers.get(source)
        if source in graph.weights:
            weight = decoded(graph, node)
            if weight is None:
                left.append(node)
            else:
                graph.weights[node.outputs[0]] = weight
        elif maker is not None and "QuantizeLinear" in maker.op_type:
            alias[node.outputs[0]] = maker.inputs[0]
            graph.quantised.append(node.name)
            if _has_no_negative(graph, maker):
                graph.clipped.add(maker.inputs[0])
        else:
            left.append(node)
    graph.nodes = left
    graph.outputs = [alias.get(v, v) for v in graph.outputs]


def _has_no_negative(graph: Graph, node: Node) -> bool:
    """Do the codes that a QuantizeLinear makes begin at zero? It then is a Relu, too."""
    zero = graph.weights.get(node.inputs[2]) if len(node.inputs) > 2 else None
    if zero is None:
        return len(node.inputs) < 3  # uint8 from 0 on
    least = {"uint8": 0, "int8": -128, "uint16": 0, "int16": -32768}.get(zero.dtype)
    array = zero.elements()
    return least is not None and array is not None and bool(np.all(array == least))


def decoded(graph: Graph, node: Node) -> Weight | None:
    """What the codes of a weight stand for."""
    operands = [graph.weights.get(v) for v in node.inputs[:3]]
    codes, scale = operands[0], operands[1] if len(operands) > 1 else None
    if codes is None or scale is None or node.attributes.get("block_size"):
        return None
    zero = operands[2] if len(operands) > 2 else None
    axis = int(node.attributes.get("axis", 1))

    def form(weight: Weight) -> Any:
        array = weight.load()
        if array.size == 1:
            return array.reshape(())
        if array.ndim != 1:
            return array
        shape = [1] * len(codes.shape)
        shape[axis] = -1
        return array.reshape(shape)

    def load() -> Any:
        offset = form(zero).astype(np.int64) if zero is not None else 0
        steps = (codes.load().astype(np.int64) - offset).astype(np.float64) * form(scale)
        return steps.astype(np.float32)

    try:
        step = np.asarray(form(scale), np.float64)
    except (ElementsMissing, ValueError, IndexError):
        return None
    return Weight(codes.name, scale.dtype, codes.shape, load, step, "decoded")


# ---- attributes


def _ranks(graph: Graph) -> None:
    """Work out how many axes values have whose shape the file does not state."""
    for node in graph.nodes:
        known = [graph.rank(v) for v in node.inputs if v]
        values, rank = node.attributes, known[0] if known else None
        if node.op_type in sets.COMMUTE or node.op_type in ("Sub", "Div", "Pow", "MatMul", "Where"):
            counts = [n for n in known if n is not None]
            rank = max(counts) if len(counts) == len(known) and counts else None
        elif node.op_type == "Reshape":
            rank = len(values["shape"]) if "shape" in values else None
        elif node.op_type == "Transpose" and values.get("perm"):
            rank = len(values["perm"])
        elif node.op_type.startswith("Reduce"):
            axes = values.get("axes")
            if not values.get("keepdims", 1):
                rank = rank - len(axes) if rank is not None and axes else None
        elif node.op_type not in sets.KEEPS_RANK:
            rank = None
        if rank is not None and node.outputs:
            graph.ranks.setdefault(node.outputs[0], rank)


def _attributes(graph: Graph, node: Node) -> None:
    """State what the node takes for granted, in one form."""
    stated = {k: v for k, v in node.attributes.items() if k not in _NOT_AT_INFERENCE}
    for place, name in sets.INPUT_WAS.get(node.op_type, {}).items():
        if place < len(node.inputs) and node.inputs[place] in graph.weights:
            values = _numbers(graph.weights[node.inputs[place]])
            if values is not None:
                stated[name] = values
                node.inputs[place] = ""
        elif name in stated and not isinstance(stated[name], (list, str)):
            stated[name] = [stated[name]]
    while node.inputs and not node.inputs[-1]:
        node.inputs.pop()
    own = sets.OF_GEMM.get(node.op_type) or sets.DEFAULTS.get(node.op_type, {})
    defaults = dict(own)
    if node.op_type in ("Softmax", "LogSoftmax", "Hardmax"):
        defaults["axis"] = sets.last_axis_default(node.op_type, node.opset)
    node.attributes = {**defaults, **_of_form(graph, node), **stated}
    _in_one_form(node)


def _numbers(weight: Weight) -> list[Any] | None:
    """The elements of a small tensor."""
    small = np.prod(weight.shape, dtype=np.int64) <= _SMALL
    array = weight.elements() if small else None
    if array is None:
        return None
    return [float(x) if is_floating(weight.dtype) else x for x in array.reshape(-1).tolist()]


def _of_form(graph: Graph, node: Node) -> dict[str, Any]:
    """What a node takes from the form of its weight or window, where it does not state it."""
    stated = node.attributes
    kernel = stated.get("kernel_shape")
    if node.op_type in ("Conv", "ConvTranspose", "FusedConv", "com.microsoft.FusedConv"):
        weight = graph.weights.get(node.inputs[1]) if len(node.inputs) > 1 else None
        if kernel is None and weight is not None:
            kernel = list(weight.shape[2:])
    elif node.op_type not in ("MaxPool", "AveragePool", "LpPool"):
        weight = graph.weights.get(node.inputs[2]) if len(node.inputs) > 2 else None
        if node.op_type in ("LSTM", "GRU", "RNN") and weight is not None and weight.shape:
            return {"hidden_size": weight.shape[-1]}
        return {}
    if not kernel:
        return {}
    ones = [1] * len(kernel)
    return {
        "kernel_shape": list(kernel), "strides": ones, "dilations": ones,
        "pads": [0] * 2 * len(kernel),
    }  # fmt: skip


def _in_one_form(node: Node) -> None:
    values = node.attributes
    axes = values.get("axes")
    if isinstance(axes, list) and node.op_type != "Slice":
        values["axes"] = sorted(axes)
    if values.get("axes"):
        values.pop("noop_with_empty_axes", None)
    if node.op_type == "Clip":
        for name in ("min", "max"):
            if name in values and abs(float(values[name][0])) >= _WIDEST:
                values.pop(name)
    if node.op_type == "Reshape" and 0 not in values.get("shape", [0]):
        values.pop("allowzero", None)
    if node.op_type == "Pad" and values.get("value") in ([0], [0.0], [False]):
        values.pop("value")
    if node.op_type == "Slice":
        values["steps"] = values.get("steps") or [1] * len(values.get("starts", ()))
        _open_ends(values)


def _open_ends(values: dict[str, Any]) -> None:
    """Ends far behind any tensor are one."""
    ends, far = values.get("ends"), 1 << 30
    if isinstance(ends, list):
        values["ends"] = [max(min(n, far), -far) if isinstance(n, int) else n for n in ends]


# ---- normalisation folded into weights


def _fold_norms(graph: Graph) -> None:
    """BatchNormalization behind a convolution, into the weight and bias of that."""
    readers = Counter(v for node in graph.nodes for v in node.inputs) + Counter(graph.outputs)
    makers, left = graph.makers(), []
    for node in graph.nodes:
        conv = makers.get(node.inputs[0]) if node.op_type == "BatchNormalization" else None
        if conv is None or conv.op_type != "Conv" or readers[node.inputs[0]] != 1:
            left.append(node)
            continue
        if not _folded_into(graph, conv, node):
            left.append(node)
    graph.nodes = left


def _folded_into(graph: Graph, conv: Node, norm: Node) -> bool:
    """Scale the convolution's weight as the norm does; False where they are not all constant."""
    names = [*norm.inputs[1:5], *conv.inputs[1:3]]
    weights = [graph.weights.get(v) for v in names]
    if None in weights or len(norm.inputs) != 5 or any(norm.outputs[1:]):
        return False
    held_all = [w for w in weights if w is not None]
    if sum(np.prod(w.shape, dtype=np.float64) for w in held_all) > MOST:
        return False
    try:
        arrays = [w.load().astype(np.float64) for w in held_all]
    except ElementsMissing:
        return False
    gamma, beta, mean, variance, kernel = arrays[:5]
    bias = arrays[5] if len(arrays) > 5 else np.zeros_like(mean)
    factor = gamma / np.sqrt(variance + norm.attributes["epsilon"])
    scaled = kernel * factor.reshape(-1, *[1] * (kernel.ndim - 1))
    name, kind = conv.inputs[1], held_all[4].load().dtype
    folded = {
        f"{name}": scaled,
        f"{name} bias": (bias - mean) * factor + beta,
    }
    for new, array in folded.items():
        key = f"{new} with {norm.name}"
        graph.weights[key] = held(name, array.astype(kind), "folded")
    conv.inputs = [conv.inputs[0], *(f"{new} with {norm.name}" for new in folded)]
    conv.outputs = [norm.outputs[0]]
    return True
