"""Exports as people have them: quantised, reduced to 16 bits, or run by another engine."""

import importlib
import logging
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import whence
from whence.align.layout import search

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto as T  # noqa: E402
from onnx import helper as h  # noqa: E402
from onnx import numpy_helper  # noqa: E402

OFF, ALL = (getattr(ort.GraphOptimizationLevel, f"ORT_{n}_ALL") for n in ("DISABLE", "ENABLE"))
TYPES = {"float32": T.FLOAT, "float64": T.DOUBLE, "int64": T.INT64, "float16": T.FLOAT16}


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype("f4")


def node(kind, reads, makes, **attributes):
    return h.make_node(kind, reads.split(), [makes], makes, **attributes)


def saved(path, nodes, given, outputs, *, grows=False, **held):
    """A file. given: the inputs, whose first axis grows or not; outputs: (name, shape, dtype) of
    each; held: initialisers.
    """
    ends = [h.make_tensor_value_info(n, TYPES[d], s) for n, s, d in outputs]
    starts = [
        h.make_tensor_value_info(n, TYPES[str(a.dtype)], ["n", *a.shape[1:]] if grows else a.shape)
        for n, a in given.items()
    ]
    weights = [numpy_helper.from_array(a, n) for n, a in held.items()]
    graph = h.make_graph(nodes, "g", starts, ends, weights)
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), path)
    return path


def served(file, level, *feeds):
    """A run of a file under ONNX Runtime, beside it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.graph_optimization_level = 1, level
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    run = file.with_suffix(f".{level.name}.run")
    with whence.capture(session, str(run)):
        for feed in feeds:
            session.run(None, feed)
    return str(run)


def opened(file, precision, *feeds):
    """A run of a file under OpenVINO, beside it."""
    openvino = pytest.importorskip("openvino")
    core, run = openvino.Core(), file.with_suffix(f".{precision}.run")
    model = core.read_model(str(file))
    with whence.capture(model, str(run)):
        compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision})
        for feed in feeds:
            compiled(feed)
    return str(run)


def quantised(source, feeds, form="QDQ"):
    quantisation = importlib.import_module("onnxruntime.quantization")

    class Reader(quantisation.CalibrationDataReader):
        def __init__(self):
            self.feeds = iter(feeds)

        def get_next(self):
            return next(self.feeds, None)

    path = source.with_suffix(f".{form}.onnx")
    logging.disable(logging.WARNING)
    try:
        if form == "dynamic":
            quantisation.quantize_dynamic(str(source), str(path))
        else:
            chosen = getattr(quantisation.QuantFormat, form)
            quantisation.quantize_static(
                str(source), str(path), Reader(), quant_format=chosen, per_channel=True
            )
    finally:
        logging.disable(logging.NOTSET)
    return path


def test_a_clip_that_codes_apply_is_no_difference_of_files(tmp_path):
    """And sums of two numbers of one grid, which lie in the middle of two codes, are rounded so or
    so."""
    feed = {"x": np.abs(drawn(1, 24)) * 4}
    nodes = [
        node("MatMul", "x w", "a"), node("Clip", "a low", "c"),
        node("Reshape", "c column", "d"), node("Reshape", "c row", "e"), node("Add", "d e", "s"),
        node("MatMul", "s v", "y"),
    ]  # fmt: skip
    held = {
        "w": drawn(24, 16), "v": drawn(16, 3), "low": np.float32(0),
        "column": np.int64([16, 1]), "row": np.int64([1, 16]),
    }  # fmt: skip
    source = saved(tmp_path / "a.onnx", nodes, feed, [("y", [16, 3], "float32")], **held)
    codes = quantised(source, [feed])
    assert "Clip" not in [n.op_type for n in onnx.load(codes).graph.node]
    files = whence.compare(str(source), str(codes))
    assert files.status != "different", files.headline
    result = whence.compare(served(source, OFF, feed), served(codes, ALL, feed))
    assert result.status == "same", result.headline

    model = onnx.load(codes)
    zero = next(n.input[2] for n in model.graph.node if n.op_type == "QuantizeLinear"
                and n.input[0].startswith("c"))  # fmt: skip
    for held_array in model.graph.initializer:
        if held_array.name == zero:
            held_array.CopyFrom(numpy_helper.from_array(np.int8(-90), zero))
    wrong = tmp_path / "wrong.onnx"
    onnx.save(model, wrong)
    assert "Clip" in str(whence.compare(str(source), str(wrong)))


def test_a_constant_in_the_type_of_a_reduced_file(tmp_path):
    feed = {"x": drawn(2, 4)}

    def file(name, dtype, number):
        value = numpy_helper.from_array(np.full([1], number, dtype), "value")
        nodes = [
            node("Shape", "x", "s"), node("ConstantOfShape", "s", "z", value=value),
            node("Add", "x z", "a"), node("MatMul", "a w", "y"),
        ]  # fmt: skip
        given = {"x": feed["x"].astype(dtype)}
        ends = [("y", ["n", 3], dtype)]
        held = {"w": drawn(4, 3).astype(dtype)}
        return str(saved(tmp_path / name, nodes, given, ends, grows=True, **held))

    wide = file("wide.onnx", "float32", 0.5)
    assert whence.compare(wide, file("half.onnx", "float16", 0.5)).status == "same"
    other = whence.compare(wide, file("other.onnx", "float16", 0.75))
    assert other.status == "different"
    assert "ConstantOfShape" in str(other)


def test_what_an_optimiser_computes_once(tmp_path):
    """The mean is taken twice in the file, and once in the graph that runs."""
    feed = {"x": drawn(2, 6, 30) + 0.4}
    nodes = [
        node("ReduceMean", "x", "m", axes=[2]), node("Sub", "x m", "d"), node("Mul", "d d", "q"),
        node("ReduceMean", "q", "v", axes=[2]), node("Sqrt", "v", "r"),
        node("ReduceMean", "x", "m2", axes=[2]), node("Sub", "x m2", "d2"),
        node("Div", "d2 r", "n"), node("Conv", "n w b", "c"), node("Relu", "c", "f"),
        node("MatMul", "f u", "y"),
    ]  # fmt: skip
    held = {"w": drawn(8, 6, 3), "b": drawn(8), "u": drawn(28, 5)}
    source = saved(tmp_path / "a.onnx", nodes, feed, [("y", [2, 8, 5], "float32")], **held)
    codes = quantised(source, [feed], "dynamic")
    result = whence.compare(served(source, OFF, feed), served(codes, ALL, feed), min_coverage=0.5)
    assert not result.findings, result.findings
    assert result.status == "same"


def test_floats_between_codes_lie_as_these(tmp_path):
    """As many channels as rows and columns: no shape tells where the channels lie."""
    feeds = [{"x": drawn(2, 3, 8, 8, seed=k)} for k in range(2)]
    nodes = [
        node("Conv", "x w", "a", pads=[1] * 4), node("HardSigmoid", "a", "g", alpha=1 / 6),
        node("Mul", "a g", "s"), node("Conv", "s v", "b"), node("Clip", "b low high", "c"),
        node("Conv", "c u", "y"),
    ]  # fmt: skip
    held = {
        "w": drawn(8, 3, 3, 3), "v": drawn(8, 8, 1, 1), "u": drawn(4, 8, 1, 1),
        "low": np.float32(0), "high": np.float32(6),
    }  # fmt: skip
    source = saved(tmp_path / "a.onnx", nodes, feeds[0], [("y", [2, 4, 8, 8], "float32")], **held)
    codes = quantised(source, feeds, "QOperator")
    result = whence.compare(served(source, OFF, *feeds), served(codes, ALL, *feeds))
    assert not result.findings, result.findings
    lost = [v.numbers["sqnr_db"] for v in result.verdicts if v.numbers.get("sqnr_db")]
    assert min(lost) > 20


def test_a_table_of_words_that_a_product_reads_turned(tmp_path):
    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(11, 6)
            self.inner = torch.nn.Linear(6, 6)
            self.scale = torch.nn.Parameter(torch.rand(6) + 0.5)

        def forward(self, ids):
            words = self.table(ids)
            x = self.inner(words * torch.rsqrt((words * words).mean(-1, True)) * self.scale)
            return (words + x) @ self.table.weight.t()

    torch.manual_seed(1)
    module, ids = Words().eval(), np.int64([[3, 1, 7, 2]])
    with torch.no_grad(), whence.capture(module, str(tmp_path / "torch")):
        for _ in range(2):
            module(torch.from_numpy(ids))
    table, inner = (m.weight.detach().numpy() for m in (module.table, module.inner))
    nodes = [
        node("Gather", "table.weight ids", "g"), node("Mul", "g g", "q"),
        node("ReduceMean", "q", "e", axes=[-1]), node("Sqrt", "e", "r"), node("Div", "g r", "d"),
        node("Mul", "d scale", "n"), node("MatMul", "n m", "p"), node("Add", "p inner.bias", "i"),
        node("Add", "g i", "s"), node("MatMul", "s t", "y"),
    ]  # fmt: skip
    held = {
        "table.weight": table, "m": np.ascontiguousarray(inner.T),
        "inner.bias": module.inner.bias.detach().numpy(), "scale": module.scale.detach().numpy(),
        "t": np.ascontiguousarray(table.T),
    }  # fmt: skip
    given = {"ids": ids}
    source = saved(tmp_path / "a.onnx", nodes, given, [("y", [1, 4, 11], "float32")], **held)
    result = whence.compare(str(tmp_path / "torch"), served(source, ALL, given, given))
    assert result.status == "same", result.headline
    held["t"] = held["t"] * np.float32(1.01)
    wrong = saved(tmp_path / "b.onnx", nodes, given, [("y", [1, 4, 11], "float32")], **held)
    result = whence.compare(str(tmp_path / "torch"), served(wrong, ALL, given, given))
    assert result.status == "different"


def test_codes_of_a_table_whose_scale_was_folded_away(tmp_path):
    feed = {"ids": np.int64([4, 9, 2])}
    nodes = [
        node("Gather", "table ids", "g"), node("MatMul", "g w", "p"), node("Add", "p b", "s"),
        node("Tanh", "s", "h"), node("MatMul", "h v", "y"),
    ]  # fmt: skip
    held = {"table": drawn(20, 32), "w": drawn(32, 24), "b": drawn(24), "v": drawn(24, 5)}
    source = saved(tmp_path / "a.onnx", nodes, feed, [("y", [3, 5], "float32")], **held)
    codes = quantised(source, [feed], "dynamic")
    result = whence.compare(served(source, OFF, feed), served(codes, ALL, feed))
    assert result.status == "undecided"
    assert any("without the runtime's optimisations" in v.sentence for v in result.verdicts)


def test_openvino_computes_float64_of_the_file_in_float32(tmp_path):
    """Numbers that the file has in float64 are computed in float32."""
    feed = {"x": drawn(3, 12)}
    nodes = [
        node("MatMul", "x w", "a"), node("Cast", "a", "d", to=T.DOUBLE), node("Mul", "d k", "e"),
        node("Exp", "e", "y"),
    ]  # fmt: skip
    held = {"w": drawn(12, 8), "k": np.random.default_rng(1).normal(size=8)}
    source = saved(tmp_path / "a.onnx", nodes, feed, [("y", [3, 8], "float64")], **held)
    result = whence.compare(served(source, OFF, feed), opened(source, "f32", feed))
    assert result.status == "same", result.headline


def test_a_run_that_raised_where_the_other_went_on(tmp_path):
    class Halting(torch.nn.Module):
        def __init__(self, halts):
            super().__init__()
            self.a, self.b, self.halts = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), halts

        def forward(self, x):
            x = self.a(x)
            if self.halts:
                raise ValueError("enough")
            return self.b(x)

    def run(name, halts):
        torch.manual_seed(0)
        module = Halting(halts)
        with whence.capture(module, str(tmp_path / name)):
            try:
                module(torch.ones(2, 4))
            except ValueError:
                assert halts
        return str(tmp_path / name)

    whole, halted, again = run("whole", False), run("halted", True), run("again", True)
    result = whence.compare(halted, whole)
    assert result.status == "undecided"
    assert "raised in step 0: ValueError: enough" in result.headline
    assert whence.compare(halted, again).status == "same"


@pytest.mark.parametrize(("stored", "tells"), [((6, 11), 0), ((11, 6), 1)])
def test_a_table_tells_how_its_turned_copy_lies_only_in_its_own_shape(stored, tells):
    """The product of the model above reads the table, which both sides hold elsewhere, turned."""
    records = SimpleNamespace(shape=(11, 6)), SimpleNamespace(shape=stored)
    state = SimpleNamespace(
        reference=SimpleNamespace(calls={7: SimpleNamespace(scope="")}),
        records=lambda _: records,
        equal_parameters=Counter({("", "param.table.weight", (11, 6)): 1}),
    )
    slot = SimpleNamespace(reference_slot="param.table.weight")
    assert search._identical_siblings(state, {(0, 0): (7, slot)}) == tells
