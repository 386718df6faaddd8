"""Nodes whose result the file decides: what they make of weights, element by element, and of
extents that are known.

Only what moves elements or rounds as the standard says is computed, so that the result is the one
that any engine would have folded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whence import dtypes
from whence.comparison.onnx_files.graph import Graph, Node, Weight, held
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.readers.encodings.onnx_tensor import dtype_of

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
