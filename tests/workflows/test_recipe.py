"""`whence recipe`: which quantised layers to leave in float, measured in runs of the program, and the
lines for the quantiser, which takes them.
"""

import csv
import json
import runpy
import textwrap
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import warm
import whence
from inside import or_outside
from whence import api
from whence.errors import UsageError
from whence.report.html.payload import payload
from whence.report.recipe import recipe as text_of
from whence.workflows import recipe
from whence.workflows.recipe import TOOLS

pytestmark = pytest.mark.torch

PROGRAM = textwrap.dedent("""
    import sys
    import torch
    from torch import nn
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)), nn.Linear(32, 5))
    with torch.no_grad():
        model[2][0].weight[3, 5] = 40.0  # one step a row: the others of this row are lost
        if len(sys.argv) > 1:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    step = module.weight.abs().amax(1, keepdim=True) / 127
                    module.weight.copy_((module.weight / step).round() * step)
        model(torch.linspace(-2, 2, 8 * 32).reshape(8, 32).sin())
""")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "program.py").write_text(PROGRAM)
    for name, words in (("float", ()), ("int8", ("int8",))):
        ran = or_outside(folder, "run", "-o", name, "--", warm.TORCH, "program.py", *words)
        assert ran.returncode == 0, ran.stderr
    assert or_outside(folder, "compare", "float", "int8", "-o", "cmp").returncode == 0
    return folder


def test_the_bad_layer_is_measured_first(folder, monkeypatch):
    monkeypatch.chdir(folder)
    result = whence.recipe("cmp", seconds=600)
    bad = result.leave[0]
    assert (bad.name, result.tool) == ("2.0", "torchao")
    # The same by hand: the model with the other layers quantised, against the float one.
    assert bad.measured == pytest.approx(by_hand(folder, "2.0"), rel=1e-3)
    assert all(bad.measured >= each.measured for each in (*result.leave, *result.others))
    assert result.untried == 0 and result.left < result.error
    assert "a weight of row 3" in bad.cure
    # What was measured stays with the comparison: for its page, its tables, and as CSV.
    kept = {cost.name: cost for cost in whence.load_comparison("cmp").layer_costs}
    assert kept["2.0"].measured == bad.measured and kept["2.0"].left_in_float
    assert {name: cost.measured for name, cost in kept.items()} == {
        each.name: each.measured for each in (*result.leave, *result.others)
    }
    with Path("cmp/layers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"]: float(row["measured"]) for row in rows} == {
        name: cost.measured for name, cost in kept.items()
    }
    shown_on_page = payload(api.page("cmp", details=0))["answer"]["layer_costs"]
    assert [cost["name"] for cost in shown_on_page] == [row["name"] for row in rows]
    shown = text_of(result)
    assert "LEAVE IN FLOAT     2.0   SQNR" in shown and 'left_in_float = {"2.0"' in shown


def by_hand(folder, name):
    def outputs(quantised, skip=""):
        scope = {"torch": torch, "nn": nn}
        lines = PROGRAM.replace("isinstance(module, nn.Linear)", "module in chosen")
        lines = lines.replace("for module in model.modules():", CHOSEN.format(skip=skip))
        lines = lines.replace("len(sys.argv) > 1", str(quantised))
        lines = lines.replace("    model(torch.linspace", "    out = model(torch.linspace")
        return run_lines(folder, lines, scope)["out"].double()

    right = outputs(False)
    whole, left = ((outputs(True, skip) - right).square().sum() for skip in ("", name))
    return float(1 - left / whole)


CHOSEN = """chosen = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != {skip!r}]
        for module in model.modules():"""


def test_without_time_estimates_are_all_there_is(folder, monkeypatch):
    monkeypatch.chdir(folder)
    result = whence.recipe("cmp", seconds=0)
    assert (result.runs, result.leave, result.untried) == (0, (), 5)


def test_a_comparison_without_quantised_layers_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="no layer of float is quantised against float"):
        whence.recipe(whence.compare("float", "float"))
    ran = or_outside(folder, "recipe", "cmp", "--tool", "none")
    assert ran.returncode == 3 and "torchao" in ran.stderr


def test_the_command_line_answers_in_json(folder):
    ran = or_outside(folder, "recipe", "cmp", "--seconds", "0", "--format", "json")
    assert json.loads(ran.stdout)["tool"] == "torchao" and ran.returncode == 0


# ---- ONNX Runtime: nodes in float


def onnx_models():
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime.quantization")
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "comparison"))
    import quantised_models

    return quantised_models


class Notes:
    def __init__(self):
        self.told = []

    def note(self, kind, text, scope=""):
        self.told.append((kind, text))


def in_float(tmp_path, form, chosen, **options):
    """(outputs of the model with the nodes in float, of the one that the quantiser makes without
    them or None, notes).
    """
    models = onnx_models()
    import onnx
    import onnxruntime

    from whence.instrument.onnxruntime.in_float import LayersInFloat

    onnx.save(models.Net().model(), str(tmp_path / "float.onnx"))
    reference = whence.open_run(models.captured(tmp_path / "float.onnx", tmp_path / "ref"))

    def quantised(name, **more):
        path = tmp_path / name
        if form == "dynamic":
            from onnxruntime.quantization import quantize_dynamic

            quantize_dynamic(str(tmp_path / "float.onnx"), str(path), **more)
        else:
            from onnxruntime.quantization import QuantFormat

            models.quantised(tmp_path / "float.onnx", path, quant_format=QuantFormat[form], **more)
        return path

    def run(model):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return session.run(None, models.inputs(9))[0]

    notes = Notes()
    layers = LayersInFloat(notes, reference, chosen)
    got = run(layers.model(str(quantised("all.onnx"))))
    layers.finish()
    left_out = recipe._named_as(
        [name for name in chosen if name != "a.Relu"],
        recipe._nodes_of(reference, tmp_path / "float.onnx"),
        "onnxruntime",
        [],
    )
    return got, run(str(quantised("without.onnx", nodes_to_exclude=left_out))), notes.told


@pytest.mark.parametrize("form", ["QDQ", "dynamic"])
@pytest.mark.parametrize("chosen", [("b.Conv",), ("y",), ("a.Conv", "a.Relu"), ("b.Conv", "y")])
def test_nodes_in_float_are_what_the_quantiser_leaves_out(tmp_path, form, chosen):
    """The quantiser itself is the oracle: it makes the model anew without these nodes."""
    found, expected, notes = in_float(tmp_path, form, chosen)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert {kind for kind, _ in notes} == {"patch"}


def test_fused_nodes_come_to_float_between_their_codes(tmp_path):
    found, expected, notes = in_float(tmp_path, "QOperator", ("b.Conv",))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert notes == [("patch", "b.Conv: computes in float")]


def test_a_node_that_is_not_there_is_noted(tmp_path):
    _, _, notes = in_float(tmp_path, "QDQ", ("flat.Flatten",))
    assert notes == [
        ("patch-refused", "flat.Flatten was not patched: no session has a node of this name")
    ]


# ---- what tools take


def run_lines(folder, lines, scope):
    (folder / "lines.py").write_text(lines)
    return runpy.run_path(str(folder / "lines.py"), init_globals=scope)


def test_torchao_takes_the_lines(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    scope = {
        "torch": torch,
        "model": model,
        "quantize_": quantization.quantize_,
        "config": quantization.Int8WeightOnlyConfig(),
    }
    run_lines(tmp_path, TOOLS["torchao"](["1"]), scope)
    assert type(model[0].weight) is not type(model[1].weight)
    assert type(model[1].weight) is nn.Parameter


def test_compressed_tensors_takes_the_line():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    import yaml

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    lines = "quant_method: compressed-tensors\nformat: fakequant\nconfig_groups: {g: {targets: [Linear], weights: {num_bits: 8}}}\n"
    config = yaml.safe_load(lines + TOOLS["compressed-tensors"](["1"]))
    quantization.apply_quantization_config(model, quantization.QuantizationConfig(**config))
    assert hasattr(model[0], "quantization_scheme")
    assert not hasattr(model[1], "quantization_scheme")


def test_nncf_takes_the_line(tmp_path):
    nncf = pytest.importorskip("nncf")
    models = onnx_models()

    scope = run_lines(tmp_path, TOOLS["nncf"](["/b/Conv_output_0_node"]), {"nncf": nncf})
    quantised = nncf.quantize(
        models.Net().model(), nncf.Dataset([models.inputs(0)]), ignored_scope=scope["ignored_scope"]
    )
    by_name = {node.name: node for node in quantised.graph.node}
    makers = {value: node for node in quantised.graph.node for value in node.output}
    weights = [by_name[f"/{n}/Conv_output_0_node"].input[1] for n in "ab"]
    assert [value in makers for value in weights] == [True, False]


@pytest.mark.parametrize("tool", ["modelopt", "msmodelslim"])
def test_the_other_tools_lines_are_python_and_yaml(tmp_path, tool):
    import yaml

    line = TOOLS[tool](["layers.0.fc1", "head"])
    if tool == "msmodelslim":
        assert yaml.safe_load(line) == {"exclude": ["layers.0.fc1", "head"]}
        return
    config = {"quant_cfg": []}
    run_lines(tmp_path, line, {"config": config})
    assert config["quant_cfg"][1] == {"quantizer_name": "head.*", "enable": False}


def test_the_command_offers_every_tool():
    from whence.cli import recipe as verb

    assert tuple(TOOLS) == verb.TOOLS


def test_nothing_measured_is_not_nothing_worth_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    shown = text_of(whence.recipe("cmp", seconds=0))
    assert "LEAVE IN FLOAT     not known: no layer was measured" in shown
