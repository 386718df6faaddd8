"""Folders and archives of numpy arrays; numpy is the oracle."""

import io
import json
import os
import subprocess
import sys
import zipfile
from functools import partialmethod

import ml_dtypes
import numpy as np
import pytest

import whence
from readers import hostile
from readers.mapped import is_mapped
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers import UNORDERED, open_run
from whence.readers.encodings.archive import MAPPED_FROM

DRAW = np.random.default_rng(0)
ARRAYS = {
    "plain": DRAW.standard_normal((3, 4)).astype(np.float32),
    "fortran": np.asfortranarray(DRAW.standard_normal((3, 4))),
    "big": DRAW.standard_normal(5).astype(">f4"),
    "scalar": np.float64(2.5),
    "empty": np.empty((0, 3), np.int8),
    "bool": np.array([True, False]),
    "complex": DRAW.standard_normal(3).astype(np.complex64),
    "half": DRAW.standard_normal(3).astype(np.float16),
    "bf16": DRAW.standard_normal(3).astype(ml_dtypes.bfloat16),
    "e5m2": DRAW.standard_normal(3).astype(ml_dtypes.float8_e5m2),
    "uint16": np.arange(3, dtype=np.uint16),
}


def tensors(run):
    """{scope: (record, elements)} of the outputs of a run."""
    return {c.scope: run.array(c.slots("output")[0].record) for c in run.calls if c.leaf}


@pytest.mark.parametrize("form", ["folder", "npz", "deflated"])
def test_every_dtype_and_order_comes_back_bit_by_bit(form, tmp_path):
    place = tmp_path / "dump.npz"
    if form == "folder":
        place = tmp_path / "dump"
        place.mkdir()
        for name, array in ARRAYS.items():
            np.save(place / f"{name}.npy", array)
    else:
        (np.savez if form == "npz" else np.savez_compressed)(place, **ARRAYS)
    found = tensors(open_run(place))
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        want = np.asarray(array)
        assert found[name].dtype == want.dtype.newbyteorder("="), name
        assert found[name].shape == want.shape, name
        assert found[name].tobytes() == want.astype(want.dtype.newbyteorder("=")).tobytes(), name


def test_elements_of_a_file_are_memory_mapped(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(MAPPED_FROM, dtype=np.int8))
    assert is_mapped(open_run(tmp_path / "a.npy").array(0))


def test_what_holds_no_numbers_says_so(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}, []], object), allow_pickle=True)
    np.save(tmp_path / "fields.npy", np.zeros(2, [("a", "f4"), ("b", "i4")]))
    np.save(tmp_path / "text.npy", np.array(["a"]))
    np.save(tmp_path / "float8.npy", np.zeros(2, ml_dtypes.float8_e4m3fn))
    np.save(tmp_path / "good.npy", np.ones(3))
    run = open_run(tmp_path)
    whys = {c.scope: run.records[c.slots("output")[0].record].why for c in run.calls if c.leaf}
    assert "pickle" in whys["objects"]
    assert "structured" in whys["fields"]
    assert "text" not in whys  # a prompt beside tensors
    assert "float32" in whys["float8"]
    assert not whys["good"]
    with pytest.raises(ElementsMissing, match="pickle"):
        run.array(next(c for c in run.calls if c.scope == "objects").slots("output")[0].record)


def test_steps_and_ranks_are_folders_and_numbers_give_the_order(tmp_path):
    for step in range(2):
        for rank in range(2):
            folder = tmp_path / f"step{step}" / f"rank_{rank}" / "layers"
            folder.mkdir(parents=True)
            for i in (10, 9, 2):
                np.save(folder / f"{i}.npy", np.full(3, i, np.float32))
    leaves = [c for c in sorted(open_run(tmp_path).calls, key=lambda c: c.order) if c.leaf]
    assert [(c.step, c.rank, c.scope) for c in leaves[:6]] == [
        (0, r, f"layers.{i}") for r in range(2) for i in (2, 9, 10)
    ]
    assert {(c.step, c.rank) for c in leaves} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert UNORDERED not in leaves[0].notes


def test_a_number_that_every_name_begins_with_is_the_order_and_no_part_of_the_name(tmp_path):
    for i, name in enumerate(["embed", "layers.0.norm", "layers.0.attn", "layers.0.norm", "head"]):
        np.save(tmp_path / f"{i:03d}_{name}.npy", np.arange(3.0) + i)
    leaves = sorted((c for c in open_run(tmp_path).calls if c.leaf), key=lambda c: c.order)
    assert [(c.scope, c.occurrence) for c in leaves] == [
        ("embed", 0),
        ("layers.0.norm", 0),
        ("layers.0.attn", 0),
        ("layers.0.norm", 1),
        ("head", 0),
    ]


def test_times_of_writing_give_the_order_only_where_they_agree_with_the_numbers(tmp_path):
    names = ["embed", "layers.0.norm", "layers.0.attn", "layers.1.norm", "layers.1.attn", "head"]

    def written(order):
        for moment, name in enumerate(order):
            np.save(tmp_path / f"{name}.npy", np.ones(3))
            os.utime(tmp_path / f"{name}.npy", ns=(10**9 * moment, 10**9 * moment))
        leaves = sorted((c for c in open_run(tmp_path).calls if c.leaf), key=lambda c: c.order)
        return [c.scope for c in leaves], not leaves[0].notes

    assert written(names) == (names, True)
    copied, has_order = written(names[::-1])
    assert (copied[0], copied[-1], has_order) == ("embed", "head", False)


def test_inputs_and_outputs_of_a_module_are_one_call(tmp_path):
    names = [
        "input",
        "layers.0.input.0",
        "layers.0.mlp.input",
        "layers.0.mlp.output",
        "layers.0.output",
        "output",
    ]
    np.savez(tmp_path / "d.npz", **{name: np.arange(4.0) + i for i, name in enumerate(names)})
    calls = {c.scope: c for c in open_run(tmp_path / "d.npz").calls}
    assert set(calls) == {"", "layers.0", "layers.0.mlp"}
    assert [[r.slot for r in calls[scope].refs] for scope in calls] == [["input.0", "output.0"]] * 3
    assert calls["layers.0.mlp"].parent == calls["layers.0"].id
    assert calls["layers.0"].parent == calls[""].id
    assert calls[""].parent == -1


def chain(fault=None, dtype=np.float32):
    """Activations of a chain of products, one of which may be wrong."""
    draw = np.random.default_rng(1)
    x, out = draw.standard_normal((4, 16)).astype(np.float32), {}
    for i in range(6):
        w = draw.standard_normal((16, 16)).astype(np.float32) / 4
        x = (x.astype(dtype) @ w.astype(dtype)).astype(dtype).astype(np.float32)
        if i == fault:
            x[:, 3] *= 1.5
        out[f"{i:02d}_layers.{i}.proj"] = x
    return out


@pytest.fixture
def dumps(tmp_path):
    for name, arrays in {
        "ref": chain(),
        "half": chain(dtype=np.float16),
        "bad": chain(3),
        "bad_half": chain(3, np.float16),
    }.items():
        (tmp_path / name).mkdir()
        for key, array in arrays.items():
            np.save(tmp_path / name / f"{key}.npy", array)
        np.savez(tmp_path / f"{name}.npz", **arrays)
    return tmp_path


@pytest.mark.parametrize("suffix", ["", ".npz"])
def test_a_planted_fault_is_named_and_rounding_is_not_one(suffix, dumps):
    assert (
        whence.compare(str(dumps / f"ref{suffix}"), str(dumps / f"half{suffix}")).status == "same"
    )
    assert whence.compare(str(dumps / f"ref{suffix}"), str(dumps / "ref")).status == "same"
    for bad in ("bad", "bad_half"):
        result = whence.compare(str(dumps / f"ref{suffix}"), str(dumps / f"{bad}{suffix}"))
        assert result.status == "different"
        assert result.findings[0].name == "layers.3.proj"


def test_the_command_line_takes_folders_of_arrays(dumps):
    command = [
        sys.executable,
        "-m",
        "whence",
        "compare",
        "ref",
        "bad_half.npz",
        "-o",
        "cmp",
        "--format",
        "json",
    ]
    done = subprocess.run(command, cwd=dumps, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["findings"][0]["name"] == "layers.3.proj"


def test_where_the_order_is_not_known_nothing_is_called_inherited(tmp_path):
    for name, fault in {"ref": None, "bad": 1}.items():
        (tmp_path / name).mkdir()
        for letter, array in zip("zyxwvu", chain(fault).values(), strict=True):
            np.save(tmp_path / name / f"{letter}.npy", array)
            os.utime(tmp_path / name / f"{letter}.npy", ns=(0, 0))
    result = whence.compare(str(tmp_path / "ref"), str(tmp_path / "bad"))
    assert result.status == "undecided"
    assert "made before which" in result.headline
    assert whence.compare(str(tmp_path / "ref"), str(tmp_path / "ref")).status == "same"


def test_every_rank_is_held_against_itself_and_its_root_hands_on_what_its_labels_made(tmp_path):
    for run, factors in (("ref", (1.0, 1.0)), ("tgt", (3.0, 1.5))):
        for rank, factor in enumerate(factors):
            folder = tmp_path / run / f"rank_{rank}"
            folder.mkdir(parents=True)
            x = np.random.default_rng(rank).normal(size=(4, 8))
            y = np.tanh(x) * factor
            for i, (name, a) in enumerate((("x", x), ("act", y), ("out", y * 2))):
                file = folder / f"{f'{i:02}_' if run == 'ref' else ''}{name}.npy"
                np.save(file, a)
                os.utime(file, ns=(0, 0))
    found = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert [f.name for f in found.findings] == ["act"]
    assert (
        sum(v.verdict == "introduced" for v in found.verdicts) == 2
    )  # on either rank, whatever is wrong on the other


def test_files_that_are_not_read_are_told(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(3))
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY\x01\x00")
    (tmp_path / "b.pt").write_bytes(b"PK")
    missing = {m.where: m.text for m in open_run(tmp_path).missing}
    assert missing["broken.npy"] == "broken.npy is not read: it is no .npy file"
    assert "b.pt is not read" in missing["b.pt"]


@pytest.mark.parametrize("form", ["npy", "npz", "folder"])
def test_spoilt_dumps_cost_tensors_or_are_refused(form, tmp_path):
    sample = tmp_path / "sample"
    if form == "npz":
        sample = tmp_path / "sample.npz"
        np.savez_compressed(sample, a=np.arange(6.0).reshape(2, 3), b=np.ones(3, np.float16))
    elif form == "npy":
        sample = tmp_path / "sample.npy"
        np.save(sample, np.arange(6.0).reshape(2, 3))
    else:
        sample.mkdir()
        np.save(sample / "a.npy", np.arange(6.0))
        np.save(sample / "b.npy", np.ones(3))
    (tmp_path / "work").mkdir()
    for what, path in hostile.variants(sample, tmp_path / "work"):
        hostile.survives(what, path, "npy")


def test_an_archive_that_unpacks_to_far_more_than_it_is_costs_that_tensor(tmp_path):
    (tmp_path / "bomb.npz").write_bytes(hostile.zip_bomb())
    with pytest.raises(UnreadableRun, match=r"not one of its tensors can be read: .*unpack"):
        open_run(tmp_path / "bomb.npz")
    np.save(tmp_path / "whole.npy", np.ones(3))
    run = hostile.survives("a bomb", tmp_path)
    with pytest.raises(ElementsMissing, match="unpack"):
        run.array(next(r.id for r in run.records if r.shape != (3,)))


def test_a_member_that_leads_outside_is_only_a_name(tmp_path):
    data = io.BytesIO()
    np.save(data, np.ones(3))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for name in hostile.ESCAPES:
            archive.writestr(f"{name}.npy", data.getvalue())
    assert hostile.survives("names", tmp_path / "x.npz") is not None


def test_a_file_that_is_no_array_is_refused_with_its_name(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\x05\x00oops\n")
    with pytest.raises(UnreadableRun, match=r"a\.npy.*header cannot be read"):
        open_run(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_an_archive_is_linear_in_its_entries(method, tmp_path, monkeypatch):
    """Its directory is read once, however many entries are asked for; each has its own elements,
    and a checksum.
    """
    path, data = tmp_path / "x.npz", {}
    with zipfile.ZipFile(path, "w", method) as archive:
        for i in range(40):
            out = io.BytesIO()
            np.save(out, np.full((3, 2), i, np.float32))
            data[f"h{i}"] = out.getvalue()
            archive.writestr(f"h{i}.npy", data[f"h{i}"])
    read = []
    monkeypatch.setattr(
        zipfile.ZipFile,
        "_RealGetContents",
        partialmethod(_counted, zipfile.ZipFile._RealGetContents, read),
    )
    run = open_run(path)
    for call in run.calls:
        if call.scope:
            np.testing.assert_array_equal(
                run.array(call.slots("output")[0].record),
                np.full((3, 2), int(call.scope[1:]), np.float32),
            )
    assert len(read) <= 2


def _counted(self, real, read):
    read.append(self)
    return real(self)


def test_a_file_whose_name_is_no_utf_8(tmp_path):
    dump = tmp_path / "dump"
    dump.mkdir()
    try:
        np.save(dump / os.fsdecode(b"x\xe9.npy"), np.ones(3, np.float32))
    except OSError:
        pytest.skip("this file system takes no such name")
    np.save(dump / "y.npy", np.ones(3, np.float32))
    assert {"x\\udce9", "y"} <= {call.scope for call in open_run(dump).calls}
    result = whence.compare(dump, dump, output=tmp_path / "cmp")
    assert result.status == "same"


def test_arrays_that_were_saved_behind_each_other_are_all_read(tmp_path):
    """np.save on one open file: what follows the first array is not passed over."""
    arrays = [np.arange(12.0).reshape(3, 4), np.float32(1.5), np.ones((0, 2)), np.arange(5)]
    with (tmp_path / "x.npy").open("wb") as file:
        for array in arrays:
            np.save(file, array)
    run = open_run(tmp_path / "x.npy")
    held = [run.array(c.slots("output")[0].record) for c in run.calls if c.leaf]
    for array, read in zip(arrays, held, strict=True):
        assert (read.dtype, read.shape, read.tobytes()) == (
            np.asarray(array).dtype,
            np.shape(array),
            np.asarray(array).tobytes(),
        )
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-8])
    run = open_run(tmp_path / "x.npy")
    with pytest.raises(ElementsMissing):
        run.array(len(run.records) - 1)


def test_texts_beside_arrays_are_no_tensors(tmp_path):
    np.savez(tmp_path / "fc.npz", output=np.arange(6.0), module=np.array("Linear"))
    assert [c.scope for c in open_run(tmp_path).calls if c.leaf] == ["output"]
