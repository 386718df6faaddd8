"""A file of a dump or run that is cut, emptied, removed or exchanged on one side is never `same`."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import whence
from whence.errors import WhenceError

DATA = Path(__file__).parents[1] / "data"
EVERYTHING = os.environ.get("WHENCE_TESTS") == "all"
NAMES = ("embed", "norm", "head")
DRAW = np.random.default_rng(9)
STEPS = [{n: DRAW.standard_normal((3, 4)).astype(np.float32) for n in NAMES} for _ in range(3)]


def _each(write):
    """A dump of one file a step."""

    def make(folder):
        for number, tensors in enumerate(STEPS):
            write(folder / f"step{number}", tensors)

    return make


def _npy(path, tensors):
    path.mkdir()
    for name, array in tensors.items():
        np.save(path / f"{name}.npy", array)


def _torch(path, tensors):
    torch = pytest.importorskip("torch")
    held = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
    torch.save(held, path.with_suffix(".pt"))


def _h5(path, tensors):
    with pytest.importorskip("h5py").File(path.with_suffix(".h5"), "w") as file:
        for name, array in tensors.items():
            file.create_dataset(name, data=array)


def _texts(write, suffix):
    """A file a tensor."""

    def make(folder):
        for number, tensors in enumerate(STEPS):
            (folder / f"step{number}").mkdir()
            for name, array in tensors.items():
                write(folder / f"step{number}" / f"{name}{suffix}", array)

    return make


def _raw(path, array):
    array.tofile(path)
    path.with_suffix(".shape").write_text("3x4:float32\n")


def _prints(folder):
    lines = [f"{n} {array!r}\n" for tensors in STEPS for n, array in tensors.items()]
    (folder / "run.log").write_text("".join(lines))


def _hooks(folder):
    torch = pytest.importorskip("torch")
    for step, tensors in enumerate(STEPS, 1):
        for name, array in tensors.items():
            file = f"captured_tensors_cte_step_{step}_module_{name}_output.pt"
            torch.save(torch.from_numpy(array.copy()), folder / file)


def _captured(folder):
    nn = pytest.importorskip("torch").nn
    nn.init.normal_((net := nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))[0].weight)
    with whence.capture(net, folder, force=True):
        for tensors in STEPS[:2]:
            net(nn.Parameter(net[0].weight.new_tensor(tensors["embed"].tolist())))


def _converted(form):
    def make(folder):
        _captured(folder.with_name("run"))
        folder.rmdir()
        whence.convert(folder.with_name("run"), folder, to=form)

    return make


def _sample(name):
    def make(folder):
        source = DATA / name
        if source.is_dir():
            shutil.copytree(source, folder, dirs_exist_ok=True)
        else:
            shutil.copy(source, folder)

    return make


DUMPS = {
    "npy": _each(_npy),
    "npz": _each(lambda path, tensors: np.savez(path.with_suffix(".npz"), **tensors)),
    "pt": _each(_torch),
    "safetensors": _each(lambda path, t: save_file(t, path.with_suffix(".safetensors"))),
    "h5": _each(_h5),
    "pkl": _each(lambda path, t: path.with_suffix(".pkl").write_bytes(pickle.dumps(t))),
    "np.save of a dict": _each(
        lambda path, t: np.save(path.with_suffix(".npy"), t, allow_pickle=True)
    ),
    "savetxt": _texts(np.savetxt, ".txt"),
    "json": _each(
        lambda path, t: path.with_suffix(".json").write_text(
            json.dumps({name: array.tolist() for name, array in t.items()})
        )
    ),
    "raw": _texts(_raw, ".bin"),
    "prints": _prints,
    "run": _captured,
    "npy of a run": _converted("npy"),
    "safetensors of a run": _converted("safetensors"),
    "polygraphy of a run": _converted("polygraphy"),
    "msprobe": _sample("msprobe/reference"),
    "msprobe sums": _sample("msprobe/L1_md5"),
    "msprobe debugger": _sample("msprobe/debug_save"),
    "fx": _sample("ascend/fx_new"),
    "ge": _sample("ascend/ge"),
    "atb": _sample("ascend/atb"),
    "sglang": _sample("sglang/dumper_ref"),
    "sglang hooks": _sample("sglang/hook_ref"),
    "engines' hooks": _hooks,
    "polygraphy": _sample("polygraphy/ref.json"),
    "torch_xray": _sample("torch_xray/gpu_globalrank-0_localrank-0.h5"),
    "transformers": _sample("hf_debugger/ref_files"),
    "transformers text": _sample("hf_debugger/ref_text"),
    "llama.cpp": _sample("llama_cpp/reference.log"),
    "onnx": _sample("onnx"),
}
RESTS_ON_NOTHING = {
    "raw": (".shape",),  # the tensor of the other run has it too
    "run": ("index.safetensors",),  # made anew from the journal
    "msprobe": ("stack.json", "construct.json"),  # lines of source, modules around the calls
    "msprobe sums": ("stack.json", "construct.json"),
    "ge": (".txt",),  # where a node stood before it was fused
    "transformers": ("SUMMARY.json",),  # a shorter print of what FULL_TENSORS.json holds
    "transformers text": ("SUMMARY.json",),
}
"""Ends of names of files without a tensor, and without anything that the answer rests on."""


def _damages(files, among):
    """(what was done, to which file, what stands there then or None), for some files of each kind,
    or for all.
    """
    of_each_kind = _kinds(files)
    for file in files:
        whole, held = file.read_bytes(), len(file.read_bytes().rstrip(b"\0 \r\n"))
        # not its neighbour: the input of a call is the output of the one before
        other = among[among.index(file) - len(among) // 2]
        # where a cut falls matters by the format, not by the file
        is_every_cut = EVERYTHING and file in of_each_kind
        shares = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97) if is_every_cut else (0.5,)
        for share in shares:
            yield f"cut to {share:.0%}", file, whole[: int(share * held)]
        if EVERYTHING:
            yield "cut by a byte", file, whole[: held - 1]
            yield "emptied", file, b""
        yield "removed", file, None
        if other.suffix == file.suffix and other.read_bytes() != whole:
            yield "exchanged", file, other.read_bytes()


def _chosen(folder):
    """The files that are damaged: one of each kind, or some 30 spread over all."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    spread = files[:: 1 + len(files) // 32] if EVERYTHING else []
    return sorted({*spread, *_kinds(files)})


def _kinds(files):
    """One file of each kind."""
    kinds = {file.suffix if file.suffix[1:2].isalpha() else "": file for file in files}
    return list(kinds.values())


@pytest.mark.parametrize("name", DUMPS)
def test_no_damaged_file_passes(name, tmp_path):
    whole, spoilt = tmp_path / "whole", tmp_path / "spoilt"
    whole.mkdir()
    DUMPS[name](whole)
    shutil.copytree(whole, spoilt)
    passed = []
    spared = RESTS_ON_NOTHING.get(name, ("nothing",))
    files = [file for file in _chosen(spoilt) if not file.name.endswith(spared)]
    among = sorted(p for p in spoilt.rglob("*") if p.is_file() and p.name != "index.safetensors")
    for what, file, content in _damages(files, among):
        before = file.read_bytes()
        file.unlink() if content is None else file.write_bytes(content)
        both = ((whole, spoilt), (spoilt, whole))
        for pair in both if EVERYTHING or content is None else both[:1]:
            try:
                status = whence.compare(*pair).status
            except WhenceError:
                status = "refused"
            if status == "same":
                passed.append(f"{what}: {file.relative_to(spoilt)} of {pair[1].name}")
        file.write_bytes(before)
    assert not passed, "\n".join(passed)
