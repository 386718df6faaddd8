"""ONNX tensors; tests/data/onnx was written by onnx 1.23.2, with the values as its own numpy_helper
reads them back.
"""

import os
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import whence
from readers import hostile
from whence.errors import ElementsMissing
from whence.readers import Place, open_run
from whence.readers.formats import onnx_tensors as reader

DATA = Path(__file__).parents[1] / "data" / "onnx"


def parameters(run):
    return {f"{c.scope}.{r.slot[6:]}": r.record for c in run.calls for r in c.slots("param")}


def test_initializers_of_every_type_have_the_values_that_onnx_reads():
    run, expected = open_run(DATA / "types.onnx"), np.load(DATA / "expected.npz")
    found = parameters(run)
    assert len(expected.files) >= 50
    for name in expected.files:
        array = run.array(found[name])
        array = array if array.dtype.kind == "c" else array.astype(np.float64)
        assert np.array_equal(array, expected[name]), name


def test_elements_in_another_file_are_read_only_inside_the_dump():
    run = open_run(DATA / "types.onnx")
    found = parameters(run)
    assert run.array(found["outside.weight"]).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    with pytest.raises(ElementsMissing, match="outside of it"):
        run.array(found["escape.weight"])


def test_a_data_set_is_a_call_of_the_whole_a_step_each(tmp_path):
    for folder in ("test_data_set_0", "test_data_set_1"):
        shutil.copytree(DATA / folder, tmp_path / folder)
    run = open_run(tmp_path)
    assert [
        (c.scope, c.step, [r.slot for r in c.refs])
        for c in sorted(run.calls, key=lambda c: c.order)
    ] == [("", step, ["input.0", "input.1", "output.0"]) for step in (0, 1)]
    for call in run.calls:
        x, ids, y = (run.array(r.record) for r in call.refs)
        assert ids.tolist() == [1, 2]
        assert np.allclose(x @ np.arange(12, dtype=np.float32).reshape(3, 4), y)
    assert open_run(DATA / "test_data_set_1").reader == "onnx_tensors"


def test_data_sets_compare(tmp_path):
    for name, change in {"ref": 0.0, "bad": 0.5}.items():
        folder = tmp_path / name / "test_data_set_0"
        folder.mkdir(parents=True)
        for file in ("input_0.pb", "input_1.pb"):
            (folder / file).write_bytes((DATA / "test_data_set_0" / file).read_bytes())
        y = np.arange(64, dtype=np.float32) + change
        (folder / "output_0.pb").write_bytes(b"\x08\x40\x10\x01\x4a\x80\x02" + y.tobytes())
    assert whence.compare(str(tmp_path / "ref"), str(tmp_path / "ref")).status == "same"
    result = whence.compare(str(tmp_path / "ref"), str(tmp_path / "bad"))
    assert result.status != "same"
    assert not result.inputs_differ


def test_a_single_tensor_is_an_output_or_an_input():
    for name, slot in (("output_0.pb", "output.0"), ("input_0.pb", "input.0")):
        (call,) = open_run(DATA / "test_data_set_0" / name).calls
        assert [r.slot for r in call.refs] == [slot]


def test_other_protobuf_files_are_left_to_others(tmp_path):
    for data in (b"", b"\x0a\x05hello" * 3, b"\xff" * 20, b"{}", b"\x18\x01\x22\x00"):
        (tmp_path / "x.pb").write_bytes(data)
        assert not reader.sniff(Place(tmp_path / "x.pb"))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a huge shape", b"\x08" + b"\xff" * 8 + b"\x3f" + b"\x10\x01\x4a\x04\0\0\0\0"),
        ("too few numbers", b"\x08\x80\x80\x80\x80\x10\x10\x07\x3a\x01\x05"),
        ("no type that is known", b"\x08\x02\x10\x63\x4a\x02\0\0"),
        ("a negative dimension", b"\x08" + b"\xff" * 9 + b"\x01\x10\x01"),
        ("texts", b"\x08\x01\x10\x08\x32\x01a"),
        (
            "elements elsewhere",
            b"\x08\x02\x10\x01\x6a\x1a\x0a\x08location\x12\x0e/etc/passwd\0\0\0",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_lost(what, message, tmp_path):
    (tmp_path / "output_0.pb").write_bytes(message)
    run = hostile.survives(what, tmp_path / "output_0.pb", "onnx_tensors")
    for record in run.records if run is not None else ():
        with pytest.raises(ElementsMissing):
            run.array(record.id)


def test_numbers_in_fields_may_be_packed_or_not(tmp_path):
    values = (1.0, -2.0)
    packed = b"\x08\x02\x10\x01\x22\x08" + struct.pack("<2f", *values)
    single = b"\x08\x02\x10\x01" + b"".join(b"\x25" + struct.pack("<f", v) for v in values)
    for message in (packed, single):
        (tmp_path / "output_0.pb").write_bytes(message)
        assert open_run(tmp_path / "output_0.pb").array(0).tolist() == list(values)


def test_spoilt_dumps_cost_tensors_or_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    for what, path in hostile.variants(DATA / "types.onnx", tmp_path / "a"):
        hostile.survives(what, path, "onnx_tensors")
    (tmp_path / "b").mkdir()
    for what, path in hostile.variants(DATA / "test_data_set_0", tmp_path / "b"):
        hostile.survives(what, path, "onnx_tensors")


def _node_dump(folder, tensors, suffix, name_of):
    """As ONNX Runtime writes the outputs of nodes: DumpTensorToFile."""
    onnx = pytest.importorskip("onnx")
    folder.mkdir()
    for number, (name, array) in enumerate(tensors.items()):
        proto = onnx.numpy_helper.from_array(array, name)
        (folder / f"{name_of(number, name)}{suffix}").write_bytes(proto.SerializeToString())
        os.utime(folder / f"{name_of(number, name)}{suffix}", (number, number))


@pytest.mark.parametrize("suffix", [".tensorproto", ".pb"])
def test_outputs_of_nodes_of_onnx_runtime_have_their_names_and_order(suffix, tmp_path):
    def name_of(number, name):
        mangled = re.sub(r"[^a-zA-Z0-9]", "_", name)
        return mangled if suffix == ".tensorproto" else f"{number:03d}_{mangled}"

    draw = np.random.default_rng(0)
    names = [f"/layers.{i}/fc/MatMul_output_0" for i in (0, 1, 2, 10)]
    tensors = {n: draw.standard_normal((4, 8)).astype(np.float32) for n in names}
    wrong = {n: -a if "layers.2/" in n else a for n, a in tensors.items()}
    for folder, held in (("ref", tensors), ("again", tensors), ("bad", wrong)):
        _node_dump(tmp_path / folder, held, suffix, name_of)
    run = open_run(tmp_path / "ref")
    labels = [c for c in run.calls if c.leaf]
    expected = [f"layers.{i}.fc.MatMul" for i in (0, 1, 2, 10)]
    if suffix == ".pb":
        expected = [f"_layers_{i}_fc_MatMul" for i in (0, 1, 2, 10)]
    assert [c.scope for c in labels] == expected
    for call, array in zip(labels, tensors.values(), strict=True):
        np.testing.assert_array_equal(run.array(call.slots("output")[0].record), array)
    assert whence.compare(tmp_path / "ref", tmp_path / "again").status == "same"
    result = whence.compare(tmp_path / "ref", tmp_path / "bad")
    assert (result.status, result.findings[0].name) == ("different", expected[2])
    file = next((tmp_path / "again").iterdir())
    file.write_bytes(file.read_bytes()[:-9])
    spoilt = whence.compare(tmp_path / "ref", tmp_path / "again", min_coverage=0.1)
    assert spoilt.status == "undecided"
