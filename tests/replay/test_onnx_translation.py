"""Nodes of ONNX graphs as programs: against ONNX Runtime, with attributes drawn at random, and
against the tests and the reference of ONNX itself.

Every operator that is known must be drawn or be in the tests of ONNX: a new one without a test
fails.
"""

import warnings
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")

import onnx_fused_draws  # noqa: F401 - more families
from onnx_draws import FAMILIES, Draw, ints
from onnx_nodes import as_node, by_runtime, computed, difference, loaded, node, tolerance

from whence.errors import ReplayRefused
from whence.records.marks import Mark, mark_value
from whence.replay import validation
from whence.replay.onnx_translation import translation

pytestmark = pytest.mark.torch
WORKING = ("recorded", "float64")


def disagreements(proto, opset, arrays, expected):
    """What the program of a node computes otherwise, in the recorded dtype and in float64."""
    for working in WORKING:
        found = computed(proto, opset, arrays, expected, working)
        for name, array in found.items():
            coded = array.dtype in (np.uint8, np.int8)  # a tie may fall to either side
            rtol, atol = (0, 1) if coded else (max(3e-4, tolerance(expected[name].dtype) / 5), 3e-5)
            if text := difference(array, expected[name], rtol, atol):
                yield f"{working}: {proto.op_type} {name}: {text}\n{proto}"


def swept(name, seed, count):
    """(nodes that agree with ONNX Runtime, those refused) of one family."""
    draw, counts = Draw(seed), Counter()
    for _ in range(count):
        (proto, arrays), opsets = FAMILIES[name](draw)
        try:
            expected = by_runtime(proto, opsets, arrays)
        except Exception:  # attributes that do not go together, or no kernel
            counts["no answer"] += 1
            continue
        try:
            wrong = list(disagreements(proto, opsets[proto.domain], arrays, expected))
        except ReplayRefused:
            counts["refused"] += 1
            continue
        assert wrong == []
        counts["right"] += 1
    return counts


@pytest.mark.parametrize("name", FAMILIES)
def test_computes_what_onnx_runtime_does(name):
    pytest.importorskip("onnxruntime")
    counts = swept(name, 1, 12)
    assert counts["right"] >= 6, counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_computes_what_onnx_runtime_does_of_many(name, seed):
    pytest.importorskip("onnxruntime")
    counts = swept(name, seed, 60)
    assert counts["right"] > counts["refused"] + counts["no answer"], counts


# ---- the tests of ONNX itself

NOT_HERE = ("ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")


@pytest.fixture(scope="module")
def cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return [c for c in collect_testcases(None) if len(c.model.graph.node) == 1]


@pytest.mark.slow
def test_passes_the_tests_of_onnx_itself(cases):
    counts, wrong, tested = Counter(), [], set()
    for case in cases:
        graph = case.model.graph
        proto = graph.node[0]
        opset = {o.domain: o.version for o in case.model.opset_import}.get(proto.domain)
        for given, made in case.data_sets:
            arrays = {i.name: loaded(a) for i, a in zip(graph.input, given)}
            expected = {o.name: loaded(a) for o, a in zip(graph.output, made)}
            try:
                for working in WORKING:
                    found = computed(proto, opset, arrays, expected, working)
                    wrong += [
                        (case.name, working, text)
                        for name, array in found.items()
                        if (text := _far(array, expected[name], working))
                    ]
            except ReplayRefused:
                counts["refused"] += 1
                continue
            counts["taken"] += 1
            tested.add(translation.qualified(proto.op_type, proto.domain))
    assert wrong == []
    assert counts["taken"] >= 1100, counts
    drawn = set()
    for name, draw in ((name, Draw(seed)) for name in FAMILIES for seed in range(60)):
        (proto, _), _ = FAMILIES[name](draw)
        drawn.add(translation.qualified(proto.op_type, proto.domain))
    assert set(translation.known()) - tested - drawn == KNOWN_ELSEWHERE


KNOWN_ELSEWHERE = {
    # kernels of other processors, which share their function with one that is drawn
    "com.microsoft.GatherND", "com.microsoft.GridSample", "com.microsoft.NhwcConv",
    "com.microsoft.NhwcFusedConv", "com.microsoft.Pad",
    # layouts that only a captured session has
    "com.microsoft.nchwc.AveragePool", "com.microsoft.nchwc.Conv",
    "com.microsoft.nchwc.GlobalAveragePool", "com.microsoft.nchwc.GlobalMaxPool",
    "com.microsoft.nchwc.MaxPool", "com.microsoft.nchwc.ReorderInput",
    "com.microsoft.nchwc.ReorderOutput", "com.microsoft.nchwc.Upsample",
}  # fmt: skip


def _far(array, expected, working):
    if array.dtype == np.uint8 and working == "float64":
        return difference(array, expected, 0, 1)
    atol = 1e-6 if working == "recorded" else 1e-4
    return difference(array, expected, tolerance(expected.dtype), atol)


# ---- what a program serves, and what is refused


def program_of(op_type, arrays, shape, outputs=1, opset=17, **attributes):
    proto, by_name = node(op_type, arrays, outputs, **attributes)
    made = {name: np.zeros(shape, np.float32) for name in proto.output}
    return translation.program(as_node(proto, opset, by_name, made))


def test_a_program_serves_only_the_elements_that_decided_its_form():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    program = program_of("Slice", [x, ints(1), ints(3), ints(1)], (3, 2))
    run = validation.load(program, []).run
    given = {"input.0": x, "input.1": ints(1), "input.2": ints(3), "input.3": ints(1)}
    np.testing.assert_array_equal(run(given, {})["output.0"], x[:, 1:3])
    with pytest.raises(ReplayRefused, match="guard"):
        run({**given, "input.1": ints(0)}, {})
    with pytest.raises(ReplayRefused, match="extent 4"):
        run({**given, "input.0": x[:, :3]}, {})


def test_a_program_says_from_where_it_was_translated():
    program = program_of("Relu", [np.zeros(3, np.float32)], (3,))
    assert mark_value(program, Mark.TRANSLATED) == "ONNX"


def test_the_shape_of_an_input_is_read_when_the_program_runs():
    program = program_of("Shape", [np.zeros((2, 3), np.float32)], (2,))
    found = validation.load(program, []).run({"input.0": np.zeros((5, 7), np.float32)}, {})
    np.testing.assert_array_equal(found["output.0"], [5, 7])


@pytest.mark.parametrize("epsilon", [1e-12, 1e-5, 1e-2])
def test_a_fused_norm_is_computed_with_its_own_epsilon(epsilon):
    x = np.array([[[1e-3, -1e-3, 2e-3, 0.0]]], np.float32)
    scale, skip = np.ones(4, np.float32), np.zeros_like(x)
    proto, arrays = node(
        "SkipLayerNormalization", [x, skip, scale], domain="com.microsoft", epsilon=epsilon
    )
    found = computed(proto, 1, arrays, {"y0": x}, "float64")["y0"]
    wide = x.astype(np.float64)
    expected = (wide - wide.mean()) / np.sqrt(wide.var() + np.float32(epsilon))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


X = np.zeros((2, 3, 4, 5), np.float32)


@pytest.mark.parametrize(
    ("op_type", "operands", "attributes", "reason"),
    [
        ("If", [np.array(True)], {}, "branches"),
        ("RandomNormalLike", [X], {}, "random"),
        ("SequenceLength", [X], {}, "sequence"),
        ("NoSuchOperator", [X], {}, "not known"),
        ("BatchNormalization", [X, *[np.ones(3, np.float32)] * 4], {"training_mode": 1}, "train"),
        ("Dropout", [X, None, np.array(True)], {}, "random"),
        ("Resize", [X, None, np.ones(4, np.float32)], {"antialias": 1}, "antialias"),
        ("TopK", [X, ints(2)], {"sorted": 0}, "any order"),
        ("Transpose", [X], {"perm": "x"}, "perm"),
        ("Concat", [X, X], {"axis": 9}, "axis 9"),
        ("Cast", [X], {"to": 8}, "element type 8"),
        ("Conv", [X], {}, "input 1 is not there"),
        ("Div", [np.ones(2, np.uint64), np.ones(2, np.uint64)], {}, "uint64"),
    ],
)
def test_refuses_what_it_does_not_know(op_type, operands, attributes, reason):
    with pytest.raises(ReplayRefused, match=reason):
        program_of(op_type, operands, X.shape, **attributes)


def test_refuses_elements_that_are_not_known():
    proto, arrays = node("Reshape", [X, ints(-1)])
    seen = as_node(proto, 17, arrays, {"y0": X.reshape(-1)})
    unseen = type(seen.inputs[1])("input.1", "int64", (1,))
    with pytest.raises(ReplayRefused, match="elements of its input 1 are not known"):
        translation.program(
            type(seen)("Reshape", "", 17, {}, [seen.inputs[0], unseen], seen.outputs)
        )
