"""Graphs of `quantize_dynamic` against the float one: the loss is the scheme's, and what is wrong
with a weight, or with what a layer computes, is named.
"""

import contextlib
import io
import logging

import numpy as np
import pytest

import whence

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxruntime.quantization")
from onnx import TensorProto as T  # noqa: E402
from onnx import helper as h  # noqa: E402
from onnx import numpy_helper  # noqa: E402
from quantised_models import edited  # noqa: E402

from whence.report import answer  # noqa: E402

pytestmark = pytest.mark.torch

SCHEMES = {
    # seven bits: sums of pairs of products of eight saturate on processors without VNNI
    "signed": {"weight_type": "QInt8", "reduce_range": True},
    "unsigned": {"weight_type": "QUInt8"},
    "by channel": {"weight_type": "QInt8", "per_channel": True, "reduce_range": True},
}


def drawn(name, *shape, seed):
    size = 1 / np.sqrt(np.prod(shape[1:]) if len(shape) == 4 else shape[0])
    array = np.random.default_rng(seed).standard_normal(shape) * size
    return numpy_helper.from_array(array.astype("f4"), name)


def dense(path):
    """Products behind a shared input, with an activation, a residual sum and a Gemm."""
    held = [
        drawn("q.w", 16, 16, seed=1), drawn("k.w", 16, 16, seed=2), drawn("k.b", 16, seed=3),
        drawn("o.w", 16, 24, seed=4), drawn("c.w", 8, 24, seed=5), drawn("c.b", 8, seed=6),
    ]  # fmt: skip
    nodes = [
        h.make_node("MatMul", ["x", "q.w"], ["q"]),
        h.make_node("MatMul", ["x", "k.w"], ["k0"]),
        h.make_node("Add", ["k0", "k.b"], ["k"]),
        h.make_node("Sigmoid", ["k"], ["s"]),
        h.make_node("Mul", ["q", "s"], ["m"]),
        h.make_node("MatMul", ["m", "o.w"], ["o0"]),
        h.make_node("Relu", ["o0"], ["o"]),
        h.make_node("Gemm", ["o", "c.w", "c.b"], ["y"], transB=1),
    ]
    return saved(path, nodes, held, [6, 16], [6, 8])


def convolutional(path):
    """Two convolutions with biases, one in groups, and a pool."""
    held = [
        drawn("a.w", 8, 3, 3, 3, seed=1), drawn("a.b", 8, seed=2),
        drawn("b.w", 8, 4, 3, 3, seed=3), drawn("b.b", 8, seed=4),
    ]  # fmt: skip
    nodes = [
        h.make_node("Conv", ["x", "a.w", "a.b"], ["a0"], pads=[1] * 4, kernel_shape=[3, 3]),
        h.make_node("Relu", ["a0"], ["a"]),
        h.make_node(
            "Conv", ["a", "b.w", "b.b"], ["b"], strides=[2, 2], group=2, kernel_shape=[3, 3]
        ),
        h.make_node("GlobalAveragePool", ["b"], ["y"]),
    ]
    return saved(path, nodes, held, [2, 3, 9, 9], [2, 8, 1, 1])


def saved(path, nodes, held, shape, made):
    ends = [
        [h.make_tensor_value_info(name, T.FLOAT, extents)]
        for name, extents in (("x", shape), ("y", made))
    ]
    graph = h.make_graph(nodes, "g", *ends, held)
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9), str(path))
    return path


NETS = {"dense": dense, "convolutional": convolutional}
# ONNX Runtime has no kernel for a product of signed codes in ConvInteger.
CASES = [("dense", s) for s in SCHEMES] + [("convolutional", "unsigned")]


def quantised(source, path, scheme):
    from onnxruntime.quantization import QuantType, quantize_dynamic

    options = {**SCHEMES[scheme], "weight_type": getattr(QuantType, SCHEMES[scheme]["weight_type"])}
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            quantize_dynamic(str(source), str(path), **options)
    finally:
        logging.disable(logging.NOTSET)
    return path


def captured(path, folder, level="ORT_DISABLE_ALL", steps=1):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    shape = session.get_inputs()[0].shape
    with whence.capture(session, folder):
        for seed in range(steps):
            random = np.random.default_rng(7 + seed)
            session.run(None, {"x": (random.standard_normal(shape) * (1 + seed)).astype("f4")})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dynamic")
    for net, make in NETS.items():
        captured(make(folder / f"{net}.onnx"), folder / net)
    for net, scheme in CASES:
        quantised(folder / f"{net}.onnx", folder / f"{net} {scheme}.onnx", scheme)
    return folder


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize(("net", "scheme"), CASES)
def test_the_loss_of_the_scheme_is_precision(folder, tmp_path, net, scheme, level):
    target = captured(folder / f"{net} {scheme}.onnx", tmp_path / "t", level)
    result = whence.compare(folder / net, target)
    assert result.status == "same", [f.sentence for f in result.findings] or result.headline
    losses = [v for v in result.verdicts if v.verdict == "precision"]
    assert len(losses) == len(result.layer_costs) == {"dense": 4, "convolutional": 2}[net]
    assert all(cost.sqnr_db > 20 for cost in result.layer_costs)
    text = answer.answer(result)
    assert "PRECISION LOSS" in text and "LEAVE IN FLOAT" in text


def times(factor, place=None):
    def change(array):
        array = np.array(array)
        if place is None or array.ndim == 0:
            return (array * factor).astype(array.dtype)
        array.reshape(-1)[place] *= factor
        return array

    return change


def other_code(array):
    array.reshape(-1)[5] = np.where(array.reshape(-1)[5] > 0, -50, 50).astype(array.dtype)
    return array


def shifted(array):
    return (np.array(array) + 3).astype(array.dtype)


FAULTS = {
    "scale": ("dense", "signed", "q.w_scale", times(1.3), "q"),
    "code": ("dense", "signed", "k.w_quantized", other_code, "k"),
    "zero": ("dense", "unsigned", "o.w_zero_point", shifted, "o"),
    "channel": ("dense", "by channel", "c.w_Transposed_scale", times(1.2, 2), "y"),
    "bias": ("dense", "signed", "k.b", times(2.0, 1), "k"),
    "kernel scale": ("convolutional", "unsigned", "b.w_scale", times(1.1), "b"),
    "kernel zero": ("convolutional", "unsigned", "a.w_zero_point", shifted, "a"),
}


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(folder, tmp_path, fault, level):
    net, scheme, name, change, layer = FAULTS[fault]
    source = folder / f"{net} {scheme}.onnx"
    wrong = edited(source, tmp_path / "wrong.onnx", **{name.replace(".", "__"): change})
    result = whence.compare(folder / net, captured(wrong, tmp_path / "t", level))
    assert result.status == "different", result.headline
    assert result.findings[0].name.startswith(layer), result.findings[0]


def test_an_activation_that_is_rounded_by_another_range_is_named(folder, tmp_path):
    """The graph measures another tensor than it rounds."""
    model = onnx.load(str(folder / "dense signed.onnx"))
    measures = [n for n in model.graph.node if n.op_type == "DynamicQuantizeLinear"]
    products = [n for n in model.graph.node if n.op_type == "MatMulInteger"]
    late = next(n for n in products if n.input[0] == measures[1].output[0])
    late.input[2] = measures[0].output[2]  # the zero point of what the first layers read
    onnx.save(model, str(tmp_path / "wrong.onnx"))
    result = whence.compare(folder / "dense", captured(tmp_path / "wrong.onnx", tmp_path / "t"))
    assert result.status != "same"


def test_what_layers_cost_is_of_all_steps(folder, tmp_path):
    reference = captured(folder / "dense.onnx", tmp_path / "r", steps=3)
    target = captured(folder / "dense signed.onnx", tmp_path / "t", steps=3)
    result = whence.compare(reference, target)
    assert {(cost.calls, cost.steps) for cost in result.layer_costs} == {(3, 3)}
    first = {c.name: c.explains for c in whence.compare(folder / "dense", target).layer_costs}
    assert all(abs(c.explains - first[c.name]) > 1e-6 for c in result.layer_costs)


def test_nodes_that_were_fused_of_coded_ones_are_paired_by_what_they_state(tmp_path):
    """Of one file of codes, run with optimisations and without, nothing was quantised between."""
    from whence.align.quantised import layers

    path = quantised(dense(tmp_path / "float.onnx"), tmp_path / "int8.onnx", "unsigned")
    folders = [
        captured(path, tmp_path / level, f"ORT_{level}") for level in ("DISABLE_ALL", "ENABLE_ALL")
    ]
    off, optimised = map(whence.open_run, folders)
    assert any(c.op_type.endswith("DynamicQuantizeMatMul") and c.origins for c in optimised.calls)
    assert not layers.applies(off, optimised)
    assert whence.compare(*folders).status == "same"
