"""A product and the number behind it, which ONNX Runtime fuses, in a file of weights in bfloat16."""

import importlib

import ml_dtypes
import numpy as np
import pytest

import whence
from whence.align.values.value_graph import kind_of
from whence.records import Call

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.torch
h, T = importlib.import_module("onnx.helper"), onnx.TensorProto
DRAW = np.random.default_rng(8)
X = DRAW.standard_normal((1, 5, 40)).astype(np.float32)
WEIGHTS = {
    name: (DRAW.standard_normal((40, 40)) / 40**0.5).astype(np.float32) for name in "qkv"
} | {f"{name}.bias": DRAW.standard_normal(40).astype(np.float32) for name in "qkv"}


def graph(path, weights, scale=0.158):
    """Attention with biases, whose products the runtime brings to two axes under other names."""
    nodes = [
        *(h.make_node("MatMul", ["x", n], [f"{n}.MatMul"]) for n in "qkv"),
        *(h.make_node("Add", [f"{n}.MatMul", f"{n}.bias"], [f"{n}.Add"]) for n in "qkv"),
        h.make_node("Transpose", ["k.Add"], ["turned"], perm=[0, 2, 1]),
        h.make_node("MatMul", ["q.Add", "turned"], ["scores"]),
        h.make_node("Mul", ["scores", "scale"], ["scaled"]),
        h.make_node("Softmax", ["scaled"], ["share"], axis=-1),
        h.make_node("MatMul", ["share", "v.Add"], ["y"]),
    ]
    held = [onnx.numpy_helper.from_array(w, name) for name, w in weights.items()]
    held.append(onnx.numpy_helper.from_array(np.float32(scale), "scale"))
    ends = [h.make_tensor_value_info(n, T.FLOAT, X.shape) for n in ("x", "y")]
    made = h.make_graph(nodes, "g", ends[:1], ends[1:], held)
    onnx.save(h.make_model(made, opset_imports=[h.make_opsetid("", 17)], ir_version=10), path)
    return str(path)


def captured(path, folder, level):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    with whence.capture(session, folder):
        session.run(None, {"x": X})
    return str(folder)


def compared(folder, **how):
    levels = ort.GraphOptimizationLevel
    rounded = {n: w.astype(ml_dtypes.bfloat16).astype(np.float32) for n, w in WEIGHTS.items()}
    source, stored = graph(folder / "a.onnx", WEIGHTS), graph(folder / "b.onnx", rounded, **how)
    return whence.compare(
        captured(source, folder / "a", levels.ORT_DISABLE_ALL),
        captured(stored, folder / "b", levels.ORT_ENABLE_ALL),
    )


def test_a_number_that_is_fused_into_a_product_is_no_fault(tmp_path):
    assert compared(tmp_path).status == "same"


def test_another_number_is(tmp_path):
    result = compared(tmp_path, scale=0.2)
    assert result.status == "different"
    assert "scores" in result.findings[0].name or "scaled" in result.findings[0].name


@pytest.mark.parametrize(("alpha", "kind"), [(1.0, "MatMul"), (0.25, "MatMul and scale")])
def test_a_product_that_scales_does_not_make_what_the_product_alone_makes(alpha, kind):
    fused = Call(0, "s", "m", 0, 0, op_type="com.microsoft.FusedMatMul", arguments={"alpha": alpha})
    assert kind_of(fused) == kind
