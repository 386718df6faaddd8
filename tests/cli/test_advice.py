"""A path that is something else than was wanted, a damaged file, a full disk: the error says what
it is, and what to do.
"""

import errno
import os
import re
import shutil

import numpy as np
import pytest

import inside
import warm
import whence
from whence import store
from whence.records import Call, Note, Ref, RunInfo, Statistics, Step


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs runs/a and runs/b, and the comparison cmp of them."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("a", "b"):
        store.create(folder / "runs" / name, RunInfo(command=("python", "x.py")))
        writer = store.Writer(folder / "runs" / name, 0)
        array = np.arange(6, dtype=np.float32)
        figures = Statistics(6, 0.0, 5.0, 2.5, 1.7, float(np.linalg.norm(array)), 0, 0, 1)
        record = writer.record("float32", (6,), array.view(np.uint8), b"\0" * 16, figures, None)
        writer.call(Call(0, "", "m", 0, 0, op_type="T", refs=(Ref("output.0", record),)))
        writer.step(Step("m", 0, 24, True))
        writer.close()
    whence.compare(folder / "runs/a", folder / "runs/b", output=folder / "cmp")
    (folder / "other").mkdir()
    (folder / "other" / "notes.txt").write_text("hello")
    (folder / "many").mkdir()
    shutil.copytree(folder / "cmp", folder / "many" / "one")
    return folder


@pytest.fixture
def place(made, tmp_path):
    shutil.copytree(made, tmp_path / "w")
    return tmp_path / "w"


def error(place, *words):
    done = inside.whence(place, *words)
    assert (done.returncode, done.stdout) == (3, "")
    assert "Traceback" not in done.stderr and "a bug in whence" not in done.stderr
    return done.stderr


def test_a_comparison_where_a_run_is_wanted(place):
    for words in (
        ("show", "cmp"),
        ("show", "cmp/report.json"),
        ("compare", "cmp", "runs/a"),
        ("compare", "runs/a", "cmp/summary.json"),
        ("align", "cmp", "runs/a"),
        ("convert", "cmp", "x", "--to", "npy"),
        ("ops", "list", "cmp"),
        ("labels", "cmp"),
        ("scrub", "cmp"),
        ("recover", "cmp"),
    ):
        said = error(place, *words)
        assert "is a comparison, not a run: `whence report cmp` shows it" in said, words
        assert len(said.splitlines()) == 1
    assert (place / "cmp" / "report.json").exists()


@pytest.mark.parametrize("command", [("report",), ("trace",), ("repro", "-o", "new")])
def test_a_run_where_a_comparison_is_wanted(place, command):
    verb, *more = command
    assert (
        "runs/a is a run, not a comparison; compare it with another run: whence compare runs/a TGT"
        in error(place, verb, "runs/a", *more)
    )
    assert "no comparison in other: it has no report.json" in error(place, verb, "other", *more)
    assert "many is a folder of comparisons; give one of them: many/one" in error(
        place, verb, "many", *more
    )
    said = error(place, verb, "runs/nowhere", *more)
    assert "no comparison at runs/nowhere: No such file or directory; check the spelling" in said
    assert "give a folder that `whence compare -o` wrote" in error(
        place, verb, "other/notes.txt", *more
    )
    assert not (place / "new").exists()


def test_locate_tells_a_mistake_in_the_path_first(place):
    assert "no run at nowhere" in error(place, "locate", "nowhere")
    assert "no reader could open other" in error(place, "locate", "other")
    assert "which program is the target?" in error(place, "locate", "runs/a")


def test_a_folder_of_runs_and_a_part_of_a_run(place):
    for words in (("compare", "runs", "runs/a"), ("show", "runs"), ("recover", "runs")):
        assert "runs is a folder of runs, not a run; give one of them: runs/a, runs/b" in error(
            place, *words
        )
    (part,) = (place / "runs/a").glob("rank*")
    assert "is what one process wrote of the run runs/a; give that run" in error(
        place, "show", part.relative_to(place)
    )


@pytest.mark.parametrize("name", ["run.json", "process.json"])
def test_a_run_that_was_cut_off(place, name):
    (file,) = (place / "runs/a").rglob(name)
    os.truncate(file, file.stat().st_size // 2)
    said = error(place, "compare", "runs/a", "runs/b")
    assert name in said
    assert "it is damaged or was cut off: copy the run again, or capture it again" in said


def test_a_comparison_that_was_cut_off(place):
    file = place / "cmp" / "report.json"
    os.truncate(file, file.stat().st_size // 2)
    assert "compare again: whence compare REF TGT -o cmp --force" in error(place, "report", "cmp")
    (place / "empty.npy").touch()
    assert "empty.npy is empty: it was cut off or never written" in error(
        place, "show", "empty.npy"
    )


def test_a_comparison_with_a_number_of_more_than_64_bits(place):
    file = place / "cmp" / "report.json"
    text = file.read_text()
    assert '"calls":' in text
    file.write_text(re.sub(r'"calls":\s*\d+', '"calls":' + "1" + "0" * 40, text, count=1))
    said = error(place, "report", "cmp")
    assert "64-bit" in said
    assert "compare again: whence compare REF TGT -o cmp --force" in said


def test_a_full_disk_when_a_run_begins(place, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("whence.store.folder.write_file", refuse)
    said = error(place, "run", "-o", "runs/new", "--", warm.TORCH, "-c", "1")
    assert "No space left on device; choose an output path in a writable folder with free" in said
    assert not (place / "runs/new").exists()


def test_reasons_of_an_empty_run(tmp_path, monkeypatch):
    store.create(tmp_path / "run", RunInfo())
    writer = store.Writer(tmp_path / "run", 0)
    writer.note(Note("error", "the disk of the captured program is full"))
    writer.note(Note("settings", "no reason"))
    writer.close()
    assert store.reasons(tmp_path / "run") == ["the disk of the captured program is full"]
    assert store.discard(tmp_path / "run", also=("launch.jsonl",))
    assert not (tmp_path / "run").exists()
    assert store.reasons(tmp_path / "nowhere") == []


COMPILED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()

@torch.compile(backend="eager")
def step(x):
    return model(x)

with torch.no_grad():
    step(torch.ones(2, 8))
"""


@pytest.mark.torch
def test_an_empty_capture_of_a_compiled_function_says_what_captures_it(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "infer.py").write_text(COMPILED)
    words = ("run", "-o", "ref", "--", warm.TORCH, "infer.py")
    done = inside.or_outside(tmp_path, *words)
    assert done.returncode == 3
    assert "torch.compile made of a function" in done.stderr
    assert "--rung eager" in done.stderr
    assert not (tmp_path / "ref").exists()
    done = inside.or_outside(tmp_path, words[0], "--rung", "eager", *words[1:])
    assert done.returncode == 0, done.stderr
