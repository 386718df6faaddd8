"""Modules of torch against OpenVINO on the same weights, in float32 and with the hint for bfloat16."""

import importlib

import numpy as np
import pytest

import whence

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
ov = pytest.importorskip("openvino")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402

h, T = importlib.import_module("onnx.helper"), onnx.TensorProto


class Product(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / rows**0.5)

    def forward(self, x):
        return x @ self.weight


class UpAndDown(nn.Module):
    """A layer whose second matrix has the shape of the first one turned."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.ReLU()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def weights(module):
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


def product(module):
    return [("MatMul", ["x", "weight"], {})], weights(module)


def convolution(module):
    held = {f"c.{name}": value for name, value in weights(module[0]).items()}
    nodes = [("Conv", ["x", "c.weight", "c.bias"], {"kernel_shape": [3, 3]}), ("Relu", ["0"], {})]
    return nodes, held


def up_and_down(module):
    held = {n: np.ascontiguousarray(w.T) if w.ndim > 1 else w for n, w in weights(module).items()}
    return [
        ("LayerNormalization", ["x", "norm.weight", "norm.bias"], {"axis": -1}),
        ("MatMul", ["0", "up.weight"], {}),
        ("Add", ["1", "up.bias"], {}),
        ("Relu", ["2"], {}),
        ("MatMul", ["3", "down.weight"], {}),
        ("Add", ["4", "down.bias"], {}),
        ("Add", ["x", "5"], {}),
    ], held


CASES = {
    "product": (lambda: Product(5000, 24), product, (7, 5000)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(384, 40, 3), nn.ReLU()),
        convolution,
        (1, 384, 8, 9),
    ),
    "up_and_down": (lambda: nn.Sequential(UpAndDown(48)), lambda m: up_and_down(m[0]), (2, 9, 48)),
}


def compared(name, folder, hint, factor=1.0):
    """The module against its graph in OpenVINO, whose result is multiplied by a factor."""
    make, write, shape = CASES[name]
    torch.manual_seed(len(name))
    module = make().eval()
    nodes, held = write(module)
    nodes = [(kind, reads, f"{n}", more) for n, (kind, reads, more) in enumerate(nodes)]
    if factor != 1.0:
        nodes.append(("Mul", [nodes[-1][2], "factor"], "scaled", {}))
        held["factor"] = np.float32(factor)
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    graph = h.make_graph(
        [h.make_node(kind, reads, [made], **more) for kind, reads, made, more in nodes],
        "g",
        [h.make_tensor_value_info("x", T.FLOAT, shape)],
        [h.make_tensor_value_info(nodes[-1][2], T.FLOAT, None)],
        [onnx.numpy_helper.from_array(value, key) for key, value in held.items()],
    )
    path = folder / "model.onnx"
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=10), path)
    with whence.capture(module, folder / "torch"), torch.no_grad():
        module(torch.from_numpy(x))
    core = ov.Core()
    model = core.read_model(str(path))
    with whence.capture(model, folder / "openvino"):
        core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint})({"x": x})
    return whence.compare(str(folder / "torch"), str(folder / "openvino"))


@pytest.mark.parametrize("hint", ["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_another_kernel_is_no_fault(name, hint, tmp_path):
    result = compared(name, tmp_path, hint)
    assert result.status == "same", result.headline
    assert result.coverage.replayed == result.coverage.paired


@pytest.mark.parametrize("name", CASES)
def test_a_factor_of_one_in_ten_thousand_is_a_fault(name, tmp_path):
    assert compared(name, tmp_path, "f32", 1.0001).status == "different"


@pytest.mark.parametrize("name", CASES)
def test_a_factor_beyond_bfloat16_is_a_fault(name, tmp_path):
    assert compared(name, tmp_path, "bf16", 1.05).status == "different"
