"""torch_xray dumps: order, dtypes, names with and without numbers, the planted GELU, and files that lead outside of themselves."""

from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest

import whence
from readers.hostile import survives, variants
from whence.api import open_run
from whence.cli import execute
from whence.errors import ElementsMissing, MissingDependency, UnreadableRun

DATA = Path(__file__).parent.parent / "data" / "torch_xray"
GPU, XPU, NOIDX = (DATA / f"{name}_globalrank-0_localrank-0.h5" for name in ("gpu", "xpu", "xpu_noidx"))
RNG = np.random.default_rng(4)


def written(path, tensors, step="1", dtypes=(), track=True, **options):
    with h5py.File(path, "a", track_order=track) as file:
        group = file.create_group(step, track_order=track) if step else file
        for name, array in tensors.items():
            group.create_dataset(name, data=array, **options)
            if name in dtypes:
                group[name].attrs["dtype"] = dtypes[name]
    return path


def test_tensors_come_in_the_order_of_creation_with_their_elements_bit_by_bit():
    run = open_run(GPU)
    calls = sorted(run.calls, key=lambda c: c.order)
    assert [c.scope for c in calls] == [
        "", "pos_embed", "blocks.0.norm1", "blocks.0.fc1", "blocks.0.act_fn", "blocks.0.fc2", "blocks.1.norm1", "blocks.1.fc1",
        "blocks.1.act_fn", "blocks.1.fc2",
    ]  # fmt: skip
    assert [c.op_type for c in calls][1:4] == ["Embedding", "LayerNorm", "Linear"]
    assert [r.slot for r in calls[3].refs] == ["input.0", "param.weight", "param.bias", "output.0"]
    with h5py.File(GPU) as file:
        stored = [file["1"][name][()] for name in file["1"]]
    assert len(stored) == len(run.records) == 31
    for record, expected in zip(run.records, stored):
        np.testing.assert_array_equal(run.array(record.id), expected)
        assert run.array(record.id).dtype == expected.dtype


def test_float32_copies_of_bfloat16_are_bfloat16_again():
    run = open_run(XPU)
    with h5py.File(XPU) as file:
        stored = {name: d[()] for name, d in file["1"].items() if d.dtype.kind == "f"}
    floats = [r for r in run.records if r.dtype == "bfloat16"]
    assert len(floats) == len(stored) == 30
    for record, expected in zip(floats, stored.values()):
        assert run.array(record.id).dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(run.array(record.id).astype(np.float32), expected)


@pytest.mark.parametrize("target", [XPU, NOIDX])
def test_the_gelu_of_block_1_is_named_from_the_command_line(target, capsys, tmp_path):
    assert execute(["compare", str(GPU), str(target), "-o", str(tmp_path / "cmp")]) == 1
    text = capsys.readouterr().out
    assert text.startswith("FAULT              blocks.1.act_fn   GELU")
    assert "computed by tanh where the reference computes by erf" in text


def test_without_the_attribute_the_numbers_tell_that_they_were_bfloat16(tmp_path):
    for name, source in (("reference", GPU), ("target", XPU)):
        with h5py.File(source) as old, h5py.File(tmp_path / f"{name}.h5", "w", track_order=True) as new:
            group = new.create_group("1", track_order=True)
            for key in old["1"]:
                group[key] = old["1"][key][()]
    result = whence.compare(tmp_path / "reference.h5", tmp_path / "target.h5")
    assert [f.name for f in result.findings] == ["blocks.1.act_fn"]
    assert "19 tensors stored in float32 hold numbers of bfloat16" in " ".join(result.notes)


def test_names_with_and_without_numbers_are_one_run():
    result = whence.compare(XPU, NOIDX)
    assert (result.status, result.unmatched, set(result.counts)) == ("same", 0, {"identical"})


def test_stored_bits_big_endian_packed_and_small_things(tmp_path):
    half = RNG.standard_normal((64, 32)).astype(np.float16)
    bits = RNG.standard_normal(40).astype(ml_dtypes.bfloat16)
    f8 = RNG.standard_normal(16).astype(ml_dtypes.float8_e4m3fn)
    path = tmp_path / "x.h5"
    written(
        path,
        {
            "a.X.0.forward_output.0": bits.view(np.uint16), "a.X.0.forward_output.1": np.arange(6, dtype=">f4"),
            "a.X.0.forward_output.2": np.array(True), "a.X.0.forward_output.3": np.zeros((0, 3), np.int8),
            "a.X.0.forward_output.4": np.array([1 + 2j], np.complex64), "a.X.0.forward_output.5": f8.view(np.uint8),
        },
        dtypes={"a.X.0.forward_output.0": "torch.bfloat16", "a.X.0.forward_output.5": "torch.float8_e4m3fn"},
    )  # fmt: skip
    for i, options in enumerate(({"compression": "gzip", "shuffle": True}, {"compression": "lzf"}, {"fletcher32": True, "chunks": (7, 5)})):
        written(path, {f"p{i}.X.0.forward_output.0": half}, step=str(i + 2), **options)
    run = open_run(path)
    got = [run.array(r.id) for r in run.records]
    np.testing.assert_array_equal(got[0].view(np.uint16), bits.view(np.uint16))
    np.testing.assert_array_equal(got[1], np.arange(6, dtype=np.float32))
    assert (got[2].shape, got[2].dtype, bool(got[2])) == ((), np.bool_, True)
    assert (got[3].shape, got[3].dtype) == ((0, 3), np.int8)
    assert got[4][0] == 1 + 2j
    np.testing.assert_array_equal(got[5].view(np.uint8), f8.view(np.uint8))
    for packed in got[6:]:
        np.testing.assert_array_equal(packed, half)
    assert [s.step for s in run.steps] == [0, 1, 2, 3]


def test_steps_are_numbers_ranks_are_files_and_missing_groups_do_not_matter(tmp_path):
    for rank in (0, 1):
        path = tmp_path / f"globalrank-{rank}_localrank-{rank}.h5"
        for step in ("10", "2", "1"):
            written(path, {"m.Linear.0.forward_output.0": np.full(3, 10 * rank + int(step), np.float32)}, step=step)
    run = open_run(tmp_path)
    found = {(c.rank, c.step): run.array(c.slots("output")[0].record)[0] for c in run.calls if c.scope}
    assert found == {(r, s - 1): 10 * r + s for r in (0, 1) for s in (1, 2, 10)}
    flat = written(tmp_path / "flat.h5", {"a%2Fb.Linear.forward_output.0": np.ones(3)}, step="")
    assert [c.scope for c in open_run(flat).calls if c.scope] == ["a/b"]
    with h5py.File(tmp_path / "nested.h5", "w") as file:
        file["1/fc1.Linear.0/forward_output.0"] = np.ones(3)
    assert [(c.scope, c.op_type) for c in open_run(tmp_path / "nested.h5").calls if c.scope] == [("fc1", "Linear")]
    with h5py.File(tmp_path / "other_globalrank-0_localrank-3.h5", "w") as file:
        file["x"] = np.ones(3)
    with pytest.raises(UnreadableRun, match="are both rank 0"):
        open_run(tmp_path)


def test_without_an_order_the_place_in_the_file_tells_it(tmp_path):
    names = [f"{name}.Linear.0.forward_output.0" for name in ("z", "m", "a", "q")]
    path = written(tmp_path / "x.h5", {name: np.ones(3, np.float32) for name in names}, track=False)
    with h5py.File(path) as file:
        assert list(file["1"]) == sorted(names)
    assert [c.scope for c in sorted(open_run(path).calls, key=lambda c: c.order) if c.scope] == ["z", "m", "a", "q"]


def test_modules_that_hold_others_are_their_parents(tmp_path):
    path = written(
        tmp_path / "x.h5",
        {f"{name}.forward_{slot}.0": np.ones(3) for name in ("b.0.fc.Linear.0", "b.0.Block.0", "b.1.fc.Linear.1", "b.1.Block.1", "Net.0")
         for slot in ("input", "output")},
    )  # fmt: skip
    run = open_run(path)
    above = {c.scope: run.calls[c.parent].scope for c in run.calls if c.parent >= 0}
    assert above == {"b.0.fc": "b.0", "b.1.fc": "b.1", "b.0": "", "b.1": ""}


def test_nothing_outside_the_file_is_read(tmp_path):
    np.arange(100, dtype=np.float32).tofile(tmp_path / "secret.bin")
    written(tmp_path / "other.h5", {"s.Linear.0.forward_output.0": np.full(5, 7.0)})
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("1")
        group["a.Linear.0.forward_output.0"] = np.ones(8)
        group["soft.Linear.1.forward_output.0"] = h5py.SoftLink("/1/a.Linear.0.forward_output.0")
        group["link"] = h5py.ExternalLink("other.h5", "/1")
        group["loop"], group["self"] = h5py.SoftLink("/1"), h5py.SoftLink("/1/self")
        group.create_dataset("ext.Linear.2.forward_output.0", (100,), "f4", external=[(str(tmp_path / "secret.bin"), 0, 400)])
        layout = h5py.VirtualLayout((5,), "f8")
        layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "1/s.Linear.0.forward_output.0", (5,))
        group.create_virtual_dataset("virt.Linear.3.forward_output.0", layout)
    run = open_run(path)
    by_scope = {c.scope: c.slots("output")[0].record for c in run.calls if c.scope}
    assert set(by_scope) == {"a", "soft", "ext", "virt"}
    np.testing.assert_array_equal(run.array(by_scope["soft"]), np.ones(8))
    for scope, words in (("ext", "another file"), ("virt", "virtual dataset")):
        with pytest.raises(ElementsMissing, match=words):
            run.array(by_scope[scope])
    notes = " ".join(n.text for n in run.notes)
    assert "leads to another file (other.h5)" in notes and "/1/loop" in notes and "/1/self" in notes


def test_what_asks_for_too_much_is_not_unpacked(tmp_path):
    path = written(tmp_path / "x.h5", {"a.Linear.0.forward_output.0": np.zeros(1 << 26, np.float64)}, compression="gzip", chunks=(1 << 26,))
    with h5py.File(path, "a") as file:
        file["1"].create_dataset("b.Linear.1.forward_output.0", (1 << 40,), "f4", chunks=(1000,), compression="gzip")
    assert path.stat().st_size < 2 << 20
    run = survives("bombs", path)
    for record in run.records:
        with pytest.raises(ElementsMissing, match="unpack"):
            run.array(record.id)


def test_an_attribute_that_lies_costs_its_tensor(tmp_path):
    path = written(
        tmp_path / "x.h5", {"a.X.0.forward_output.0": np.array([1.1], np.float32), "b.X.1.forward_output.0": np.ones(2, np.float32)},
        dtypes={"a.X.0.forward_output.0": "torch.bfloat16", "b.X.1.forward_output.0": "float4_e2m1fn_x2"},
    )  # fmt: skip
    run = open_run(path)
    for record, words in zip(run.records, ("no bfloat16", "not known")):
        with pytest.raises(ElementsMissing, match=words):
            run.array(record.id)


def test_without_h5py_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(MissingDependency, match=r'pip install "whence\[h5\]"'):
        open_run(GPU)


def test_damaged_files_are_refused_or_lose_tensors(tmp_path):
    for what, path in variants(GPU, tmp_path):
        survives(what, path, "torch_xray")
