"""Quantised graphs of ONNX Runtime against the float one: the loss of the scheme is `precision`,
with what each layer costs; a wrong scale, zero point, code or bias is named.
"""

import numpy as np
import pytest

import whence

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxruntime.quantization")

from quantised_models import Net, captured, edited, quantised  # noqa: E402

from whence.comparison.answer import assemble  # noqa: E402
from whence.report import answer  # noqa: E402

pytestmark = pytest.mark.torch
UNSIGNED = {"per_channel": False, "weight_type": "QUInt8", "activation_type": "QUInt8"}
PER_CHANNEL = {"per_channel": True, "reduce_range": True, "weight_type": "QInt8"}


def options_of(scheme, form="QDQ"):
    from onnxruntime.quantization import QuantFormat, QuantType

    kinds = {"QUInt8": QuantType.QUInt8, "QInt8": QuantType.QInt8}
    given = {k: kinds.get(v, v) for k, v in scheme.items()}
    return given | {"quant_format": getattr(QuantFormat, form)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")
    onnx.save(Net().model(), str(folder / "float.onnx"))
    options = options_of(PER_CHANNEL)
    from onnxruntime.quantization import CalibrationMethod

    options |= {"calibrate_method": CalibrationMethod.Percentile}
    options |= {"extra_options": {"CalibPercentile": 99.9}}
    quantised(folder / "float.onnx", folder / "qdq.onnx", **options)
    captured(folder / "float.onnx", folder / "float")
    captured(folder / "qdq.onnx", folder / "qdq")
    return folder


def test_the_loss_of_a_scheme_is_precision_with_what_each_layer_costs(folder):
    result = whence.compare(folder / "float", folder / "qdq")
    assert result.status == "same"
    assert {verdict.verdict for verdict in result.verdicts} == {"precision"}
    assert {cost.name for cost in result.layer_costs} == {
        "a.Conv+a.Relu", "b.Conv", "sum.Add", "pool.Pool", "y"
    }  # fmt: skip
    assert all(cost.sqnr_db > 20 for cost in result.layer_costs)
    assert [c.explains for c in result.layer_costs] == sorted(
        (c.explains for c in result.layer_costs), reverse=True
    )
    text = answer.answer(result)
    assert "LEAVE IN FLOAT" in text and result.layer_costs[0].name in text


def test_shares_of_layers_that_do_not_make_the_targets_outputs_are_not_told(folder, monkeypatch):
    """Run again one after the other, the layers are another model here."""
    chain = assemble._Chain
    as_coded = chain._as_coded
    monkeypatch.setattr(
        chain, "_as_coded", lambda *args: [1.2 * result for result in as_coded(*args)]
    )
    result = whence.compare(folder / "float", folder / "qdq")
    assert result.status == "same"
    assert all(c.explains is None and c.sqnr_db > 20 for c in result.layer_costs)
    (note,) = [note for note in result.notes if "leave in float is not known" in note]
    assert "do not make the target's own outputs" in note
    assert "LEAVE IN FLOAT" not in answer.answer(result)


def test_what_the_weights_of_a_layer_cost_is_what_leaving_it_out_saves(folder):
    """The quantiser leaves a node out: its result stays on the grid of what reads it."""
    from onnxruntime.quantization import CalibrationMethod

    result = whence.compare(folder / "float", folder / "qdq")
    cost = next(cost for cost in result.layer_costs if cost.name == "b.Conv")
    options = options_of(PER_CHANNEL) | {"nodes_to_exclude": ["/b/Conv_output_0_node"]}
    options |= {"calibrate_method": CalibrationMethod.Percentile}
    options |= {"extra_options": {"CalibPercentile": 99.9}}
    path = quantised(folder / "float.onnx", folder / "without.onnx", **options)
    left = whence.compare(folder / "float", captured(path, folder / "without")).effect
    before = result.effect
    share = 1 - (left.error / before.error) ** 2
    assert cost.weights_explain == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("level", ["off", "all"])
def test_every_form_and_level_is_the_same(folder, tmp_path, form, level):
    path = quantised(folder / "float.onnx", tmp_path / "q.onnx", **options_of(UNSIGNED, form))
    result = whence.compare(folder / "float", captured(path, tmp_path / "run", level))
    assert (result.status, result.findings) == ("same", ())
    assert {verdict.verdict for verdict in result.verdicts} <= {"precision", "noise"}


def test_codes_of_another_type_are_the_same_numbers(folder, tmp_path):
    """The runtime turns int8 into uint8 at this level."""
    scheme = options_of({**PER_CHANNEL, "activation_type": "QInt8"})
    path = quantised(folder / "float.onnx", tmp_path / "q.onnx", **scheme)
    runs = [captured(path, tmp_path / level, level) for level in ("off", "all")]
    result = whence.compare(*runs)
    assert (result.status, result.findings) == ("same", ())


FAULTS = {
    "weight scale": ({"b__weight_scale": lambda s: s * np.float32(1.3)}, "b.Conv", "scale x1.3"),
    "rolled": ({"b__weight_scale": lambda s: np.roll(s, 1)}, "b.Conv", "shifted by +1 channel"),
    "zero point": ({"b__weight_zero_point": lambda z: z + np.int8(3)}, "b.Conv", "zero point off"),
    "code": ({"b__weight_quantized": lambda c: np.where(np.arange(c.size).reshape(c.shape) == 7,
                                                       c + 25, c).astype("i1")},
             "b.Conv", "1 of 576 codes"),
    "bias scale": ({"b__bias_quantized_scale": lambda s: s * np.float32(1.3)}, "b.Conv",
                   "scale of the bias is 1.3 times"),
    "bias code": ({"b__bias_quantized": lambda c: c + 400 * (np.arange(8) == 2).astype("i4")},
                  "b.Conv", "1 of 8 elements of the bias"),
    "activation scale": ({"/a/Relu_output_0_scale": lambda s: s * np.float32(2)}, "b.Conv",
                         "scale of the bias is 0.5 times"),
    "activation zero": ({"/a/Relu_output_0_zero_point": lambda z: (z + 12).astype(z.dtype)},
                        "a.Conv+a.Relu", "codes are not the nearest"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_first(folder, tmp_path, name):
    changed, layer, words = FAULTS[name]
    path = edited(folder / "qdq.onnx", tmp_path / "bad.onnx", **changed)
    result = whence.compare(folder / "float", captured(path, tmp_path / "bad"))
    assert result.status == "different"
    assert result.findings[0].name == layer
    assert words in result.findings[0].sentence


def test_codes_read_otherwise_than_made(folder, tmp_path):
    model = onnx.load(str(folder / "qdq.onnx"))
    scale = "/a/Relu_output_0_scale"
    held = next(i for i in model.graph.initializer if i.name == scale)
    array = onnx.numpy_helper.to_array(held) * np.float32(1.1)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "another"))
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[1] == scale:
            node.input[1] = "another"
    onnx.save(model, str(tmp_path / "bad.onnx"))
    result = whence.compare(folder / "float", captured(tmp_path / "bad.onnx", tmp_path / "bad"))
    assert "another scale or zero point than it was made with" in result.findings[0].sentence


def test_codes_at_the_end_of_their_range_take_nothing_back(tmp_path):
    """Calibrated on the one row that it is asked, a score stays at the end of the range of codes
    whatever too large a number comes in.
    """
    random = np.random.default_rng(0)
    row = {"x": np.abs(random.standard_normal((1, 8))).astype("f4")}
    weights = {
        "first": np.abs(random.standard_normal((8, 6))).astype("f4"),
        "last": -0.05 * np.abs(random.standard_normal((6, 1))).astype("f4"),
    }
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "first"], ["h"], "h"),
        onnx.helper.make_node("MatMul", ["h", "last"], ["s"], "s"),
        onnx.helper.make_node("Sigmoid", ["s"], ["y"], "y"),
    ]
    ends = [
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)]
        for name, shape in (("x", [1, 8]), ("y", [1, 1]))
    ]
    held = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "graph", *ends, held),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=9,
    )
    onnx.save(model, str(tmp_path / "float.onnx"))
    scheme = {**options_of(PER_CHANNEL), "op_types_to_quantize": ["MatMul", "Sigmoid"]}
    path = quantised(tmp_path / "float.onnx", tmp_path / "qdq.onnx", feeds=[row], **scheme)
    wrong = edited(path, tmp_path / "bad.onnx", first_scale=lambda s: s * np.float32(1.25))
    runs = [
        captured(file, tmp_path / file.stem, feeds=row)
        for file in (tmp_path / "float.onnx", path, wrong)
    ]
    assert whence.compare(*runs[:2]).status == "same"
    result = whence.compare(runs[0], runs[2])
    assert result.status == "different", result
    assert "first_quantized: scale x1.2" in result.findings[0].sentence
