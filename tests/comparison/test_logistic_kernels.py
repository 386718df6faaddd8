"""ONNX Runtime computes the logistic function to a rounding of 1, torch to one of the result: far
below zero they differ by all that the result is, and both are right.
"""

import numpy as np
import pytest

import whence

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")
h, T = onnx.helper, onnx.TensorProto

pytestmark = pytest.mark.torch
ROWS, WIDTH = 4, 64
X = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)


class Model(torch.nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x) + 1e-9


def exported(gated, cut=None):
    """The function, or the input times it, which the runtime fuses. cut: below it the input is cut
    off.
    """
    nodes = [("Sigmoid", ["cut" if cut else "x"], "s")]
    if cut:
        nodes.insert(0, ("Max", ["x", "least"], "cut"))
    nodes += [("Mul", ["x", "s"], "act")] if gated else [("Identity", ["s"], "act")]
    nodes.append(("Add", ["act", "tiny"], "y"))
    weights = {"tiny": np.float32(1e-9), "least": np.float32(cut or 0)}
    ends = [h.make_tensor_value_info(n, T.FLOAT, [ROWS, WIDTH]) for n in "xy"]
    graph = h.make_graph(
        [h.make_node(kind, reads, [name]) for kind, reads, name in nodes],
        "g", ends[:1], ends[1:],
        [onnx.numpy_helper.from_array(np.array(a), n) for n, a in weights.items()],
    )  # fmt: skip
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=10)


def compared(place, gated, low, cut=None):
    x = X.copy()
    x[1] /= 100  # a row whose rounding is small
    x[1, ::9] = low
    model = Model(torch.nn.SiLU() if gated else torch.nn.Sigmoid())
    with torch.no_grad(), whence.capture(model, place / "module"):
        model(torch.from_numpy(x))
    session = ort.InferenceSession(
        exported(gated, cut).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    with whence.capture(session, place / "engine"):
        session.run(None, {"x": x})
    return whence.compare(place / "module", place / "engine")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("low", [-15.0, -17.0, -20.0])
def test_far_below_zero_two_kernels_agree_to_a_rounding_of_one(tmp_path, gated, low):
    assert compared(tmp_path, gated, low).status == "same"


@pytest.mark.parametrize("cut", [-8.0, -12.0])
def test_an_input_that_is_cut_off_sooner_is_a_fault(tmp_path, cut):
    """It differs by 3e-4 or 6e-6 of 1, and looks the same otherwise."""
    result = compared(tmp_path, True, -20.0, cut)
    assert result.status == "different"
    assert result.findings[0].name.split("+")[0] == "act"


@pytest.mark.parametrize(("low", "expected"), [(-30.0, 1.0), (0.0, 0.0)])
def test_a_result_below_the_rounding_of_one_is_known_to_be_rounding(tmp_path, low, expected):
    from whence.comparison.programs.onnx_attributes import with_node_programs
    from whence.comparison.replays.side import ReplaySource

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        exported(gated=False).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    with whence.capture(session, str(tmp_path / "run")):
        session.run(None, {"x": X + np.float32(low)})
    run = with_node_programs(whence.open_run(tmp_path / "run"))
    (made,) = (c.slots("output")[0].record for c in run.calls if c.op_type == "Sigmoid")
    own = ReplaySource(run).own_error(made)
    assert own == pytest.approx(expected, abs=0.5 if expected else 1e-5)
