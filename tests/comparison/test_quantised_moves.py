"""Codes that only move: padded, or with axes in another order than the float graph has them."""

import importlib

import numpy as np
import pytest

import whence

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from whence.comparison.verdicts.quantised.programs import with_shape  # noqa: E402

LEVELS = ort.GraphOptimizationLevel


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def captured(file, level, feeds, path):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = level
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    with whence.capture(session, str(path)):
        session.run(None, feeds)
    return str(path)


def test_codes_pass_through_padding(tmp_path):
    """Reflected, with the biases of one element each that a Neg of another sign stands beside."""
    held = {
        "w": drawn(4, 1, 5), "b": drawn(4), "v": drawn(1, 4, 3), "c": np.float32([-0.6]),
        "pads": np.int64([0, 0, 2, 0, 0, 2]), "k": np.float32([-1.0]),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["a"]),
        helper.make_node("Pad", ["a", "pads"], ["p"], mode="reflect"),
        helper.make_node("Conv", ["p", "v", "c"], ["d"]),
        helper.make_node("Mul", ["d", "k"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 40])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 38])],
        [numpy_helper.from_array(w, name) for name, w in held.items()],
    )
    source, codes = tmp_path / "float.onnx", tmp_path / "codes.onnx"
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), source)
    quantization = importlib.import_module("onnxruntime.quantization")
    feeds = {"x": drawn(1, 1, 40)}

    class Reader(quantization.CalibrationDataReader):
        def __init__(self):
            self.feeds = iter([feeds])

        def get_next(self):
            return next(self.feeds, None)

    quantization.quantize_static(
        str(source), str(codes), Reader(), quant_format=quantization.QuantFormat.QOperator
    )
    result = whence.compare(
        captured(source, LEVELS.ORT_DISABLE_ALL, feeds, tmp_path / "a"),
        captured(codes, LEVELS.ORT_DISABLE_ALL, feeds, tmp_path / "b"),
    )
    assert not result.findings, result.findings
    assert result.status == "same"


@pytest.mark.parametrize(
    ("shape", "wanted", "order"),
    [((1, 7, 9, 2), (1, 9, 7, 2), (0, 2, 1, 3)), ((5, 3, 3, 8), (5, 8, 3, 3), (0, 3, 1, 2)),
     ((4, 6), (1, 6, 4), (1, 0))],
)  # fmt: skip
def test_axes_in_another_order_are_moved(shape, wanted, order):
    array = drawn(*shape)
    np.testing.assert_array_equal(with_shape(array, wanted), array.transpose(order).reshape(wanted))


def test_leading_axes_are_merged():
    array = drawn(3, 4, 5)
    np.testing.assert_array_equal(with_shape(array, (12, 5)), array.reshape(12, 5))
    assert with_shape(array, (10, 6)).shape == (3, 4, 5)
