"""What damage in a dump costs: its tensors where some can be read, the answer where none can."""

import zipfile

import h5py
import numpy as np
import pytest

import whence
from whence.api import open_run
from whence.cli import execute
from whence.errors import UnreadableRun
from whence.readers.encodings import numpy_file

torch = pytest.importorskip("torch")

DRAW = np.random.default_rng(5)
TENSORS = {f"layers.{i}.fc": DRAW.standard_normal((8, 8)).astype(np.float32) for i in range(5)}


def safetensors(path, tensors, damaged):
    """Cut off in front of the elements of as many tensors as are damaged."""
    from safetensors.numpy import save_file

    save_file(tensors, path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 256 * len(damaged)])


def npz(path, tensors, damaged):
    np.savez_compressed(path, **tensors)
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    data = bytearray(path.read_bytes())
    for entry in entries:
        if entry.filename.removesuffix(".npy") in damaged:
            start = entry.header_offset + 30 + len(entry.filename)
            for place in range(start + 20, start + 200):
                data[place] ^= 0x5A
    path.write_bytes(bytes(data))


def npy(path, tensors, damaged):
    path.mkdir()
    for name, array in tensors.items():
        np.save(path / f"{name}.npy", array)
        if name in damaged:
            file = path / f"{name}.npy"
            file.write_bytes(file.read_bytes()[:-40])


def pt(path, tensors, damaged):
    """An archive in which storages are shorter than the tensors on them."""
    whole = path.with_suffix(".whole")
    torch.save({name: torch.tensor(array) for name, array in tensors.items()}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            folder, _, number = entry.filename.rpartition("/")
            data = source.read(entry)
            spoilt = folder.endswith("/data") and list(tensors)[int(number)] in damaged
            target.writestr(entry.filename, data[:20] if spoilt else data)
    whole.unlink()


def hdf5(path, tensors, damaged):
    names = {name: f"0/{name}.Linear.0.forward_output.0" for name in tensors}
    with h5py.File(path, "w") as file:
        for name, array in tensors.items():
            file.create_dataset(names[name], data=array, chunks=(8, 8), compression="gzip")
        chunks = {name: file[at].id.get_chunk_info(0) for name, at in names.items()}
    data = bytearray(path.read_bytes())
    for name in damaged:
        start = chunks[name].byte_offset
        for place in range(start + 4, start + chunks[name].size):
            data[place] ^= 0x5A
    path.write_bytes(bytes(data))


KINDS = {"x.safetensors": safetensors, "x.npz": npz, "x": npy, "x.pt": pt, "x.h5": hdf5}


@pytest.fixture(params=KINDS)
def damaged(request, tmp_path):
    """Makes a dump of one kind, given which of its tensors are damaged; returns its path."""

    def make(*which):
        folder = tmp_path / str(len(which))
        folder.mkdir()
        KINDS[request.param](folder / request.param, TENSORS, which)
        return folder / request.param

    return make


def test_a_dump_of_which_nothing_can_be_read_ends_every_command_with_3(damaged, tmp_path, capsys):
    whole, nothing = damaged(), damaged(*TENSORS)
    for command in (
        ["show", nothing],
        ["compare", whole, nothing],
        ["compare", nothing, whole],
        ["align", whole, nothing],
        ["convert", nothing, tmp_path / "converted", "--to", "npy"],
    ):
        assert execute([str(word) for word in command]) == 3, command
        said = capsys.readouterr().err
        assert str(nothing) in said, command
        assert "can be read: " in said, command
    with pytest.raises(UnreadableRun, match="can be read: "):
        open_run(nothing)


def test_damaged_tensors_cost_themselves_and_are_told(damaged, capsys):
    whole, some = damaged(), damaged("layers.3.fc", "layers.4.fc")
    assert execute(["show", str(whole)]) == 0
    assert execute(["show", str(some)]) == 3
    shown, said = capsys.readouterr()
    assert "layers.0.fc" in shown
    assert said.startswith("whence: a part of this run cannot be read: ")
    assert "cannot be read: cannot" not in said
    assert execute(["compare", str(whole), str(some)]) == 2
    answer = capsys.readouterr().out
    assert answer.startswith("UNDECIDED")
    assert "3 identical" in answer
    told = [line for line in answer.splitlines() if line.startswith(("note: ", "  missing"))]
    assert any("layers.3.fc" in line or "2 pairs" in line for line in told), told
    assert not any("not kept" in line for line in told)


def test_opening_a_dump_reads_tensors_until_one_is_read(tmp_path, monkeypatch):
    npy(tmp_path / "x", TENSORS, ("layers.0.fc", "layers.1.fc"))
    read, array = [], numpy_file.array

    def counted(header, data, label):
        read.append(label)
        return array(header, data, label)

    monkeypatch.setattr(numpy_file, "array", counted)
    open_run(tmp_path / "x")
    assert len(read) == 3


def test_what_has_no_element_does_not_stand_for_what_is_damaged(tmp_path):
    npy(tmp_path / "x", TENSORS, TENSORS)
    np.save(tmp_path / "x" / "empty.npy", np.ones((0, 4)))
    with pytest.raises(UnreadableRun, match=r"layers\.0\.fc\.npy.* \(and 4 more\)"):
        open_run(tmp_path / "x")


def test_reasons_behind_the_third_are_counted(tmp_path, capsys):
    npy(tmp_path / "a", TENSORS, ())
    more = {f"layers.{i}.up": np.ones(3, np.float32) for i in range(2)}
    npy(tmp_path / "b", TENSORS, TENSORS)
    for name, array in more.items():
        np.save(tmp_path / "a" / f"{name}.npy", array)
        np.save(tmp_path / "b" / f"{name}.npy", array)
    assert execute(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    told = [x for x in capsys.readouterr().out.splitlines() if x.startswith("note: ")]
    assert sum("1 pair of tensors not measured" in line for line in told) == 3
    assert told[-1].endswith("2 more pairs of tensors not measured, for 2 more reasons")


def test_a_damaged_run_says_that_its_elements_cannot_be_read(tmp_path, capsys):
    model = torch.nn.Linear(8, 8).eval()
    with torch.no_grad():
        for name in ("a", "b"):
            with whence.capture(model, tmp_path / name):
                model(torch.ones(2, 8))
            model.weight[3, 3] += 1.0
    (shard,) = (tmp_path / "b").glob("rank*/shard-00000.safetensors")
    shard.write_bytes(shard.read_bytes()[:-400])
    assert execute(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    answer = capsys.readouterr().out
    assert "weight: hashes differ (the target's elements cannot be read, so not how)" in answer
    missing = next(x for x in answer.splitlines() if x.startswith("  missing"))
    assert "target, rank00000" in missing
    assert "elements of 4 of 4 tensors cannot be read: " in missing
    assert "not kept" not in answer
    assert execute(["show", str(tmp_path / "b")]) == 0
    assert "error: elements of 4 of 4 tensors cannot be read: " in capsys.readouterr().out
