"""A graph without what exporters and passes may write in one way or another: constants, aliases,
defaults, inputs that were attributes, fused nodes whose parts the specification gives.

Everything done here is exact, but for BatchNormalization folded into the weights before it; the
result computes what the graph does.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whence import dtypes
from whence.comparison.onnx_files import operator_sets as sets
from whence.comparison.onnx_files.graph import Graph, Node, Weight, held
from whence.dtypes import Array, is_floating
from whence.errors import ElementsMissing
from whence.readers.encodings.onnx_tensor import dtype_of

_SMALL = 64  # elements of an input that is compared as an attribute
_NOT_AT_INFERENCE = frozenset(("momentum", "consumed_inputs", "seed", "is_test", "spatial"))
_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "Pow": 1}
_WIDEST = 3.4028234663852886e38  # the bounds of Clip where older versions state none


def has_codes(graph: Graph) -> bool:
    """Does the graph round to codes?"""
    return any("QuantizeLinear" in node.op_type for node in graph.nodes)


def normal_form(graph: Graph, other: Graph, *, without_codes: bool) -> Graph:
    """The graph in its normal form; `graph` stays as it is. other: the one that it is compared
    with: what both hold is left as it stands, so that its weights are compared in the dtypes of the
    files. without_codes: of a quantised graph the one that was quantised.
    """
    out = copy.copy(graph)
    out.nodes = [copy.copy(node) for node in graph.nodes]
    out.weights = dict(graph.weights)
    out.casts, out.quantised, out.ranges = [], [], {}
    _in_order(out)
    fold(out)
    if without_codes:
        _without_codes(out)
    _without_aliases(out, other)
    fold(out)
    for node in out.nodes:
        _attributes(out, node)
    out.nodes = [part for node in out.nodes for part in lowered(out, node)]
    for node in out.nodes:
        _attributes(out, node)
    if _norms(graph) != _norms(other):
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


def _without_aliases(graph: Graph, other: Graph) -> None:
    """Leave out nodes that hand on what they read."""
    alias: dict[str, str] = {}
    left = []
    for node in graph.nodes:
        node.inputs = [alias.get(v, v) for v in node.inputs]
        if _hands_on(graph, other, node):
            alias[node.outputs[0]] = node.inputs[0]
        else:
            left.append(node)
    graph.nodes = left
    graph.outputs = [alias.get(v, v) for v in graph.outputs]


def _hands_on(graph: Graph, other: Graph, node: Node) -> bool:
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
        is_kept = node.inputs[1] in other.weights and not _is_neutral(other, node)
        return _is_neutral(graph, node) and not is_kept
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
            graph.ranges[maker.inputs[0]] = _span(graph, maker)
        else:
            left.append(node)
    graph.nodes = left
    graph.outputs = [alias.get(v, v) for v in graph.outputs]


def _span(graph: Graph, node: Node) -> tuple[float, float]:
    """The least and the largest number that a QuantizeLinear's codes stand for, to which it clips.
    It is infinite where that is not known.
    """
    scale, zero = map(graph.weights.get, (*node.inputs[1:3], "")[:2])
    steps = scale.elements() if scale is not None else None
    middle = zero.elements() if zero is not None else np.zeros(1, np.uint8)
    if steps is None or middle is None or middle.dtype.name not in _ENDS:
        return -math.inf, math.inf
    least, largest = (
        (end - middle.astype(np.float64)) * steps.astype(np.float64)
        for end in _ENDS[middle.dtype.name]
    )
    return float(np.min(least)), float(np.max(largest))


_ENDS = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}


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


def _norms(graph: Graph) -> int:
    return sum(node.op_type == "BatchNormalization" for node in graph.nodes)


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


# Fused nodes as the plain ones that they stand for, as the specifications of ONNX and of ONNX
# Runtime's own operators write them out; nodes that have no other form stay.

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


# Nodes whose result the file decides: what they make of weights, element by element, and of
# extents that are known.
#
# Only what moves elements or rounds as the standard says is computed, so that the result is the
# one that any engine would have folded.

MOST = 1 << 22
"""Elements of what is folded; a transposed weight may be larger: it is made when asked for."""

Fold = Callable[[Node, list[Any]], Any]


def fold(graph: Graph) -> None:
    """Turn nodes into weights, as far as the file decides what they make. Changes the graph."""
    left = []
    for node in graph.nodes:
        value = _made(graph, node)
        if value is None:
            left.append(node)
        else:
            graph.weights[node.outputs[0]] = value
    graph.nodes = left


def _made(graph: Graph, node: Node) -> Weight | None:
    """The weight that a node makes; None where the file does not decide it."""
    if len([v for v in node.outputs if v]) != 1 or node.inner:
        return None
    name = node.outputs[0]
    if node.op_type == "Shape":
        shape = _known_shape(graph, node.inputs[0])
        if shape is None:
            return None
        part = slice(node.attributes.get("start", 0), node.attributes.get("end"))
        return held(name, np.asarray(shape[part], np.int64))
    if node.op_type not in _FOLDS and node.op_type != "Transpose":
        return None
    if not all(v in graph.weights for v in node.inputs if v):
        return None
    weights = [graph.weights[v] if v else None for v in node.inputs]
    if node.op_type == "Transpose" and weights and weights[0] is not None:
        return transposed(name, weights[0], node.attributes.get("perm"))
    if sum(_size(w) for w in weights if w is not None) > MOST:
        return None
    try:
        arrays = [w.load() if w is not None else None for w in weights]
        with np.errstate(all="ignore"):
            result = np.asarray(_FOLDS[node.op_type](node, arrays))
    except (ElementsMissing, ValueError, IndexError, TypeError, KeyError, ZeroDivisionError):
        return None
    return held(name, result) if result.size <= MOST else None


def transposed(name: str, weight: Weight, order: Sequence[int] | None = None) -> Weight:
    """A weight with its axes in another order, reversed without one."""
    axes = tuple(order) if order is not None else tuple(reversed(range(len(weight.shape))))
    shape = tuple(weight.shape[i] for i in axes)
    step = weight.step
    if step is not None and step.ndim == len(axes):
        step = step.transpose(axes)
    words = "" if axes == tuple(range(len(axes))) else "transposed"
    if weight.how == words:  # there and back
        words = ""
    return Weight(
        weight.name or name, weight.dtype, shape, lambda: weight.load().transpose(axes), step, words
    )


def _known_shape(graph: Graph, value: str) -> tuple[int, ...] | None:
    shape = graph.weights[value].shape if value in graph.weights else graph.shapes.get(value)
    return shape if shape is not None and all(n >= 0 for n in shape) else None


def _size(weight: Weight) -> int:
    return int(np.prod(weight.shape, dtype=np.float64))


def _axes(node: Node, arrays: Sequence[Any]) -> list[int] | None:
    if len(arrays) > 1 and arrays[1] is not None:
        return [int(n) for n in np.asarray(arrays[1]).reshape(-1)]
    axes = node.attributes.get("axes")
    return None if axes is None else [int(n) for n in axes]


def _unsqueeze(node: Node, arrays: list[Any]) -> Array:
    axes = _axes(node, arrays) or []
    rank = arrays[0].ndim + len(axes)
    out: Array = arrays[0]
    for axis in sorted(a % rank for a in axes):
        out = np.expand_dims(out, axis)
    return out


def _squeeze(node: Node, arrays: list[Any]) -> Array:
    axes = _axes(node, arrays)
    return np.asarray(np.squeeze(arrays[0], None if axes is None else tuple(axes)))


def _reshape(node: Node, arrays: list[Any]) -> Array:
    shape = arrays[1] if len(arrays) > 1 else node.attributes["shape"]
    old = arrays[0].shape
    keeps = not node.attributes.get("allowzero")
    new = [old[i] if not n and keeps else int(n) for i, n in enumerate(np.asarray(shape).tolist())]
    return np.asarray(arrays[0].reshape(new))


def _slice(node: Node, arrays: list[Any]) -> Array:
    stated = [node.attributes.get(name) for name in ("starts", "ends", "axes", "steps")]
    if len(arrays) > 1:
        stated = [None if a is None else a.tolist() for a in arrays[1:]] + [None] * 4
    starts, ends = list(stated[0] or ()), list(stated[1] or ())
    axes = list(stated[2] or range(len(starts)))
    steps = list(stated[3] or [1] * len(starts))
    cut = [slice(None)] * arrays[0].ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        stop = None if step < 0 and end < -arrays[0].shape[axis] else end
        cut[axis] = slice(start, stop, step)
    return np.asarray(arrays[0][tuple(cut)])


def _cast(node: Node, arrays: list[Any]) -> Array:
    return np.asarray(arrays[0].astype(dtypes.named(dtype_of(node.attributes["to"])).numpy))


def _of_shape(node: Node, arrays: list[Any]) -> Array:
    value = node.attributes.get("value")
    if value is None:
        return np.zeros(arrays[0].tolist(), np.float32)
    kind = dtypes.named(value["dtype"]).numpy
    return np.full(arrays[0].tolist(), value["values"][0]).astype(kind)


def _expand(node: Node, arrays: list[Any]) -> Array:
    return np.asarray(arrays[0] * np.ones(arrays[1].tolist(), arrays[0].dtype))


def _divide(node: Node, arrays: list[Any]) -> Array:
    a, b = arrays
    if a.dtype.kind not in "iu":
        return np.asarray(a / b)
    return np.asarray(np.trunc(a / b).astype(a.dtype))


def _gather(node: Node, arrays: list[Any]) -> Array:
    return np.asarray(np.take(arrays[0], arrays[1], axis=node.attributes.get("axis", 0)))


def _range(node: Node, arrays: list[Any]) -> Array:
    start, stop, step = (a.item() for a in arrays)
    return np.arange(start, stop, step).astype(arrays[0].dtype)


_FOLDS: dict[str, Fold] = {
    "Add": lambda node, a: a[0] + a[1],
    "Cast": _cast,
    "Concat": lambda node, a: np.concatenate(a, node.attributes["axis"]),
    "ConstantOfShape": _of_shape,
    "Div": _divide,
    "Equal": lambda node, a: a[0] == a[1],
    "Expand": _expand,
    "Gather": _gather,
    "Greater": lambda node, a: a[0] > a[1],
    "Less": lambda node, a: a[0] < a[1],
    "LessOrEqual": lambda node, a: a[0] <= a[1],
    "Mul": lambda node, a: a[0] * a[1],
    "Neg": lambda node, a: -a[0],
    "Not": lambda node, a: ~a[0],
    "And": lambda node, a: a[0] & a[1],
    "Range": _range,
    "Reshape": _reshape,
    "Slice": _slice,
    "Sqrt": lambda node, a: np.sqrt(a[0]),
    "Squeeze": _squeeze,
    "Sub": lambda node, a: a[0] - a[1],
    "Unsqueeze": _unsqueeze,
    "Where": lambda node, a: np.where(*a),
}
