"""A file that ONNX Runtime optimised before, with convolutions in blocks of channels: how many
channels there are is in its weights alone.
"""

import numpy as np
import pytest

import whence
from whence.instrument.onnxruntime.watched import block_size
from whence.store import open_run

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
h, T = onnx.helper, onnx.TensorProto

DRAW = np.random.default_rng(0)
X = DRAW.standard_normal((1, 3, 8, 8)).astype(np.float32)


def drawn(*shape):
    return DRAW.standard_normal(shape).astype(np.float32)


def network(width):
    """Two convolutions with activations; the values between them stay in blocks."""
    weights = {"w1": drawn(width, 3, 3, 3), "b1": drawn(width), "w2": drawn(16, width, 3, 3)}
    nodes = [
        h.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1] * 4),
        h.make_node("Relu", ["c1"], ["a1"]),
        h.make_node("Conv", ["a1", "w2"], ["c2"], pads=[1] * 4),
        h.make_node("Relu", ["c2"], ["y"]),
    ]
    ends = [
        h.make_tensor_value_info(n, T.FLOAT, s) for n, s in (("x", X.shape), ("y", (1, 16, 8, 8)))
    ]
    held = [onnx.numpy_helper.from_array(a, n) for n, a in weights.items()]
    graph = h.make_graph(nodes, "g", ends[:1], ends[1:], held)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=10)


def session(model, rewritten=""):
    """With all optimisations, and the graph saved; without any, where it is not."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = rewritten
    if not rewritten:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def captured(place, engine):
    with whence.capture(engine, place):
        engine.run(None, {"x": X})
    return open_run(place)


@pytest.fixture(autouse=True)
def _blocks():
    if not block_size():
        pytest.skip("this processor has no kernels for blocks of channels")


def test_values_in_blocks_are_shown(tmp_path):
    model = network(2 * block_size()).SerializeToString()
    session(model, str(tmp_path / "optimised.onnx"))
    plain = captured(tmp_path / "plain", session(model))
    blocked = captured(tmp_path / "blocked", session(str(tmp_path / "optimised.onnx")))
    first = next(call for call in blocked.calls if call.op_type == "com.microsoft.nchwc.Conv")
    (relu,) = (call for call in plain.calls if call.scope == "a1")
    expected = plain.array(relu.slots("output")[0].record)
    np.testing.assert_allclose(
        blocked.array(first.slots("output")[0].record), expected, rtol=1e-4, atol=1e-4
    )


def test_channels_that_fill_a_block_are_shown_as_they_lie(tmp_path):
    """Nothing but the weights says how many there are: the rest of the last block is zeros."""
    width = block_size() + block_size() // 2
    model = network(width).SerializeToString()
    session(model, str(tmp_path / "optimised.onnx"))
    blocked = captured(tmp_path / "blocked", session(str(tmp_path / "optimised.onnx")))
    first = next(call for call in blocked.calls if call.op_type == "com.microsoft.nchwc.Conv")
    shown = blocked.array(first.slots("output")[0].record)
    assert shown.shape == (1, 2 * block_size(), 8, 8)
    assert not shown[:, width:].any()
    assert shown[:, :width].any()
