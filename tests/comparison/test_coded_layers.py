"""Layers of codes that one node holds, against the float graph: products with weights in blocks of
few bits, recurrent layers and attention that quantise what they read. What the scheme loses is no
fault; a scale, a zero point or an order of codes that is wrong is named.
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

pytestmark = pytest.mark.torch

ROWS, COLUMNS, BLOCK = 12, 72, 32  # the last block of a row is not full
RUNTIME = "com.microsoft"


def drawn(*shape, seed):
    array = np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[-1])
    return array.astype("f4")


def saved(path, nodes, held, inputs, made):
    value = h.make_tensor_value_info
    graph = h.make_graph(
        nodes,
        "g",
        [value(n, T.FLOAT, s) for n, s in inputs.items()],
        [value(n, T.FLOAT, s) for n, s in made.items()],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    opsets = [h.make_opsetid("", 17), h.make_opsetid(RUNTIME, 1)]
    onnx.save(h.make_model(graph, opset_imports=opsets, ir_version=9), str(path))
    return path


def captured(path, folder):
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = session.get_inputs()[0]
    x = np.random.default_rng(9).standard_normal(given.shape).astype("f4")
    with contextlib.redirect_stderr(io.StringIO()), whence.capture(session, folder):
        session.run(None, {given.name: x})
    return folder


def compared(tmp_path, source, target):
    return whence.compare(
        captured(source, tmp_path / "float"), captured(target, tmp_path / "coded")
    )


# ---- weights in blocks


def in_blocks(weight, *, signed):
    """(codes, scales, zero points) of a weight [columns, rows], each [rows, blocks, ...]."""
    rows = np.pad(weight.T, ((0, 0), (0, -COLUMNS % BLOCK))).reshape(ROWS, -1, BLOCK)
    if signed:
        scales = np.abs(rows).max(-1) / 7
        zeros = np.full(scales.shape, 8.0)
    else:
        low, high = np.minimum(rows.min(-1), 0), np.maximum(rows.max(-1), 0)
        scales = (high - low) / 15
        zeros = np.rint(-low / scales)
    scales = scales.astype("f4")
    codes = np.clip(np.rint(rows / scales[..., None] + zeros[..., None]), 0, 15)
    return codes.astype("u1"), scales, zeros.astype("u1")


def pairs_of(codes):
    """Two codes in a byte, the first in its low half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype("u1")


def product(path, *, signed=None, fault=""):
    """A product in float, or with codes of 4 bits."""
    weight = drawn(COLUMNS, ROWS, seed=1)
    held, reads, kind = {"w": weight}, ["x", "w"], {"op_type": "MatMul"}
    if signed is not None:
        codes, scales, zeros = in_blocks(weight, signed=signed)
        if fault == "scale":
            scales[3, 1] *= 1.5
        if fault == "zero point":
            zeros[5, 2] += 2
        packed = pairs_of(codes)
        if fault == "halves":
            packed = packed << 4 | packed >> 4
        held = {"w.codes": packed, "w.scales": scales.reshape(-1)}
        if not signed:
            pad = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
            held["w.zeros"] = pairs_of(pad).reshape(-1)
        reads = ["x", *held]
        sizes = {"K": COLUMNS, "N": ROWS, "bits": 4, "block_size": BLOCK}
        kind = {"op_type": "MatMulNBits", "domain": RUNTIME, **sizes}
    nodes = [
        h.make_node(inputs=reads, outputs=["p"], **kind),
        h.make_node("Relu", ["p"], ["y"]),
    ]
    return saved(path, nodes, held, {"x": [5, COLUMNS]}, {"y": [5, ROWS]})


@pytest.mark.parametrize("signed", [True, False])
def test_what_blocks_of_codes_lose_is_the_schemes(tmp_path, signed):
    source = product(tmp_path / "float.onnx")
    result = compared(tmp_path, source, product(tmp_path / "int4.onnx", signed=signed))
    assert result.status == "same", result.headline
    (cost,) = result.layer_costs
    assert cost.sqnr_db > 15
    (verdict,) = [v for v in result.verdicts if "weights int4" in v.sentence]
    assert "per group of 32" in verdict.sentence
    assert ("asymmetric" in verdict.sentence) is not signed


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("scale", "scale x1.5"),
        ("zero point", "zero point off by"),
        ("halves", "the two codes of each byte are swapped"),
    ],
)
def test_a_fault_in_blocks_of_codes_is_named(tmp_path, fault, words):
    source = product(tmp_path / "float.onnx")
    result = compared(tmp_path, source, product(tmp_path / "int4.onnx", signed=False, fault=fault))
    assert result.status == "different"
    assert words in result.findings[0].sentence
    faced = whence.map_weights(str(source), str(tmp_path / "int4.onnx"))
    (pair,) = faced.pairs
    assert pair.state == "differs"
    assert words in pair.why


def test_weights_of_blocks_are_mapped(tmp_path):
    source = product(tmp_path / "float.onnx")
    target = product(tmp_path / "int4.onnx", signed=False)
    (pair,) = whence.map_weights(str(source), str(target)).pairs
    assert (pair.state, pair.target_name) == ("codes", "w.codes")
    assert not whence.map_weights(str(source), str(target)).only_reference


# ---- nodes that quantise inside


def recurrent(path):
    sizes = {"w": (1, 64, 10), "r": (1, 64, 16), "b": (1, 128)}
    held = {n: drawn(*s, seed=k) for k, (n, s) in enumerate(sizes.items())}
    nodes = [
        h.make_node("LSTM", ["x", *held], ["h"], hidden_size=16),
        h.make_node("Relu", ["h"], ["y"]),
    ]
    return saved(path, nodes, held, {"x": [6, 3, 10]}, {"y": [6, 1, 3, 16]})


def attention(path):
    held = {"w": drawn(24, 72, seed=3), "b": drawn(72, seed=4)}
    nodes = [
        h.make_node("Attention", ["x", "w", "b"], ["a"], domain=RUNTIME, num_heads=4),
        h.make_node("Relu", ["a"], ["y"]),
    ]
    return saved(path, nodes, held, {"x": [2, 7, 24]}, {"y": [2, 7, 24]})


NETS = {"LSTM": recurrent, "Attention": attention}


def quantised(source, path, kind):
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            quantize_dynamic(
                str(source),
                str(path),
                op_types_to_quantize=[kind],
                weight_type=QuantType.QInt8,
                per_channel=False,
                reduce_range=True,
            )
    finally:
        logging.disable(logging.NOTSET)
    return path


def with_factor(path, ending, factor):
    """The file with one of its scales, or zero points, changed."""
    model = onnx.load(str(path))
    tensor = next(t for t in model.graph.initializer if t.name.endswith(ending))
    array = numpy_helper.to_array(tensor)
    wrong = (array * factor if array.dtype.kind == "f" else array + factor).astype(array.dtype)
    tensor.CopyFrom(numpy_helper.from_array(wrong, tensor.name))
    onnx.save(model, str(path))
    return path


@pytest.mark.parametrize("kind", NETS)
def test_what_a_node_that_quantises_inside_loses_is_the_schemes(tmp_path, kind):
    source = NETS[kind](tmp_path / "float.onnx")
    target = quantised(source, tmp_path / "int8.onnx", kind)
    assert any("Quantize" in n.op_type or n.op_type == "QAttention" for n in nodes_of(target))
    result = compared(tmp_path, source, target)
    assert result.status == "same", result.headline
    assert any("weights int8" in v.sentence for v in result.verdicts)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize(("ending", "by"), [("_scale", 1.2), ("_zero_point", 9)])
def test_a_fault_in_a_node_that_quantises_inside_is_named(tmp_path, kind, ending, by):
    source = NETS[kind](tmp_path / "float.onnx")
    target = with_factor(quantised(source, tmp_path / "int8.onnx", kind), ending, by)
    result = compared(tmp_path, source, target)
    assert result.status == "different"
    assert result.findings[0].cause == "parameter"
    words = "scale x1.2" if ending == "_scale" else "zero point off by"
    assert words in result.findings[0].sentence


def nodes_of(path):
    return onnx.load(str(path)).graph.node
