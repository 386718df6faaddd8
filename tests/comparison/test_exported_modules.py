"""Torch modules against nodes that an exporter made of them: what it wrote says where a module's
result is, also behind a fault, where figures say nothing.
"""

import numpy as np
import pytest

import whence
from whence.store import open_run

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")
h, T = onnx.helper, onnx.TensorProto

pytestmark = pytest.mark.torch
WIDTH = 8
SCALE = float(np.sqrt(2 / np.pi))


class Act(torch.nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(SCALE * (x + 0.044715 * x**3)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "up": torch.nn.Linear(WIDTH, WIDTH),
                    "act": Act(),
                    "down": torch.nn.Linear(WIDTH, WIDTH, bias=False),
                }
            )
            for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block["down"](block["act"](block["up"](x)))
        return x


MODEL = Model().eval()
X = np.random.default_rng(2).standard_normal((5, WIDTH)).astype(np.float32)


def exported(style, cubed=0.044715, bias_in="up"):
    """The model as an exporter writes it. cubed: the constant of the first activation. bias_in: the
    module whose node adds the bias.
    """
    nodes, weights = [], []

    def value(array):
        weights.append(onnx.numpy_helper.from_array(np.float32(array), f"w{len(weights)}"))
        return weights[-1].name

    def node(path, op_type, *reads):
        module = "/".join(path)
        script = f"/{module}/{op_type}_{len(nodes)}_output_0"
        name = script if style == "script" else f"v{len(nodes)}"
        nodes.append(h.make_node(op_type, reads, [name]))
        if style == "export":
            scopes = ["", *path, f"{op_type.lower()}_{len(nodes)}"]
            nodes[-1].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(scopes))
        return name

    def paths(k, name):
        whole = f"blocks.{k}"
        return ("blocks", whole, name) if style == "script" else (f"{whole}.{name}",)

    x = "x"
    for k, block in enumerate(MODEL.blocks):
        up, act, down, own = (paths(k, n) for n in ("up", "act", "down", "own"))
        state = {n: p.detach().numpy() for n, p in block.named_parameters()}
        y = node(up, "MatMul", x, value(state["up.weight"].T))
        y = node(up if bias_in == "up" else act, "Add", y, value(state["up.bias"]))
        cube = node(act, "Pow", y, value(3.0))
        inner = node(act, "Mul", cube, value(cubed if k == 0 else 0.044715))
        inner = node(act, "Mul", node(act, "Add", y, inner), value(SCALE))
        inner = node(act, "Add", node(act, "Tanh", inner), value(1.0))
        y = node(act, "Mul", node(act, "Mul", y, value(0.5)), inner)
        y = node(down, "MatMul", y, value(state["down.weight"].T))
        x = node(own[:-1] or ("own",), "Add", x, y)
    nodes.append(h.make_node("Identity", [x], ["y"]))
    ends = [h.make_tensor_value_info(n, T.FLOAT, list(X.shape)) for n in ("x", "y")]
    graph = h.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=10)


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    place = tmp_path_factory.mktemp("module") / "run"
    with torch.no_grad(), whence.capture(MODEL, place):
        MODEL(torch.from_numpy(X))
    return place


def captured(place, model):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    with whence.capture(session, place):
        session.run(None, {"x": X})
    return place


@pytest.mark.parametrize("style", ["export", "script"])
def test_nodes_say_of_which_module_they_are(tmp_path, style):
    run = open_run(captured(tmp_path / "run", exported(style)))
    paths = {
        call.scope: [n for n in call.notes if n.startswith("of module ")] for call in run.calls
    }
    assert ["of module blocks.0.act"] in paths.values()
    assert ["of module blocks.1.down"] in paths.values()


@pytest.mark.parametrize("style", ["export", "script"])
def test_a_fault_is_in_the_module_that_the_exporter_names(tmp_path, module, style):
    assert whence.compare(module, captured(tmp_path / "clean", exported(style))).status == "same"
    faulty = captured(tmp_path / "faulty", exported(style, cubed=0.05))
    result = whence.compare(module, faulty)
    assert [finding.name for finding in result.findings] == ["blocks.0.act"]
    # other operators are how an exporter writes the same: none of them is to blame
    assert "where the target runs" not in result.findings[0].sentence
    assert "only in the target" not in result.findings[0].sentence


def test_without_an_exporter_s_word_the_part_is_larger(tmp_path, module):
    """What the names are worth: the same fault in nodes that say nothing."""
    result = whence.compare(module, captured(tmp_path / "faulty", exported("none", cubed=0.05)))
    assert result.findings[0].name != "blocks.0.act"
    assert "blocks.0.act" in result.findings[0].name


def test_a_bias_that_another_module_adds_is_no_fault(tmp_path, module):
    """Behind a fault, the product without its bias is not what the module returned."""
    model = exported("export", cubed=0.05, bias_in="act")
    findings = whence.compare(module, captured(tmp_path / "faulty", model)).findings
    assert len(findings) == 1
    assert "blocks.0.act" in findings[0].name
