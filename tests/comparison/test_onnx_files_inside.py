"""Files with graphs inside of nodes, in 16 bits, and of other operator sets: what both hold is
compared as it stands.
"""

import numpy as np
import pytest

import whence

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

FLOAT = TensorProto.FLOAT


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def saved(path, nodes, weights, extents, opset=17, kind=FLOAT):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, extents)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(w, name) for name, w in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return str(path)


def branching(path, weight, step=0.5):
    """A choice between two products with a weight of the graph around it."""

    def body(name, factor):
        held = numpy_helper.from_array(np.asarray(factor, np.float32), "value")
        nodes = [
            helper.make_node("Constant", [], [f"{name}.k"], value=held),
            helper.make_node("MatMul", ["x", "w"], [f"{name}.m"]),
            helper.make_node("Mul", [f"{name}.m", f"{name}.k"], [f"{name}.y"]),
        ]
        made = helper.make_tensor_value_info(f"{name}.y", FLOAT, None)
        return helper.make_graph(nodes, name, [], [made])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=body("a", step), else_branch=body("b", 2)),
    ]
    return saved(path, nodes, {"w": weight, "zero": np.float32(0).reshape(())}, [3, 6])


def test_a_weight_that_only_the_body_of_a_node_reads_is_compared(tmp_path):
    weight = drawn(6, 5)
    reference = branching(tmp_path / "a.onnx", weight)
    assert whence.compare(reference, branching(tmp_path / "b.onnx", weight)).status == "same"
    wrong = weight.copy()
    wrong[2, 3] += 1e-3
    result = whence.compare(reference, branching(tmp_path / "c.onnx", wrong))
    assert result.status == "different"
    assert "[2, 3]" in result.findings[0].sentence
    other = whence.compare(reference, branching(tmp_path / "d.onnx", weight, step=0.6))
    assert other.status == "undecided"


def convolved(path, weights, epsilon, kind=FLOAT):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("Add", ["n", "epsilon"], ["p"]),
        helper.make_node("Log", ["p"], ["y"]),
    ]
    weights = {**weights, "epsilon": np.full(1, epsilon, weights["w"].dtype)}
    return saved(path, nodes, weights, [1, 3, 8, 8], kind=kind)


def test_a_norm_of_a_file_in_16_bits_is_compared_in_its_parts(tmp_path):
    weights = {"w": drawn(8, 3, 3, 3), "scale": drawn(8), "bias": drawn(8, seed=1),
               "mean": drawn(8, seed=2), "var": np.abs(drawn(8, seed=3)) + 0.1}  # fmt: skip
    half = {name: w.astype(np.float16) for name, w in weights.items()}
    reference = convolved(tmp_path / "a.onnx", weights, 1e-3)
    copy = convolved(tmp_path / "b.onnx", half, 1e-3, TensorProto.FLOAT16)
    assert whence.compare(reference, copy).status == "same"
    half["scale"] = half["scale"] * np.float16(1.05)
    wrong = whence.compare(reference, convolved(tmp_path / "c.onnx", half, 1e-3, FLOAT))
    assert [f.slot for f in wrong.findings] == ["param.scale"]


@pytest.mark.parametrize("stored", [np.float16, np.float32])
def test_a_weight_of_which_16_bits_leave_nothing_is_told(tmp_path, stored):
    """1e-10 is 0 in float16; behind it a logarithm has no bound."""
    weights = {"w": drawn(8, 3, 3, 3), "scale": drawn(8), "bias": drawn(8, seed=1),
               "mean": drawn(8, seed=2), "var": np.abs(drawn(8, seed=3)) + 0.1}  # fmt: skip
    copy = {name: w.astype(np.float16).astype(stored) for name, w in weights.items()}
    result = whence.compare(
        convolved(tmp_path / "a.onnx", weights, 1e-10), convolved(tmp_path / "b.onnx", copy, 0)
    )
    assert [f.slot for f in result.findings] == ["param.epsilon"]
    assert "is 1e-10 in the reference, 0 in the target" in result.findings[0].sentence


@pytest.mark.parametrize(("axis", "status"), [(2, "same"), (-1, "same"), (1, "undecided")])
def test_softmax_over_the_last_axis_has_one_meaning(tmp_path, axis, status):
    """Older operator sets flatten what lies behind the axis."""
    files = [
        saved(
            tmp_path / f"{opset}.onnx",
            [helper.make_node("Relu", ["x"], ["r"]),
             helper.make_node("Softmax", ["r"], ["y"], axis=axis)],
            {},
            [2, 3, 4],
            opset,
        )
        for opset in (11, 13)
    ]  # fmt: skip
    assert whence.compare(*files).status == status
