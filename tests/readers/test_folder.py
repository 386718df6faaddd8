"""Folders in which several readers have files, and files that none reads."""

import itertools
import pickle

import numpy as np
import pytest
from safetensors.numpy import save_file

import whence
from whence.readers import open_run
from whence.records import Lack, missing_of

TENSORS = {"a": np.arange(12, dtype=np.float32), "b": np.linspace(1, 2, 12, dtype=np.float32)}


def _h5(folder, name, tensors):
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / f"{name}.h5", "w") as file:
        for key, array in tensors.items():
            file.create_dataset(key, data=array)


def _npy(folder, name, tensors):
    for key, array in tensors.items():
        np.save(folder / f"{name}_{key}.npy", array)


def _torch(suffix):
    def write(folder, name, tensors):
        torch = pytest.importorskip("torch")
        held = {key: torch.from_numpy(array.copy()) for key, array in tensors.items()}
        torch.save(held, folder / f"{name}.{suffix}")

    return write


FORMATS = {
    "npy": _npy,
    "npz": lambda folder, name, tensors: np.savez(folder / f"{name}.npz", **tensors),
    "pt": _torch("pt"),
    "safetensors": lambda f, name, tensors: save_file(tensors, f / f"{name}.safetensors"),
    "h5": _h5,
    "pkl": lambda f, name, tensors: (f / f"{name}.pkl").write_bytes(pickle.dumps(tensors)),
    "bin": _torch("bin"),
}


def _dump(folder, first, second, sign=1.0):
    folder.mkdir()
    FORMATS[first](folder, "inputs", {"ids": np.arange(9, dtype=np.int32)})
    FORMATS[second](folder, "acts", TENSORS | {"b": sign * TENSORS["b"]})
    return folder


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(FORMATS, 2)])
def test_every_format_of_a_folder_is_read(first, second, tmp_path):
    ref, again = (_dump(tmp_path / name, first, second) for name in ("ref", "again"))
    flipped = _dump(tmp_path / "flipped", first, second, -1.0)
    same = whence.compare(ref, again)
    assert (same.status, same.missing) == ("same", ())
    assert sum(len(call.refs) for call in open_run(ref).calls if call.leaf) == 3
    assert whence.compare(ref, flipped).status in ("different", "undecided")


def test_a_stray_array_hides_nothing(tmp_path):
    for name, sign in (("ref", 1.0), ("bad", -1.0)):
        _dump(tmp_path / name, "npy", "pt", sign)
        np.save(tmp_path / name / "prompt_tokens.npy", np.arange(4))
    assert whence.compare(tmp_path / "ref", tmp_path / "bad").status != "same"


def test_a_file_that_nobody_reads_makes_no_two_runs_the_same(tmp_path):
    for k, name in enumerate(("ref", "bad")):
        _dump(tmp_path / name, "npy", "npz")
        (tmp_path / name / "sub").mkdir()
        TENSORS["a"][k:].tofile(tmp_path / name / "sub" / "logits.bin")
    result = whence.compare(tmp_path / "ref", tmp_path / "bad")
    assert result.status == "undecided"
    assert {(m.side, m.kind, m.where) for m in result.missing} == {
        (side, Lack.UNREAD, "sub/logits.bin") for side in ("reference", "target")
    }
    ignoring = whence.compare(tmp_path / "ref", tmp_path / "bad", ignore=["sub/*.bin"])
    assert ignoring.status == "same"
    (tmp_path / "bad/sub/logits.bin").write_bytes((tmp_path / "ref/sub/logits.bin").read_bytes())
    assert whence.compare(tmp_path / "ref", tmp_path / "bad").status == "same"


def test_notes_pictures_sources_and_settings_count_for_nothing(tmp_path):
    _dump(tmp_path / "ref", "npy", "npz")
    for name, content in {
        "notes.txt": b"made on Friday", "config.json": b'{"hidden": 64}', "plot.png": b"\x89PNG\r\n\x1a\n\0\0",
        "model.py": b"import torch", "README.md": "Grüße".encode(), "empty.txt": b"", ".DS_Store": b"\0\0\0\1",
        "run.log": b"step 1", "old.txt": "Grüße".encode("latin1"),
    }.items():  # fmt: skip
        (tmp_path / "ref" / name).write_bytes(content)
    assert not missing_of(open_run(tmp_path / "ref"))


@pytest.mark.parametrize("suffix", ["npy", "npz", "pt", "safetensors", "h5", "pkl"])
@pytest.mark.parametrize("left", [0, 0.5, 0.97])
def test_a_damaged_file_is_never_the_same(suffix, left, tmp_path):
    for name in ("ref", "bad"):
        _dump(tmp_path / name, "npy" if suffix != "npy" else "npz", suffix)
    path = next(p for p in (tmp_path / "bad").iterdir() if p.name.startswith("acts"))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(left * len(whole))])
    result = whence.compare(tmp_path / "ref", tmp_path / "bad", min_coverage=0.1)
    assert result.status == "undecided"
    assert path.name in {m.where for m in result.missing if m.side == "target"}


def test_settings_cut_off_and_links_that_lead_out_are_told(tmp_path):
    _dump(tmp_path / "ref", "npy", "npz")
    (tmp_path / "ref" / "index.json").write_bytes(b'{"weight_map": {"a"')
    (tmp_path / "ref" / "more").symlink_to(tmp_path)
    kinds = {m.where: m.kind for m in missing_of(open_run(tmp_path / "ref"))}
    assert kinds == {"index.json": Lack.DAMAGED, "more": Lack.UNREAD}


def test_what_the_kernel_makes_up_is_no_file(tmp_path):
    _dump(tmp_path / "ref", "npy", "npz")
    (tmp_path / "ref" / "b.npy").symlink_to("/proc/self/mem")
    assert "b.npy" in {m.where for m in missing_of(open_run(tmp_path / "ref"))}
    with pytest.raises(whence.errors.UnreadableRun, match="neither a file nor a folder on a disk"):
        open_run("/proc/self/status")


def test_tensors_of_several_formats_are_ordered_by_their_names(tmp_path):
    draw = np.random.default_rng(0)
    start = draw.standard_normal((4, 8))
    weights = [draw.standard_normal((8, 8)) / 2 for _ in range(4)]
    for name, fault in {"ref": 1.0, "bad": -1.0}.items():
        (tmp_path / name).mkdir()
        x, made = start, dict[str, np.ndarray]()
        for n, weight in enumerate(weights):
            x = np.tanh(x @ weight) * (fault if n == 1 else 1.0)
            made[f"layers.{n}"] = x
        np.savez(tmp_path / name / "acts.npz", **made)
        save_file({"logits": x @ weights[0]}, tmp_path / name / "out.safetensors")
        (tmp_path / name / "input_ids.pkl").write_bytes(pickle.dumps({"input_ids": start}))
    result = whence.compare(tmp_path / "ref", tmp_path / "bad")
    assert [finding.name for finding in result.findings] == ["layers.1"]
