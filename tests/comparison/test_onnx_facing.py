"""Which weights of a checkpoint are which initialisers of an ONNX file."""

import numpy as np
import pytest

import inside
import whence

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

RANDOM = np.random.default_rng(0)


def array(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


CHECKPOINT = {
    "emb.weight": array(20, 8),
    "q.weight": array(8, 8), "k.weight": array(8, 8), "v.weight": array(8, 8),
    "q.bias": array(8), "k.bias": array(8), "v.bias": array(8),
    "both.weight": array(16, 8),
    "fc.weight": array(12, 8), "fc.bias": array(12),
    "rnn.weight_ih_l0": array(12, 8),
    "extra.weight": array(3, 5),
}  # fmt: skip


def checkpoint(path):
    np.savez(path, **CHECKPOINT)
    return str(path)


def model(path, weights, codes=()):
    nodes = [
        helper.make_node("Op", ["x", *weights], ["y"], domain="test"),
        *(helper.make_node("DequantizeLinear", [c, f"{c} scale"], [f"{c} wide"]) for c in codes),
    ]
    tensors = {**weights, **{k: v for c in codes for k, v in codes[c].items()}}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(w, k) for k, w in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("test", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), path)
    return str(path)


def exported():
    q, k, v = (CHECKPOINT[f"{n}.weight"] for n in "qkv")
    gates = CHECKPOINT["rnn.weight_ih_l0"].reshape(3, 4, 8)[[1, 0, 2]].reshape(1, 12, 8)
    return {
        "emb.weight": CHECKPOINT["emb.weight"],
        "val_1": np.ascontiguousarray(np.concatenate([q, k, v]).T),
        "val_2": np.concatenate([CHECKPOINT[f"{n}.bias"] for n in "qkv"]),
        "val_3": np.ascontiguousarray(CHECKPOINT["both.weight"][:8].T),
        "val_4": np.ascontiguousarray(CHECKPOINT["both.weight"][8:].T),
        "val_5": np.ascontiguousarray(CHECKPOINT["fc.weight"].T),
        "fc.bias": CHECKPOINT["fc.bias"],
        "val_6": gates,
        "rotary": array(7, 4),
    }


def faced(tmp_path, weights, codes=()):
    result = whence.map_weights(
        checkpoint(tmp_path / "w.npz"), model(tmp_path / "m.onnx", weights, codes)
    )
    return result, {
        f"{w.reference}.{w.name}{w.rows}": (w.target_name, w.dims, w.state) for w in result.pairs
    }


def test_names_axes_fused_and_split_ones(tmp_path):
    result, found = faced(tmp_path, exported())
    assert found["emb.weight"] == ("emb.weight", "", "equal")
    assert found["q.weight"] == ("val_1", "x.T[0:8]", "equal")
    assert found["v.weight"] == ("val_1", "x.T[16:24]", "equal")
    assert found["k.bias"] == ("val_2", "x[8:16]", "equal")
    assert found["both.weight[0:8]"] == ("val_3", "x.T", "equal")
    assert found["both.weight[8:16]"] == ("val_4", "x.T", "equal")
    assert found["fc.weight"] == ("val_5", "x.T", "equal")
    rows = [*range(4, 8), *range(4), *range(8, 12)]
    assert found["rnn.weight_ih_l0"] == ("val_6", f"take(x[0], {rows}, axis=0)", "equal")
    assert result.only_reference == ("extra.weight",)
    assert result.only_target == ("y.rotary",)


def test_copies_in_another_precision_are_equal(tmp_path):
    half = {k: w.astype(np.float16) for k, w in exported().items()}
    result, found = faced(tmp_path, half)
    assert found["q.weight"] == ("val_1", "x.T[0:8]", "equal")
    assert len(result.pairs) == len(CHECKPOINT)


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_codes_are_held_against_half_a_step(factor, tmp_path):
    weights = exported()
    wide = weights.pop("val_5")
    scale = np.float32(np.abs(wide).max() / 127)
    codes = np.round(wide / scale).astype(np.int8)
    held = {"codes": {"codes": codes, "codes scale": scale * np.float32(factor)}}
    _, found = faced(tmp_path, weights, held)
    assert found["fc.weight"] == ("codes", "x.T", "codes" if factor == 1 else "differs")


def test_a_weight_of_one_name_that_differs(tmp_path):
    weights = exported()
    weights["emb.weight"] = weights["emb.weight"].copy()
    weights["emb.weight"][3, 4] += 0.5
    weights["val_5"] = weights["val_5"] * np.float32(1.001)
    _, found = faced(tmp_path, weights)
    assert found["emb.weight"] == ("emb.weight", "", "differs")
    assert found["fc.weight"][:2] == ("val_5", "x.T")


def test_a_norm_that_was_folded_in_is_said(tmp_path):
    weights = exported()
    weights["val_5"] = weights["val_5"] * np.linspace(0.5, 2, 12, dtype=np.float32)
    _, found = faced(tmp_path, weights)
    assert found["fc.weight"] == ("val_5", "x.T", "scaled")


def test_the_command_writes_a_map(tmp_path):
    arguments = [checkpoint(tmp_path / "w.npz"), model(tmp_path / "m.onnx", exported())]
    for more in ([], ["--force"]):
        done = inside.whence(tmp_path, "map-weights", *arguments, "-o", "map.yaml", *more)
        assert done.returncode == 2, done.stderr
    done = inside.whence(tmp_path, "map-weights", *arguments)
    assert done.returncode == 2  # extra.weight has no partner
    assert "weight[8:16] [16, 8]: val_4 [8, 8], x.T: equal" in done.stdout
    assert "# only reference: extra.weight" in done.stdout
