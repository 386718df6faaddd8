"""safetensors files, folders and checkpoints in parts; the format's own library is the oracle."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import whence
from readers import hostile
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers import UNORDERED, open_run

DRAW = np.random.default_rng(0)
WEIGHTS = {
    "model.embed_tokens.weight": DRAW.standard_normal((8, 4)).astype(np.float32),
    "model.layers.0.fc.weight": DRAW.standard_normal((4, 4)).astype(np.float32),
    "model.layers.0.fc.bias": DRAW.standard_normal(4).astype(np.float32),
    "lm_head.weight": DRAW.standard_normal((8, 4)).astype(np.float32),
}


def raw(entries, data=b""):
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


def test_every_dtype_comes_back_bit_by_bit(tmp_path):
    kinds = [
        np.float32,
        np.float64,
        np.float16,
        ml_dtypes.bfloat16,
        np.int8,
        np.uint8,
        np.int16,
        np.uint16,
        np.int32,
        np.uint32,
        np.int64,
        np.uint64,
        np.bool_,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    ]
    codes = [
        "F32",
        "F64",
        "F16",
        "BF16",
        "I8",
        "U8",
        "I16",
        "U16",
        "I32",
        "U32",
        "I64",
        "U64",
        "BOOL",
        "F8_E4M3",
        "F8_E5M2",
    ]
    arrays = {
        f"t{i}": np.abs(DRAW.standard_normal((2, 3)) * 4).astype(kind)
        for i, kind in enumerate(kinds)
    }
    entries, data = {}, b""
    for (name, array), code in zip(arrays.items(), codes, strict=True):
        entries[name] = {
            "dtype": code,
            "shape": [2, 3],
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    entries["odd"] = {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}
    (tmp_path / "a.safetensors").write_bytes(raw(entries, data))
    run = open_run(tmp_path / "a.safetensors")
    found = {c.scope: c.slots("output")[0].record for c in run.calls if c.leaf}
    for name, array in arrays.items():
        assert run.array(found[name]).dtype == array.dtype
        assert run.array(found[name]).tobytes() == array.tobytes(), name
    assert run.records[found["odd"]].why == "dtype F4 is not known to whence"


def test_a_checkpoint_in_parts_is_the_same_as_a_whole_one(tmp_path):
    save_file(WEIGHTS, tmp_path / "whole.safetensors")
    parts = tmp_path / "parts"
    parts.mkdir()
    names = list(WEIGHTS)
    save_file({n: WEIGHTS[n] for n in names[:2]}, parts / "model-00001-of-00002.safetensors")
    save_file({n: WEIGHTS[n] for n in names[2:]}, parts / "model-00002-of-00002.safetensors")
    index = {n: f"model-0000{1 + (i > 1)}-of-00002.safetensors" for i, n in enumerate(names)}
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole = str(tmp_path / "whole.safetensors")
    assert whence.compare(whole, str(parts)).status == "same"
    (parts / "model-00002-of-00002.safetensors").unlink()
    result = whence.compare(whole, str(parts))
    assert result.status != "same"
    assert any(
        "2 tensors that model.safetensors.index.json names are in model-00002" in one.text
        for one in result.missing
    )


def test_weights_that_differ_are_named(tmp_path):
    save_file(WEIGHTS, tmp_path / "ref.safetensors")
    bad = dict(WEIGHTS)
    bad["model.layers.0.fc.weight"] = WEIGHTS["model.layers.0.fc.weight"].T.copy()
    save_file(bad, tmp_path / "bad.safetensors")
    save_file(
        {n: w.astype(ml_dtypes.bfloat16).astype(np.float32) for n, w in WEIGHTS.items()},
        tmp_path / "rounded.safetensors",
    )
    result = whence.compare(str(tmp_path / "ref.safetensors"), str(tmp_path / "bad.safetensors"))
    assert result.status == "different"
    assert result.findings[0].name == "model.layers.0.fc"
    assert "transposed" in result.findings[0].sentence
    result = whence.compare(
        str(tmp_path / "ref.safetensors"), str(tmp_path / "rounded.safetensors")
    )
    assert result.status == "different"
    assert all("rounded to bfloat16" in f.sentence for f in result.findings)


def test_activations_have_no_order_unless_their_names_give_one(tmp_path):
    save_file({"embed": np.ones(3), "attn": np.ones(3)}, tmp_path / "a.safetensors")
    save_file({"0_embed": np.ones(3), "1_attn": np.ones(3)}, tmp_path / "b.safetensors")
    told = [c.notes for c in open_run(tmp_path / "a.safetensors").calls]
    assert all(notes[0].startswith(UNORDERED) for notes in told)
    leaves = [c for c in open_run(tmp_path / "b.safetensors").calls if c.leaf]
    assert [c.scope for c in leaves] == ["embed", "attn"]
    assert not any(c.notes for c in leaves)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"dtype": "F32", "shape": [2], "data_offsets": [1 << 60, (1 << 60) + 8]},
    ],
)
def test_an_entry_that_does_not_fit_costs_its_tensor(entry, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(
        raw({"x": entry, "y": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8)
    )
    run = open_run(tmp_path / "a.safetensors")
    found = {c.scope: c.slots("output")[0].record for c in run.calls if c.leaf}
    assert run.array(found["y"]).tolist() == [0.0, 0.0]
    with pytest.raises(ElementsMissing):
        run.array(found["x"])


def test_an_entry_that_makes_no_sense_is_told(tmp_path):
    wrong = {
        "a": 5,
        "b": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        "c": {"dtype": "F32", "shape": [1]},
    }
    (tmp_path / "a.safetensors").write_bytes(
        raw({**wrong, "y": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8)
    )
    notes = [n.text for n in open_run(tmp_path / "a.safetensors").notes if n.kind == "error"]
    assert [text.split(" ")[0] for text in notes] == ["a", "b", "c"]


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{")
    with pytest.raises(UnreadableRun, match="no tensor"):
        open_run(tmp_path / "x")


def test_spoilt_dumps_cost_tensors_or_are_refused(tmp_path):
    sample = tmp_path / "sample"
    sample.mkdir()
    save_file(
        {"a.weight": np.arange(6.0), "b.weight": np.ones(2, np.float16)},
        sample / "model-00001-of-00001.safetensors",
    )
    (sample / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a.weight": "model-00001-of-00001.safetensors", "c": "../../x"}}'
    )
    (tmp_path / "work").mkdir()
    for what, path in hostile.variants(sample, tmp_path / "work"):
        hostile.survives(what, path, "safetensors")
