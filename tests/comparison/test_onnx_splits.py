"""Several nodes that one graph runs where the other runs several: what they leave is paired by its
names.
"""

import numpy as np
import pytest

import whence

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto as T  # noqa: E402
from onnx import helper as h  # noqa: E402
from onnx import numpy_helper  # noqa: E402

pytestmark = pytest.mark.torch


def heads(axis=2, parts=3, *, swapped=(), readers="attention"):
    """A product that is cut into parts by one Gather each, which ONNX Runtime turns into a Split.
    swapped: parts that are taken in each other's place.
    """
    random = np.random.default_rng(5)
    shape = [2, 4, 8]
    shape.insert(axis, parts)
    weight = (random.standard_normal((8, 8 * parts)) * 0.3).astype("f4")
    held = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array(shape), "shape")]
    order = [axis, *(k for k in range(4) if k != axis)]
    nodes = [
        h.make_node("MatMul", ["x", "w"], ["mixed"]),
        h.make_node("Reshape", ["mixed", "shape"], ["parted"]),
        h.make_node("Transpose", ["parted"], ["turned"], perm=order),
    ]
    places = list(range(parts))
    for a, b in [swapped] if swapped else []:
        places[a], places[b] = b, a
    for k, place in enumerate(places):
        held.append(numpy_helper.from_array(np.array(place), f"place{k}"))
        nodes.append(h.make_node("Gather", ["turned", f"place{k}"], [f"part{k}"], axis=0))
    if readers == "attention":
        nodes += [
            h.make_node("Transpose", ["part1"], ["keys"], perm=[0, 2, 1]),
            h.make_node("MatMul", ["part0", "keys"], ["scores"]),
            h.make_node("Softmax", ["scores"], ["weights"], axis=-1),
            h.make_node("MatMul", ["weights", f"part{parts - 1}"], ["y"]),
        ]
        ends = ["y"]
    else:
        kinds = ["Sigmoid", "Relu", "Tanh", "Softplus"]
        nodes += [h.make_node(kinds[k], [f"part{k}"], [f"y{k}"]) for k in range(parts)]
        ends = [f"y{k}" for k in range(parts)]
    outputs = [h.make_tensor_value_info(name, T.FLOAT, None) for name in ends]
    graph = h.make_graph(
        nodes, "g", [h.make_tensor_value_info("x", T.FLOAT, [2, 4, 8])], outputs, held
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model).SerializeToString()


def captured(place, model, level):
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with whence.capture(session, place):
        session.run(None, {"x": np.random.default_rng(6).random((2, 4, 8), dtype=np.float32)})
    return place


@pytest.mark.parametrize("readers", ["attention", "own"])
@pytest.mark.parametrize(("axis", "parts"), [(2, 3), (1, 3), (2, 2), (2, 4)])
def test_gathers_against_the_split_that_they_became(tmp_path, axis, parts, readers):
    model = heads(axis, parts, readers=readers)
    off = captured(tmp_path / "off", model, "ORT_DISABLE_ALL")
    on = captured(tmp_path / "on", model, "ORT_ENABLE_ALL")
    for sides in ((off, on), (on, off)):
        result = whence.compare(*sides)
        assert result.status == "same", result.findings
        assert not result.unmatched
    assert any("Split" in row.op_type for row in result.rows), "the optimiser makes no Split"


@pytest.mark.parametrize("readers", ["attention", "own"])
@pytest.mark.parametrize("swapped", [(0, 1), (1, 2), (0, 2)])
def test_parts_in_each_others_place_are_named(tmp_path, swapped, readers):
    off = captured(tmp_path / "off", heads(readers=readers), "ORT_DISABLE_ALL")
    wrong = heads(swapped=swapped, readers=readers)
    on = captured(tmp_path / "on", wrong, "ORT_ENABLE_ALL")
    result = whence.compare(off, on)
    assert result.status == "different"
    (finding,) = result.findings
    assert "part" in finding.name and "Gather" in finding.op_type
