"""An exported model against the torch model that it was made of."""

import numpy as np
import pytest

import inside
import whence
from whence.errors import UsageError

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

pytestmark = pytest.mark.torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.norm(x))


def make_model():
    torch.manual_seed(0)
    return Net().eval()


def exported(path, epsilon=1e-5, factor=1.0, extents=(3, 8)):
    """As torch exports it, written by hand: exporting takes seconds, and needs onnxscript."""
    weights = {k: v.numpy() * np.float32(factor) for k, v in make_model().state_dict().items()}
    nodes = [
        helper.make_node(
            "LayerNormalization", ["x", "norm.weight", "norm.bias"], ["layer_norm"], epsilon=epsilon
        ),
        helper.make_node("Gemm", ["layer_norm", "fc.weight", "fc.bias"], ["linear"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, extents)],
        [helper.make_tensor_value_info("linear", TensorProto.FLOAT, [extents[0], 4])],
        [numpy_helper.from_array(w, k) for k, w in weights.items()],
    )
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return str(path)


def note(result):
    return next(n for n in result.notes if "weights of the model" in n)


@pytest.mark.parametrize("inputs", [None, "given"])
def test_a_right_export_is_the_same(inputs, tmp_path):
    values = None if inputs is None else torch.linspace(-1, 1, 24).reshape(3, 8)
    file = exported(tmp_path / "m.onnx")
    result = whence.export_check(file, make_model, values, output=tmp_path / "cmp")
    assert result.status == "same", result.headline
    assert note(result).startswith("4 of 4 weights of the model are in the file, bit for bit")
    assert (tmp_path / "cmp" / "reference" / "run.json").is_file()
    again = whence.load_comparison(tmp_path / "cmp")
    assert again.status == "same"
    assert note(again) == note(result)


def test_an_attribute_that_differs_is_a_fault(tmp_path):
    result = whence.export_check(exported(tmp_path / "m.onnx", epsilon=1e-1), make_model())
    assert result.status == "different"
    assert result.findings[0].op_type == "LayerNorm"
    assert "both runs are deleted" in result.notes[-1]
    assert result.next == ()


def test_weights_that_differ_are_said(tmp_path):
    result = whence.export_check(exported(tmp_path / "m.onnx", factor=1.01), make_model)
    assert result.status == "different"
    assert "norm.weight differs (rel_l2 0.01)" in note(result)


def test_open_extents_are_two(tmp_path):
    file = exported(tmp_path / "m.onnx", extents=("batch", 8))
    result = whence.export_check(file, make_model, output=tmp_path / "cmp")
    assert result.status == "same"
    run = whence.open_run(str(tmp_path / "cmp" / "reference"))
    root = next(c for c in run.calls if c.parent == -1)
    assert run.records[root.slots("input")[0].record].shape == (2, 8)


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(UsageError, match="give its inputs"):
        whence.export_check(None, make_model)
    with pytest.raises(UsageError, match="the file has its own"):
        whence.export_check(exported(tmp_path / "m.onnx"), make_model, opset=18)
    with pytest.raises(UsageError, match="hold 2 tensors, and the file takes 1: x"):
        whence.export_check(exported(tmp_path / "n.onnx"), make_model, {"z": [torch.zeros(3)] * 2})


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "exported_net.py").write_text(
        "import torch\n"
        "def make_model():\n"
        "    torch.manual_seed(0)\n"
        "    net = torch.nn.Sequential()\n"
        "    net.add_module('norm', torch.nn.LayerNorm(8))\n"
        "    net.add_module('fc', torch.nn.Linear(8, 4))\n"
        "    return net.eval()\n"
        "def make_inputs():\n"
        "    return torch.ones(3, 8).cumsum(1)\n"
    )
    exported(tmp_path / "m.onnx", epsilon=1e-1)
    words = ["m.onnx", "--model", "exported_net:make_model", "--inputs", "exported_net:make_inputs"]
    done = inside.whence(tmp_path, "export-check", *words, "-o", "cmp", "--optimisation", "off")
    assert done.returncode == 1, done.stderr
    assert "norm" in done.stdout
    assert (tmp_path / "cmp" / "summary.json").is_file()
    done = inside.whence(tmp_path, "export-check", *words, "-o", "cmp")
    assert done.returncode == 3
