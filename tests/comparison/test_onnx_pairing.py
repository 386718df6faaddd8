"""Graphs of ONNX Runtime against other forms of the same function: other optimisations, another
export, the torch module. Sound ones are the same with every call replayed; a wrong node is named.
"""

import numpy as np
import pytest

import whence
from whence.readers import Building
from whence.records.marks import Mark, mark

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")
h, T = onnx.helper, onnx.TensorProto

pytestmark = pytest.mark.torch
WIDTH, HEADS = 16, 4
RANDOM = np.random.default_rng(1)


def drawn(*shape):
    return (RANDOM.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


class Block(torch.nn.Module):
    """Attention and a residual sum, then a norm and GELU; one module is called twice."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up = torch.nn.Linear(WIDTH, WIDTH)
        self.act = torch.nn.GELU()
        self.unused = torch.nn.Linear(WIDTH, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.from_numpy(drawn(*parameter.shape)))
            self.norm.weight += 1

    def forward(self, x):
        y = self.norm(x)
        query, key, value = (
            project(y).view(2, 6, HEADS, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-1, -2) / 2).softmax(-1)
        x = x + (weights @ value).transpose(1, 2).reshape(2, 6, WIDTH)
        self.unused(x)
        return self.act(self.up(self.act(self.norm(x))))


MODULE = Block()
X = drawn(2, 6, WIDTH)


class Exported:
    """The module as a graph. prefix: of names. is_written_out: are norms and GELUs of plain
    operators, and is the product of a projection no Gemm?
    """

    def __init__(self, prefix, is_written_out, **faults):
        self.prefix, self.is_written_out, self.faults = prefix, is_written_out, faults
        self.nodes, self.initializers = [], []
        self.weights = {k: v.detach().numpy() for k, v in MODULE.state_dict().items()}

    def constant(self, array):
        name = f"{self.prefix}c{len(self.initializers)}"
        self.initializers.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op_type, *reads, **attributes):
        made = f"{self.prefix}{len(self.nodes)}"
        reads = [r if isinstance(r, str) else self.constant(r) for r in reads]
        self.nodes.append(h.make_node(op_type, reads, [made], **attributes))
        return made

    def linear(self, x, name):
        weight = self.weights[f"{name}.weight"].copy()
        if self.faults.get("weight") == name:
            weight[3, 5] += np.float32(0.1)
        if self.is_written_out:
            product = self.node("MatMul", x, np.ascontiguousarray(weight.T))
            return self.node("Add", self.weights[f"{name}.bias"], product)
        rows = self.node("Reshape", x, np.array([-1, WIDTH]))
        made = self.node("Gemm", rows, weight, self.weights[f"{name}.bias"], transB=1)
        return self.node("Reshape", made, np.array([2, 6, WIDTH]))

    def norm(self, x, epsilon):
        scale, bias = self.weights["norm.weight"], self.weights["norm.bias"]
        if not self.is_written_out:
            return self.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=epsilon)
        centred = self.node("Sub", x, self.node("ReduceMean", x, axes=[-1]))
        squares = self.node("Pow", centred, np.float32(2))
        variance = self.node(
            "Add", self.node("ReduceMean", squares, axes=[-1]), np.float32(epsilon)
        )
        normed = self.node("Div", centred, self.node("Sqrt", variance))
        return self.node("Add", self.node("Mul", normed, scale), bias)

    def gelu(self, x):
        error = self.node("Erf", self.node("Div", x, np.float32(np.sqrt(2))))
        return self.node(
            "Mul", self.node("Mul", x, self.node("Add", error, np.float32(1))), np.float32(0.5)
        )

    def heads(self, x, perm):
        return self.node(
            "Transpose", self.node("Reshape", x, np.array([2, 6, HEADS, -1])), perm=perm
        )

    def model(self):
        y = self.norm("x", 1e-5)
        query = self.heads(self.linear(y, "query"), (0, 2, 1, 3))
        key = self.heads(self.linear(y, "key"), (0, 2, 3, 1))
        value = self.heads(self.linear(y, "value"), (0, 2, 1, 3))
        scores = self.node("Div", self.node("MatMul", query, key), np.float32(2))
        weights = self.node("Softmax", scores, axis=self.faults.get("axis", -1))
        mixed = self.node("Transpose", self.node("MatMul", weights, value), perm=(0, 2, 1, 3))
        total = self.node("Add", "x", self.node("Reshape", mixed, np.array([2, 6, WIDTH])))
        y = self.gelu(self.norm(total, self.faults.get("epsilon", 1e-5)))
        y = self.gelu(self.linear(y, "up"))
        graph = h.make_graph(
            [*self.nodes, h.make_node("Identity", [y], ["y"])],
            "graph",
            [h.make_tensor_value_info("x", T.FLOAT, [2, 6, WIDTH])],
            [h.make_tensor_value_info("y", T.FLOAT, [2, 6, WIDTH])],
            self.initializers,
        )
        return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)


def captured(place, model, level="ORT_DISABLE_ALL"):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    with whence.capture(session, str(place)):
        session.run(None, {"x": X})
    return str(place)


def of_module(place, level="modules"):
    with torch.no_grad(), whence.capture(MODULE, str(place), level=level):
        MODULE(torch.from_numpy(X))
    return str(place)


def assert_same(reference, target):
    result = whence.compare(reference, target)
    assert (result.status, result.incomparable) == ("same", 0)
    assert result.coverage.replayed == result.coverage.paired == result.coverage.calls
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    plain, written_out = Exported("a", False).model(), Exported("b", True).model()
    return {
        "module": of_module(place / "module"),
        "op": of_module(place / "op", "op"),
        "plain": captured(place / "plain", plain),
        "plain all": captured(place / "all", plain, "ORT_ENABLE_ALL"),
        "written out": captured(place / "written", written_out),
        "written out all": captured(place / "written_all", written_out, "ORT_ENABLE_ALL"),
    }


def test_optimisations_are_replayed_as_a_whole(runs):
    for name in ("plain", "written out"):
        assert_same(runs[name], runs[f"{name} all"])
        assert_same(runs[f"{name} all"], runs[name])


def test_two_exports_are_paired_by_values(runs):
    result = assert_same(runs["plain"], runs["written out"])
    assert any("values that correspond" in note for note in result.plan.notes)
    assert_same(runs["written out all"], runs["plain"])


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_module_against_its_graph(runs, level):
    for name in ("plain", "written out all"):
        assert_same(runs[level], runs[name])


@pytest.mark.parametrize(
    ("fault", "of_module_", "of_graph"),
    [
        ({"weight": "key"}, "key", "MatMul"),
        ({"axis": 1}, "code of Block", "Softmax"),
        ({"epsilon": 1e-2}, "norm", "ReduceMean"),
    ],
)
def test_a_fault_is_named(tmp_path, runs, fault, of_module_, of_graph):
    """In a fused graph, in another export, and against the module that was exported."""
    target = captured(tmp_path / "faulty", Exported("b", True, **fault).model(), "ORT_ENABLE_ALL")
    for reference, word in (("written out", of_graph), ("plain", ""), ("module", of_module_)):
        result = whence.compare(runs[reference], target)
        assert result.status == "different"
        finding = result.findings[0]
        assert word in finding.name or word in finding.op_type, finding.name
        if reference != "plain":
            assert len(result.findings) == 1


# ---- one name for two things


def squeezed(folder, is_squeezed, factor=1.0):
    """A run of two products, whose result only one form of the graph hands on with an axis less:
    that changes what the name of its output stands for, and no other name.
    """
    random = np.random.default_rng(3)
    weights = [random.standard_normal((4, 4)).astype(np.float32) for _ in range(3)]
    weights[1] *= np.float32(factor)
    names = [h.make_tensor_value_info("x", T.FLOAT, [1, 2, 4])]
    nodes = []
    for k in range(3):
        last = "squeezed" if is_squeezed else "y"
        nodes.append(h.make_node("MatMul", [f"r{k - 1}" if k else "x", f"w{k}"], [f"m{k}"]))
        nodes.append(h.make_node("Relu", [f"m{k}"], [f"r{k}" if k < 2 else last]))
    held = [onnx.numpy_helper.from_array(w, f"w{k}") for k, w in enumerate(weights)]
    if is_squeezed:
        held.append(onnx.numpy_helper.from_array(np.array([0]), "axes"))
        nodes.append(h.make_node("Squeeze", [last, "axes"], ["y"]))
    shape = [2, 4] if is_squeezed else [1, 2, 4]
    graph = h.make_graph(nodes, "g", names, [h.make_tensor_value_info("y", T.FLOAT, shape)], held)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with whence.capture(session, folder):
        session.run(None, {"x": np.random.default_rng(4).random((1, 2, 4), dtype=np.float32)})
    return folder


@pytest.mark.parametrize("first", [False, True])
def test_of_an_output_that_another_node_hands_on_the_shape_alone_differs(tmp_path, first):
    reference = squeezed(tmp_path / "r", first)
    other = whence.compare(reference, squeezed(tmp_path / "t", not first))
    assert [(f.name, f.slot, f.verdict) for f in other.findings] == [
        ("model", "output.y", "structural")
    ]
    assert "in the reference, for inputs of the same shapes" in other.findings[0].sentence
    wrong = whence.compare(reference, squeezed(tmp_path / "f", not first, factor=1.01))
    assert [f.name for f in wrong.findings] == ["m1"]
    assert "scaled by 1.01" in wrong.findings[0].sentence


def test_what_a_runtime_does_not_show_of_the_last_move_is_no_error():
    def run(is_shown):
        building = Building("values.py", kind="test")
        x = building.array(X)
        root = building.call("model", op_type="InferenceSession", kind="module", inputs=[x])
        twice = building.array(X * 2)
        said = [mark(Mark.OPSET, "21")]
        names = {"inputs": [x], "outputs": [twice], "parent": root, "notes": said}
        building.call("twice" if is_shown else "double", op_type="Mul", **names)
        out = building.array(2 * X.reshape(12, WIDTH))
        reads = [twice] if is_shown else []
        building.call("y", op_type="Reshape", inputs=reads, outputs=[out], parent=root, notes=said)
        building.fill(root, outputs=[out])
        return building.run()

    result = whence.compare(run(True), run(False))
    assert (result.status, result.findings, result.coverage.paired > 0) == ("same", (), True)
