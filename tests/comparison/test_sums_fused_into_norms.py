"""A module that ends in a sum, which the graph computes in the norm behind it: what the module
returned is nowhere in the graph, and its last product is not it.
"""

import numpy as np
import pytest

import whence

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")
h, T = onnx.helper, onnx.TensorProto

pytestmark = pytest.mark.torch
WIDTH = 8


class Block(torch.nn.Module):
    """One call that reads two weights."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.down = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.relu(x @ self.up) @ self.down


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.norm = Block(), torch.nn.LayerNorm(WIDTH)
        torch.nn.init.normal_(self.norm.weight)
        torch.nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return torch.tanh(self.norm(self.block(x)))


MODEL = Model().eval()
X = np.random.default_rng(2).standard_normal((5, WIDTH)).astype(np.float32)


def exported(epsilon):
    state = {n: p.detach().numpy() for n, p in MODEL.named_parameters()}
    weights = {
        "up": state["block.up"],
        "down": state["block.down"],
        "gamma": state["norm.weight"],
        "beta": state["norm.bias"],
    }
    nodes = [
        h.make_node("MatMul", ["x", "up"], ["a"]),
        h.make_node("Relu", ["a"], ["b"]),
        h.make_node("MatMul", ["b", "down"], ["c"]),
        h.make_node(
            "SkipLayerNormalization", ["x", "c", "gamma", "beta"], ["n"],
            domain="com.microsoft", epsilon=epsilon,
        ),
        h.make_node("Tanh", ["n"], ["y"]),
    ]  # fmt: skip
    ends = [h.make_tensor_value_info(n, T.FLOAT, list(X.shape)) for n in "xy"]
    held = [onnx.numpy_helper.from_array(a, n) for n, a in weights.items()]
    graph = h.make_graph(nodes, "g", ends[:1], ends[1:], held)
    opsets = [h.make_opsetid("", 17), h.make_opsetid("com.microsoft", 1)]
    return h.make_model(graph, opset_imports=opsets, ir_version=10)


def compared(place, epsilon):
    with torch.no_grad(), whence.capture(MODEL, place / "module"):
        MODEL(torch.from_numpy(X))
    session = ort.InferenceSession(
        exported(epsilon).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    with whence.capture(session, place / "engine"):
        session.run(None, {"x": X})
    return whence.compare(place / "module", place / "engine")


def test_the_module_and_the_norm_are_taken_together(tmp_path):
    result = compared(tmp_path, 1e-5)
    assert result.status == "same"
    assert result.coverage.replayed == result.coverage.calls


def test_a_fault_in_the_norm_is_not_in_the_module_alone(tmp_path):
    """Behind it nothing is the same any more, and the last product reads what the module reads."""
    names = [finding.name.split("+") for finding in compared(tmp_path, 0.5).findings]
    assert names
    assert "norm" in names[0]
