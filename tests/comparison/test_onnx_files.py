"""Two .onnx files before any tensor: what may be written in several ways is one, and each single
edit is named.
"""

import itertools
import re
import sys

import numpy as np
import pytest

import whence
from whence import judge
from whence.comparison.onnx_files import operator_sets
from whence.errors import UnreadableRun, UsageError

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

RANDOM = np.random.default_rng(0)
FLOAT = TensorProto.FLOAT


def array(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


WEIGHTS = {
    "conv.weight": array(4, 3, 3, 3), "conv.bias": array(4),
    "norm.weight": array(4), "norm.bias": array(4),
    "norm.mean": array(4), "norm.var": np.abs(array(4)) + 0.5,
    "ln.weight": array(16), "ln.bias": array(16),
    "fc.weight": array(8, 16), "fc.bias": array(8),
    "out.weight": array(8, 8),
}  # fmt: skip


def node(op_type, reads, makes, **attributes):
    domain = attributes.pop("domain", "")
    return helper.make_node(op_type, reads.split(), makes.split(), domain=domain, **attributes)


def nodes():
    return [
        node("Conv", "x conv.weight conv.bias", "c", pads=[1, 1, 1, 1]),
        node("Relu", "c", "r"),
        node("ReduceMean", "r axes", "m", keepdims=0),
        node("Concat", "m m m m", "j", axis=1),
        node("LayerNormalization", "j ln.weight ln.bias", "n", axis=-1, epsilon=1e-5),
        node("Gemm", "n fc.weight fc.bias", "g", transB=1),
        node("Sigmoid", "g", "s"),
        node("Mul", "g s", "p"),
        node("MatMul", "p out.weight", "q"),
        node("Add", "q p", "a"),
        node("Softmax", "a", "y", axis=-1),
    ]


def model(path, nodes, weights=None, opset=18, more=None, **given):
    weights = dict(WEIGHTS if weights is None else weights)
    weights["axes"] = np.array([2, 3])
    weights |= more or {}
    read = {v for n in nodes for v in n.input}
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info(name, kind, extents)
            for name, kind, extents in given.pop("inputs", [("x", FLOAT, [2, 3, 8, 8])])
        ],
        [helper.make_tensor_value_info(given.pop("output", "y"), FLOAT, [2, 8])],
        [numpy_helper.from_array(w, k) for k, w in weights.items() if k in read],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path, **given)
    return str(path)


@pytest.fixture
def reference(tmp_path):
    return model(tmp_path / "ref.onnx", nodes())


def changed(place, **attributes):
    every = nodes()
    old = every[place]
    kept = {a.name: helper.get_attribute_value(a) for a in old.attribute} | attributes
    every[place] = helper.make_node(old.op_type, old.input, old.output, **kept)
    return every


def rewired(place, slot, value):
    every = nodes()
    every[place].input[slot] = value
    return every


def without(place):
    every = nodes()
    gone = every.pop(place)
    for other in every:
        for k, value in enumerate(other.input):
            if value == gone.output[0]:
                other.input[k] = gone.input[0]
    return every


def of_type(place, op_type):
    every = nodes()
    every[place].op_type = op_type
    return every


def renamed(every):
    """The same nodes with other names for all values inside."""
    names = (f"value_{k}" for k in itertools.count())
    new = {"x": "x", "y": "y"}
    weights = {}
    for one in every:
        for values in (one.input, one.output):
            for k, value in enumerate(values):
                if value not in new:
                    new[value] = next(names)
                    if value in WEIGHTS:
                        weights[new[value]] = WEIGHTS[value]
                    elif value == "axes":
                        weights[new[value]] = np.array([2, 3])
                values[k] = new[value]
    return every, weights


# ---- the same


def test_a_file_is_itself(reference):
    result = whence.compare(reference, reference)
    assert result.status == "same"
    assert "11 nodes" not in result.headline  # the Gemm is two
    assert "12 nodes" in result.headline
    assert "7 weights" in result.headline
    assert result.next == ()


def test_names_of_values_say_nothing(reference, tmp_path):
    every, weights = renamed(nodes())
    target = model(tmp_path / "tgt.onnx", every, weights)
    assert whence.compare(reference, target).status == "same"


def test_data_beside_the_model_is_read(reference, tmp_path):
    target = model(
        tmp_path / "tgt.onnx",
        nodes(),
        save_as_external_data=True,
        location="tgt.data",
        size_threshold=0,
    )
    assert whence.compare(reference, target).status == "same"
    (tmp_path / "tgt.data").unlink()
    with pytest.raises(UnreadableRun, match=r"tgt\.data, which is not there"):
        whence.compare(reference, target)


def test_nothing_of_onnx_is_needed(reference, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] in ("onnx", "onnxruntime")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert whence.compare(reference, reference).status == "same"


def with_constants():
    """Weights as nodes, an identity, an axis as an attribute, a Linear in two nodes."""
    every = nodes()
    every[0] = node("Conv", "x conv.weight held", "c0", pads=[1] * 4, strides=[1, 1], group=1)
    every.insert(
        0, node("Constant", "", "held", value=numpy_helper.from_array(WEIGHTS["conv.bias"]))
    )
    every.insert(2, node("Identity", "c0", "c"))
    every[4] = node("ReduceMean", "r", "m", axes=[-2, -1], keepdims=0)
    every[7:8] = [
        node("Transpose", "fc.weight", "t", perm=[1, 0]),
        node("MatMul", "n t", "g0"),
        node("Add", "fc.bias g0", "g"),
    ]
    return every


def fused():
    every = nodes()
    every[0:2] = [
        node("FusedConv", "x conv.weight conv.bias", "r", pads=[1] * 4, activation="Relu",
             domain="com.microsoft"),
    ]  # fmt: skip
    return every


def test_what_may_be_written_in_several_ways_is_one(reference, tmp_path):
    old = model(tmp_path / "old.onnx", with_constants(), opset=17)
    assert whence.compare(reference, old).status == "same", whence.compare(reference, old).headline
    assert whence.compare(reference, model(tmp_path / "f.onnx", fused())).status == "same"


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_norm_that_was_folded_into_a_convolution(factor, tmp_path):
    split = [node("Conv", "x conv.weight conv.bias", "c0", pads=[1] * 4),
             node("BatchNormalization", "c0 norm.weight norm.bias norm.mean norm.var", "c"),
             *nodes()[1:]]  # fmt: skip
    scale = WEIGHTS["norm.weight"] / np.sqrt(WEIGHTS["norm.var"] + np.float32(1e-5))
    folded = {
        **WEIGHTS,
        "conv.weight": WEIGHTS["conv.weight"] * scale.reshape(-1, 1, 1, 1) * np.float32(factor),
        "conv.bias": (WEIGHTS["conv.bias"] - WEIGHTS["norm.mean"]) * scale + WEIGHTS["norm.bias"],
    }
    result = whence.compare(
        model(tmp_path / "a.onnx", split), model(tmp_path / "b.onnx", nodes(), folded)
    )
    assert result.status == ("same" if factor == 1 else "different"), result.headline


# ---- copies in another precision


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_weights_rounded_to_16_bits_and_stored_in_32_are_a_copy(reference, tmp_path, kind):
    """As `model.half().float()` leaves them; a lone one is a difference."""
    copy = {k: judge.rounded(w, kind).astype(np.float32) for k, w in WEIGHTS.items()}
    result = whence.compare(reference, model(tmp_path / "h.onnx", nodes(), copy))
    assert (result.status, list(result.counts)) == ("same", ["precision"])
    assert f"numbers of {kind}, stored in float32" in result.headline
    lone = {**WEIGHTS, "fc.weight": copy["fc.weight"]}
    wrong = whence.compare(reference, model(tmp_path / "lone.onnx", nodes(), lone))
    assert wrong.status == "different"
    assert "fc.weight" in wrong.findings[0].sentence


def test_a_copy_in_float16_differs_in_precision_alone(reference, tmp_path):
    half = {k: w.astype(np.float16) for k, w in WEIGHTS.items()}
    result = whence.compare(reference, model(tmp_path / "h.onnx", nodes(), half))
    assert result.status == "same"
    assert set(result.counts) == {"precision"}
    assert re.search(r"but for precision \(by 0\.000\d of a weight at most, 7 weights: float16 of "
                     r"float32\)", result.headline)  # fmt: skip
    one = {**WEIGHTS, "fc.weight": half["fc.weight"]}
    assert whence.compare(reference, model(tmp_path / "o.onnx", nodes(), one)).status == "undecided"
    half["fc.weight"][3, 5] *= 1.01
    result = whence.compare(reference, model(tmp_path / "w.onnx", nodes(), half))
    assert result.status == "different"
    assert "1 of 128 elements differs: [5, 3]" in result.findings[0].sentence


@pytest.mark.parametrize("wrong", [False, True])
def test_a_quantised_copy(wrong, reference, tmp_path):
    weight = WEIGHTS["out.weight"]
    scale = (np.abs(weight).max() / 127).astype(np.float32)
    codes = np.round(weight / scale).astype(np.int8)
    more = {"codes": codes, "scale": scale * np.float32(1.05 if wrong else 1.0)}
    more |= {"zero": np.int8(0), "step": np.float32(0.05)}
    every = nodes()
    every[8:9] = [
        node("QuantizeLinear", "p step zero", "pq"),
        node("DequantizeLinear", "pq step zero", "pd"),
        node("DequantizeLinear", "codes scale", "decoded"),
        node("MatMul", "pd decoded", "q"),
    ]
    result = whence.compare(reference, model(tmp_path / "q.onnx", every, more=more))
    assert result.status == ("different" if wrong else "undecided"), result.headline
    if wrong:
        assert result.findings[0].name == "q"
    else:
        assert "1 weight: codes of it, each within half a step" in result.headline


@pytest.mark.parametrize("least", [-128, 0], ids=["from the least code", "symmetric"])
def test_a_relu_that_codes_apply(least, reference, tmp_path):
    """Quantisers leave a Relu out where the codes behind it begin at zero."""
    every = [n for n in nodes() if n.op_type != "Relu"]
    every[1:2] = [
        node("QuantizeLinear", "c step zero", "cq"),
        node("DequantizeLinear", "cq step zero", "r"),
        every[1],
    ]
    more = {"step": np.float32(0.05), "zero": np.int8(least)}
    result = whence.compare(reference, model(tmp_path / "q.onnx", every, more=more))
    assert result.status == ("undecided" if least else "different"), result.headline
    if not least:
        assert [f.name for f in result.findings] == ["r"]


def test_codes_whose_scale_lies_elsewhere_are_no_fault(reference, tmp_path):
    weights = {**WEIGHTS, "out.weight": np.round(WEIGHTS["out.weight"] * 10).astype(np.int8)}
    result = whence.compare(reference, model(tmp_path / "t.onnx", nodes(), weights))
    assert result.status == "undecided"
    assert "codes, whose scale lies elsewhere" in result.headline


# ---- single edits

EDITS = {
    "epsilon": (changed(4, epsilon=1e-2), "n", "epsilon is 1e-05 in the reference, 0.01 in"),
    "axis": (changed(10, axis=0), "y", "axis is -1 in the reference, 0 in the target"),
    "pads": (changed(0, pads=[1, 1, 0, 2]), "c", "pads is [1, 1, 1, 1] in the reference"),
    "alpha": (changed(5, alpha=0.5), "g", "alpha is 1 in the reference, 0.5 in the target"),
    "edge": (rewired(9, 1, "g"), "a", "its input 1 is what p (Mul) makes in the reference, what g"),
    "removed": (without(1), "r", "only the reference has it"),
    "removed sum": (without(9), "a", "only the reference has it"),
    "replaced": (of_type(1, "Tanh"), "r", "it is Relu in the reference, Tanh in the target"),
    "inserted": (
        [*nodes()[:2], node("Tanh", "r", "t"), node("ReduceMean", "t axes", "m", keepdims=0),
         *nodes()[3:]],
        "t", "only the target has it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rename", [False, True], ids=["named", "renamed"])
@pytest.mark.parametrize("edit", EDITS)
def test_a_single_edit_is_named(edit, rename, reference, tmp_path):
    every, name, words = EDITS[edit]
    every, weights = [onnx.NodeProto.FromString(n.SerializeToString()) for n in every], WEIGHTS
    if rename:
        every, weights = renamed(every)
    result = whence.compare(reference, model(tmp_path / "t.onnx", every, weights))
    assert result.status == "different", result.headline
    if not (rename and edit == "inserted"):
        assert [f.name for f in result.findings] == [name]
    if not rename:
        assert words in result.findings[0].sentence
    assert result.programs[0].startswith("exactly one")


@pytest.mark.parametrize("name", WEIGHTS)
def test_an_element_of_a_weight_is_named(name, reference, tmp_path):
    weights = {**WEIGHTS, name: WEIGHTS[name].copy()}
    weights[name].flat[-1] += 0.01
    result = whence.compare(reference, model(tmp_path / "t.onnx", nodes(), weights))
    if name.startswith("norm"):  # which this model does not have
        assert result.status == "same"
        return
    (finding,) = result.findings
    assert finding.cause == "parameter"
    assert f"weight {name}" in finding.sentence
    assert "1 of " in finding.sentence


def test_an_edit_inside_a_fused_node_is_named(reference, tmp_path):
    weights = {**WEIGHTS, "conv.bias": WEIGHTS["conv.bias"] * np.float32(1.1)}
    result = whence.compare(reference, model(tmp_path / "t.onnx", fused(), weights))
    assert result.status == "different"
    assert result.findings[0].name == "c"


def test_what_was_rewritten_is_not_called_a_fault(reference, tmp_path):
    every = nodes()
    every[4:5] = [
        node("ReduceMean", "j last", "u"),
        node("Sub", "j u", "d"),
        node("Mul", "d d", "dd"),
        node("ReduceMean", "dd last", "v"),
        node("Add", "v eps", "ve"),
        node("Sqrt", "ve", "sd"),
        node("Div", "d sd", "z"),
        node("Mul", "z ln.weight", "zw"),
        node("Add", "zw ln.bias", "n"),
    ]
    more = {"last": np.array([-1]), "eps": np.float32(1e-5)}
    result = whence.compare(reference, model(tmp_path / "t.onnx", every, more=more))
    assert result.status != "different"


# ---- what the specification says


def test_defaults_are_those_of_the_specification():
    defaults = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        for name, attribute in schema.attributes.items():
            if not schema.domain and attribute.default_value.name:
                value = helper.get_attribute_value(attribute.default_value)
                value = value.decode() if isinstance(value, bytes) else value
                defaults.setdefault((schema.name, name), {})[schema.since_version] = value
    for op_type, stated in operator_sets.DEFAULTS.items():
        for name, value in stated.items():
            if (op_type, name) in defaults:
                newest = max(defaults[op_type, name])
                assert defaults[op_type, name][newest] == value, (op_type, name)


# ---- against others


def test_a_model_against_arrays_is_refused(reference, tmp_path):
    np.save(tmp_path / "x.npy", array(3))
    with pytest.raises(UsageError, match="has no values"):
        whence.compare(reference, tmp_path / "x.npy")


def _spread(path, shape, kind, mask):
    """A graph that spreads a vector over the shape of its input and masks it. shape: nodes that
    make `s`, the shape; kind: what the mask is cast to; mask: nodes that make `v` of the cast `t`.
    """
    weights = {name: np.arange(8, dtype=np.float32) for name in "cwqb"}
    weights |= {"zero": np.array(0), "one": np.array(1), "first": np.array([0])}
    return model(
        path,
        [
            *shape,
            node("Expand", "c s", "e"),
            node("Cast", "z", "t", to=kind),
            *mask,
            node("Add", "e v", "y"),
        ],
        weights,
        inputs=[("x", FLOAT, ["b", 8]), ("z", TensorProto.INT64, ["b", 8])],
    )


def test_a_shape_put_together_of_its_extents_proves_nothing(tmp_path):
    extents = [
        node("Shape", "x", "h"),
        node("Gather", "h zero", "m0", axis=0),
        node("Unsqueeze", "m0 first", "u0"),
        node("Gather", "h one", "m1", axis=0),
        node("Unsqueeze", "m1 first", "u1"),
        node("Concat", "u0 u1", "s", axis=0),
    ]
    mask = [node("Mul", "t w", "v")]
    paths = [
        _spread(tmp_path / f"{len(shape)}.onnx", shape, FLOAT, mask)
        for shape in (extents, [node("Shape", "x", "s")])
    ]
    result = whence.compare(*paths)
    assert (result.status, result.findings) == ("undecided", ())


def test_the_form_in_which_rewritten_code_takes_a_mask_proves_nothing(tmp_path):
    shape = [node("Shape", "x", "s")]
    masks = {
        TensorProto.BOOL: [node("Not", "t", "n"), node("Where", "n c w", "v")],
        TensorProto.INT32: [node("Attention", "w q b t", "v", domain="com.microsoft")],
    }
    paths = [_spread(tmp_path / f"{kind}.onnx", shape, kind, m) for kind, m in masks.items()]
    result = whence.compare(*paths)
    assert (result.status, result.findings) == ("undecided", ())


@pytest.mark.parametrize("kind", [TensorProto.INT32, TensorProto.BOOL])
def test_a_cast_that_the_same_code_reads_is_named(kind, tmp_path):
    shape, mask = [node("Shape", "x", "s")], [node("Cast", "t", "v", to=FLOAT)]
    paths = [
        _spread(tmp_path / f"{n}.onnx", shape, k, mask)
        for n, k in (("reference", TensorProto.INT8), ("target", kind))
    ]
    result = whence.compare(*paths)
    assert result.status == "different"
    assert result.findings[0].name == "t"
