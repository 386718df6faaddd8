"""Modules that return several tensors, as a rotary embedding does, against nodes of their export: a
fault inside is theirs, not that of all that reads them.
"""

import numpy as np
import pytest

import whence

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")
h, T = onnx.helper, onnx.TensorProto

pytestmark = pytest.mark.torch
TOKENS, WIDTH = 6, 8


class Angles(torch.nn.Module):
    """The cosines and sines of positions times frequencies; these are kept twice, as transformers
    does.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 0.9 ** torch.arange(WIDTH))
        self.register_buffer("original", self.frequencies.clone())

    def forward(self, positions):
        angles = positions * self.frequencies
        return angles.cos(), angles.sin()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.angles = Angles()
        self.keep, self.turn = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x, positions):
        cos, sin = self.angles(positions)
        y = self.turn(x)
        kept = self.keep(x).reshape(-1, cos.shape[-1])  # of the cosines only the extent
        return kept + 1, torch.tanh(y * cos + y.flip(-1) * sin)


MODEL = Model().eval()
X = np.random.default_rng(2).standard_normal((TOKENS, WIDTH)).astype(np.float32)
POSITIONS = np.arange(TOKENS, dtype=np.float32)[:, None]


def exported(frequency=1.0, factors=("cos", "sin")):
    """The model as an exporter writes it, the sines first. frequency: a factor of all of them.
    factors: what the vectors and the flipped ones are multiplied with.
    """
    weights = {
        "frequencies": MODEL.angles.frequencies.numpy() * np.float32(frequency),
        "keep_w": MODEL.keep.weight.detach().numpy().T,
        "turn_w": MODEL.turn.weight.detach().numpy().T,
        "one": np.float32(1),
        **{k: np.array([v]) for k, v in {"start": -1, "end": -WIDTH - 1, "axis": -1}.items()},
    }
    nodes = [
        ("angles", "Mul", ["positions", "frequencies"], "turned"),
        ("angles", "Sin", ["turned"], "sin"),
        ("angles", "Cos", ["turned"], "cos"),
        ("turn", "MatMul", ["x", "turn_w"], "y"),
        ("keep", "MatMul", ["x", "keep_w"], "kept"),
        ("", "Add", ["kept", "one"], "first"),
        ("", "Mul", ["y", factors[0]], "a"),
        ("", "Slice", ["y", "start", "end", "axis", "axis"], "flipped"),
        ("", "Mul", ["flipped", factors[1]], "b"),
        ("", "Add", ["a", "b"], "sum"),
        ("", "Tanh", ["sum"], "second"),
    ]
    made = []
    for module, kind, reads, name in nodes:
        made.append(h.make_node(kind, reads, [name]))
        scopes = [*dict.fromkeys(("", module)), name]
        made[-1].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(scopes))
    ends = [
        h.make_tensor_value_info(n, T.FLOAT, list(shape))
        for n, shape in (("x", X.shape), ("positions", POSITIONS.shape))
    ]
    results = [h.make_tensor_value_info(n, T.FLOAT, list(X.shape)) for n in ("first", "second")]
    held = [onnx.numpy_helper.from_array(np.ascontiguousarray(a), n) for n, a in weights.items()]
    graph = h.make_graph(made, "g", ends, results, held)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=10)


def compared(place, model):
    with torch.no_grad(), whence.capture(MODEL, place / "module"):
        MODEL(torch.from_numpy(X), torch.from_numpy(POSITIONS))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with whence.capture(session, place / "engine"):
        session.run(None, {"x": X, "positions": POSITIONS})
    return whence.compare(place / "module", place / "engine")


def test_a_module_with_two_results_is_the_same(tmp_path):
    result = compared(tmp_path, exported())
    assert result.status == "same"
    assert result.coverage.replayed == result.coverage.calls


def test_wrong_frequencies_are_in_the_module_that_holds_them(tmp_path):
    result = compared(tmp_path, exported(frequency=1.05))
    assert [finding.name for finding in result.findings] == ["angles"]


def test_results_that_change_places_are_wrong_where_they_are_read(tmp_path):
    """Sines in the place of cosines: the order of a module's results is not what pairs them."""
    result = compared(tmp_path, exported(factors=("sin", "cos")))
    assert result.status == "different"
    assert "angles" not in result.findings[0].name.split("+")


def test_both_faults_are_found(tmp_path):
    result = compared(tmp_path, exported(frequency=1.05, factors=("sin", "cos")))
    names = [finding.name.split("+") for finding in result.findings]
    assert names[0] == ["angles"]
    assert len(names) == 2
