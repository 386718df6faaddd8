"""Models of ONNX as whence reads them, against the package onnx; and what is not a model."""

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whence.errors import ElementsMissing
from whence.readers.encodings import onnx_model
from whence.workflows.capture import onnxruntime as reading

onnx = pytest.importorskip("onnx")
sys.path.append(str(Path(__file__).parent.parent / "instrument"))
zoo = importlib.import_module("onnx_models")


def attribute(a):
    """An attribute as the package has it."""
    value = onnx.helper.get_attribute_value(a)
    if isinstance(value, bytes):
        return value.decode()
    return list(value) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", zoo.MODELS)
def test_models_are_read_as_the_package_reads_them(name):
    made, _ = zoo.MODELS[name]()
    model = onnx_model.parse(made.SerializeToString())
    assert model.opsets == {"": zoo.OPSET}
    assert model.producer == "tests 1"
    values = [v for v in made.graph.input if v.type.tensor_type.HasField("shape")]
    for value in values:
        dims = value.type.tensor_type.shape.dim
        expected = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)
        assert model.graph.shapes[value.name] == expected
    assert model.graph.outputs == [v.name for v in made.graph.output]
    for node, expected in zip(model.graph.nodes, made.graph.node, strict=True):
        assert (node.op_type, node.name) == (expected.op_type, expected.name)
        assert node.inputs == list(expected.input)
        assert node.outputs == list(expected.output)
        plain = [a for a in expected.attribute if a.type != onnx.AttributeProto.GRAPH]
        assert node.attributes == {a.name: attribute(a) for a in plain}
        assert len(node.graphs) == len(expected.attribute) - len(plain)
    for tensor in made.graph.initializer:
        found = model.graph.initializers[tensor.name].array(Path)
        assert (found == onnx.numpy_helper.to_array(tensor)).all()


def test_attributes_of_every_kind():
    node = onnx.helper.make_node(
        "Op",
        ["a", ""],
        ["b"],
        domain="some.where",
        i=-3,
        f=0.5,
        s="text",
        ints=[1, -2],
        floats=[0.25, float("inf")],
        strings=["p", "q"],
        t=zoo.constant([1.5], "t"),
        zero=0,
    )
    graph = onnx.helper.make_graph([node], "g", [], [])
    (read,) = onnx_model.parse(onnx.helper.make_model(graph).SerializeToString()).graph.nodes
    tensor = read.attributes.pop("t")
    assert tensor.array(Path).tolist() == [1.5]
    assert read.attributes == {
        "i": -3, "f": 0.5, "s": "text", "ints": [1, -2], "floats": [0.25, {"float": "inf"}],
        "strings": ["p", "q"], "zero": 0,
    }  # fmt: skip
    assert (read.domain, read.inputs) == ("some.where", ["a", ""])


@given(st.data())
def test_what_is_no_model_is_refused(data):
    whole = zoo.attention()[0].SerializeToString()
    cut = data.draw(st.integers(0, len(whole) - 1))
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[place] ^= data.draw(st.integers(1, 255))
    for broken in (whole[:cut], bytes(damaged)):
        try:
            model = onnx_model.parse(broken)
            for tensor in model.graph.initializers.values():
                reading._elements(tensor, "/nowhere")
        except (ValueError, ElementsMissing):
            pass


def test_elements_are_looked_for_beside_the_model_only(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(8))
    (tmp_path / "models").mkdir()
    made = zoo.dense(1)[0]
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../secret"
    (read,) = onnx_model.parse(made.SerializeToString()).graph.initializers.values()
    assert "outside of the model's folder" in reading._elements(read, str(tmp_path / "models"))
