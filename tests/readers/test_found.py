"""Which reader opens a path: what is said when none does, and readers that other packages add."""

import bz2
import gzip
import lzma
import os
import pickle
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

import warm
import whence.readers as readers
from whence.api import open_run
from whence.errors import UnreadableRun
from whence.readers import Place
from whence.readers.unread import described

DATA = Path(__file__).parent.parent / "data"
_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
_WHEEL = "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def install(folder, name, points, module):
    """A wheel made by hand, installed by pip into a folder of its own; returns that folder."""
    wheel, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{name}.py", module)
        file.writestr(f"{info}/METADATA", _METADATA.format(name=name))
        file.writestr(f"{info}/WHEEL", _WHEEL)
        file.writestr(f"{info}/entry_points.txt", f"[whence.readers]\n{points}\n")
        file.writestr(f"{info}/RECORD", "")
    pip = [
        warm.TORCH,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "--target", folder / "site", wheel], check=True)
    return folder / "site"


def whence_with(site, *arguments, cwd):
    paths = os.pathsep.join([str(site), str(Path(readers.__file__).parents[2])])
    return subprocess.run(
        [warm.TORCH, "-m", "whence", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def tapes(tmp_path):
    for name, third in (("one", "5 6 7"), ("two", "5 6 9")):
        (tmp_path / f"{name}.tape").write_text(
            f"PAPER TAPE\nfc1: 1 2 3\nfc2: 3 4 5\nfc3: {third}\n"
        )
    return tmp_path / "one.tape", tmp_path / "two.tape"


def test_a_reader_of_another_package_opens_compares_and_is_named(tmp_path, tapes):
    site = install(
        tmp_path,
        "paper_tape",
        "paper_tape = paper_tape",
        (DATA / "other_reader" / "paper_tape.py").read_text(),
    )
    shown = whence_with(site, "show", tapes[0], cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "paper-tape run" in shown.stdout and "fc2" in shown.stdout
    compared = whence_with(site, "compare", *tapes, cwd=tmp_path)
    assert compared.returncode == 1, compared.stderr
    assert "fc3" in compared.stdout.splitlines()[0]
    (tmp_path / "torn.tape").write_text("PAPER TAPE\nfc1\n")
    torn = whence_with(site, "show", tmp_path / "torn.tape", cwd=tmp_path)
    assert torn.returncode == 3
    assert (
        "looks like paper_tape (a text that begins with PAPER TAPE), but line 'fc1' has no name"
        in torn.stderr
    )
    without = whence_with(tmp_path, "show", tapes[0], cwd=tmp_path)
    assert without.returncode == 3
    assert "no reader could open" in without.stderr


@pytest.mark.parametrize(
    ("points", "module", "said"),
    [
        (
            "broken = broken",
            "raise OSError(4)",
            "reader broken comes from broken and cannot be loaded: OSError: 4",
        ),
        (
            "broken = broken",
            "ORDER = 1\nLOOKS_LIKE = ''",
            "reader broken from broken has no sniff, open_run",
        ),
    ],
)
def test_a_broken_reader_of_another_package_is_named(tmp_path, tapes, points, module, said):
    site = install(tmp_path, "broken", points, module)
    done = whence_with(site, "show", tapes[0], cwd=tmp_path)
    assert done.returncode == 3
    assert said in done.stderr


def test_marks_of_a_kind_count_in_their_place_alone():
    assert "zip" not in described("x.unknown", b"The PKG of a build\0")
    assert "TensorFlow" not in described("faiss.index", b"IxFI\0\1")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "letter.txt",
            b"Dear Sir or Madam",
            "is a text in which no tensor is known; print name",
        ),
        ("x.bin", bytes(range(256)), "is raw bytes: .* give --shape x.bin=2x12x64:float32"),
        ("x.tensor", bytes(range(256)), "bytes of no kind that is known; .* call it x.tensor.bin"),
        ("x.dump", pickle.dumps([1.5]), "is a Python pickle; call it x.dump.pkl"),
        (
            "x.log.gz",
            gzip.compress(b"text", mtime=0),
            "is packed by gzip; unpack it: gunzip x.log.gz",
        ),
        ("w.gguf", b"GGUF\3\0\0\0", "is a model for llama.cpp; run it"),
        ("x.npy.bz2", bz2.compress(b"text"), "is packed by bzip2; unpack it: bunzip2 x.npy.bz2"),
        ("x.npy.xz", lzma.compress(b"text"), "is packed by xz; unpack it: unxz x.npy.xz"),
        ("x.tar", b"x" * 512, r"is a tar archive; .* tar -xf x\.tar"),
        ("x.parquet", b"PAR1\0\1", r"is a Parquet table; np\.savez\(.*read_parquet\('x.parquet'\)"),
        ("x.nc", b"CDF\x01\0\0", "is a netCDF file; np.savez"),
        ("m.tflite", b"\x1c\0\0\0TFL3\0", "is a model for LiteRT; run it"),
        ("m.pte", b"\x1c\0\0\0ET12\0", "is a program of ExecuTorch; run it with enable_etdump"),
        ("m.plan", b"ftrt\0\1", "is an engine of TensorRT; run it: polygraphy run m.plan"),
        ("x.msgpack", b"\x81\xa1w\xc7\0", "is a checkpoint of flax; np.savez"),
        ("m.ckpt.index", b"\0\1\2\3", "is a checkpoint of TensorFlow; np.savez"),
        ("m.mindir", b"\0\1\2\3", "is a compiled model; it holds no results"),
        ("x.db", b"SQLite format 3\0", "is a database; np.savez what it holds"),
        ("x.png", b"\x89PNG\r\n\x1a\n\0", "a picture, a document, a program; it holds no tensors"),
    ],
)
def test_what_no_reader_knows_is_said_in_one_sentence(name, content, said, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    for path in (tmp_path / "in" / name, tmp_path / "in"):
        with pytest.raises(UnreadableRun, match=f"no reader could open .*{said}") as error:
            open_run(str(path))
        assert "\n" not in str(error.value)
    with pytest.raises(UnreadableRun, match="the path does not exist"):
        open_run(str(tmp_path / "nowhere"))


def test_no_reader_takes_what_is_not_its_own(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "text").write_text("loss 0.5\n" * 100)
    (tmp_path / "object.json").write_text('{"a": [1, 2, 3]}')
    (tmp_path / "folder").mkdir()
    for path in tmp_path.iterdir():
        said = "is empty: it was cut off" if path.name == "empty" else "no reader could open"
        with pytest.raises(UnreadableRun, match=said):
            open_run(str(path))


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "a/../../secret", "link/secret", "nul\0"]
)
def test_names_from_a_dump_lead_nowhere_else(tmp_path, name):
    (tmp_path / "secret").write_text("42")
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "link").symlink_to(tmp_path)
    with pytest.raises(UnreadableRun, match="is outside of it"):
        Place(tmp_path / "dump").inside(name)


def test_a_pipe_is_no_dump(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableRun, match="neither a file nor a folder"):
        open_run(str(tmp_path / "pipe"))
    assert Place(tmp_path).files == ()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_pipes_and_links_to_themselves_in_a_folder_are_passed_over(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(3, np.float32))
    for name in ("b.npy", "dump.json", "c.pt"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "d.npy").symlink_to("d.npy")
    (tmp_path / "again").symlink_to(tmp_path)
    place = Place(tmp_path)
    assert place.names == ("a.npy", "again")
    assert place.files == ("a.npy",)
    run = open_run(tmp_path)
    assert [run.array(r.id).tolist() for r in run.records] == [[1.0, 1.0, 1.0]]
