"""One layer of attention as ONNX graphs: written out, and as ONNX Runtime's fused node."""

from __future__ import annotations

import numpy as np
import onnx

h, T = onnx.helper, onnx.TensorProto

_HEADS, _SIZE, _WIDTH = 2, 4, 8
_DRAW = np.random.default_rng(5)
FEED = _DRAW.standard_normal((2, 5, _WIDTH)).astype(np.float32)
WEIGHTS = {
    name: _DRAW.standard_normal((_WIDTH, _WIDTH)).astype(np.float32) for name in ("wq", "wk", "wv")
}
WEIGHTS |= {"wo": _DRAW.standard_normal((_WIDTH, _WIDTH)).astype(np.float32)}
_CONSTANTS = {
    "split": np.array([0, 0, _HEADS, _SIZE]),
    "joined": np.array([0, 0, _WIDTH]),
    "one": np.float32(1),
    "lowest": np.float32(-10000),
    "root": np.float32(_SIZE**0.5),
    "axes": np.array([1, 2]),
    "rows": np.array([1]),
    "bias": np.linspace(-1, 1, _WIDTH, dtype=np.float32),
}


def _node(op_type, reads, *makes, **attributes):
    return h.make_node(op_type, reads.split(), list(makes), **attributes)


def _model(nodes, weights):
    read = {value for node in nodes for value in node.input}
    ends = [
        h.make_tensor_value_info("x", T.FLOAT, ["b", "t", _WIDTH]),
        h.make_tensor_value_info("mask", T.INT64, ["b", "t"]),
        h.make_tensor_value_info("y", T.FLOAT, ["b", "t", _WIDTH]),
    ]
    held = [onnx.numpy_helper.from_array(a, n) for n, a in weights.items() if n in read]
    graph = h.make_graph(nodes, "g", ends[:2], ends[2:], held)
    opsets = [h.make_opsetid("", 20), h.make_opsetid("com.microsoft", 1)]
    return h.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


_BEHIND = [
    _node("MatMul", "heads wo", "projected"),
    _node("Add", "projected x", "summed"),
    _node("MatMul", "summed wo", "wide"),
    _node("Add", "wide bias", "moved"),
    _node("Gelu", "moved", "kept_above"),
    _node("MatMul", "kept_above wo", "mixed"),
    _node("Tanh", "mixed", "bounded"),
    _node("Add", "bounded summed", "y"),
]
"""What both graphs run, and name, alike; ONNX Runtime fuses two of these nodes."""


def _heads(name, order):
    return [
        _node("MatMul", f"x w{name}", f"{name}p"),
        _node("Reshape", f"{name}p split", f"{name}s"),
        _node("Transpose", f"{name}s", name, perm=order),
    ]


def written_out():
    """Attention, operator by operator, with a mask that is added."""
    nodes = [
        _node("Cast", "mask", "kept", to=T.FLOAT),
        _node("Sub", "one kept", "left_out"),
        _node("Mul", "left_out lowest", "off"),
        _node("Unsqueeze", "off axes", "added"),
        *_heads("q", [0, 2, 1, 3]),
        *_heads("k", [0, 2, 3, 1]),
        *_heads("v", [0, 2, 1, 3]),
        _node("MatMul", "q k", "products"),
        _node("Div", "products root", "scaled"),
        _node("Add", "scaled added", "scores"),
        _node("Softmax", "scores", "weights", axis=-1),
        _node("MatMul", "weights v", "each"),
        _node("Transpose", "each", "beside", perm=[0, 2, 1, 3]),
        _node("Reshape", "beside joined", "heads"),
        *_BEHIND,
    ]
    return _model(nodes, WEIGHTS | _CONSTANTS)


def fused(wrong=""):
    """The same with one node, which takes the mask as the length of each row. wrong: the name of a
    weight that is off in a row.
    """
    weights = {name: array.copy() for name, array in WEIGHTS.items()}
    if wrong:
        weights[wrong][2] *= 1.01
    weights |= {
        "w": np.concatenate([weights[f"w{name}"] for name in "qkv"], axis=1),
        "b": np.zeros(3 * _WIDTH, np.float32),
    }
    attention = _node(
        "Attention", "x w b lengths", "heads", domain="com.microsoft", num_heads=_HEADS
    )
    nodes = [
        _node("Cast", "mask", "counted", to=T.INT32),
        _node("ReduceSum", "counted rows", "lengths", keepdims=0),
        attention,
        *_BEHIND,
    ]
    return _model(nodes, weights | _CONSTANTS)
