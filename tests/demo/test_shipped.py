"""The demo of two runs that come with whence: without a framework the fault is named first, and
what it leaves behind can be used like runs of one's own.
"""

import json
import zipfile
from pathlib import Path

import pytest

import inside
import whence
from whence.demo import shipped
from whence.errors import OutputExists


def scene(folder):
    (only,) = shipped.play(str(folder))
    return only


def test_the_fault_is_named_first_and_the_rest_is_rounding(tmp_path):
    played = scene(tmp_path / "demo")
    result = played.comparison
    assert played.expected
    assert [finding.name for finding in result.findings] == [shipped.FAULTY]
    assert result.coverage.measured == result.coverage.paired == 48
    assert result.counts["noise"] > 10, "the port rounds otherwise, which is not a fault"
    assert [prompt.passes for prompt in result.generation.prompts] == [True], "the text is the same"


def test_it_says_so_where_the_fault_is_not_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "FAULTY", "layers.0.mlp.act")
    played = scene(tmp_path / "demo")
    assert not played.expected
    assert played.closing[0].startswith("whence did NOT name layers.0.mlp.act")


def test_from_outside_without_a_framework(tmp_path):
    program = """import sys
sys.modules.update(dict.fromkeys(("torch", "paddle", "onnx", "onnxruntime")))
from whence import cli
raise SystemExit(cli.execute(["demo"]))
"""
    for _ in range(2):  # a second time over what the first left
        done = inside.program(tmp_path, program)
        assert done.returncode == 0, done.stderr
    assert "FAULT              layers.1.mlp.act   GELU" in done.stdout
    assert "called at        serve.py:43" in done.stdout
    place = tmp_path / "whence-demo"
    assert {path.name for path in place.iterdir()} == {
        *("serve.py", "ref", "port", "cmp", "report.html")
    }
    assert json.loads((place / "cmp" / "summary.json").read_text())["status"] == "different"
    page = (place / "report.html").read_text()
    assert "x = x + self.attention" not in page
    assert "self.act(self.up(x))" in page, "the page shows the line that calls it"


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputExists, match="not of this demo; name a new folder with -o"):
        scene(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_script_in_it_is_the_first_example():
    script = Path(__file__).parents[2] / "examples" / "01-port" / "serve.py"
    with zipfile.ZipFile(shipped.RUNS) as packed:
        assert packed.read("serve.py") == script.read_bytes(), "python docs/demo_runs.py"


def test_the_runs_name_no_machine_and_stay_small():
    assert shipped.RUNS.stat().st_size < 120_000
    with zipfile.ZipFile(shipped.RUNS) as packed:
        texts = {
            name: packed.read(name).decode()
            for name in packed.namelist()
            if not name.endswith(".safetensors")
        }
    described = [json.loads(text) for name, text in texts.items() if name.endswith("run.json")]
    assert [(run["host"], run["user"], run["cwd"]) for run in described] == [("", "", "")] * 2
    assert [name for name, text in texts.items() if "/tmp" in text or "/home" in text] == []


@pytest.mark.torch
def test_with_torch_the_cause_is_named(tmp_path):
    pytest.importorskip("torch")
    scene(tmp_path / "demo")
    result = whence.compare(tmp_path / "demo" / "ref", tmp_path / "demo" / "port")
    assert (result.findings[0].name, result.findings[0].confidence) == (shipped.FAULTY, "certain")
    assert "approximate is none in the reference, tanh in the target" in result.findings[0].sentence


@pytest.mark.torch
@pytest.mark.slow
def test_the_script_that_makes_the_runs_makes_the_same_answer(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    import demo_runs

    place = tmp_path / "captured"
    place.mkdir()
    (place / "serve.py").write_bytes(demo_runs.SCRIPT.read_bytes())
    demo_runs.capture(place)
    demo_runs.pack(place, tmp_path / "runs.zip")
    monkeypatch.setattr(shipped, "RUNS", tmp_path / "runs.zip")
    assert scene(tmp_path / "demo").expected
    with zipfile.ZipFile(tmp_path / "runs.zip") as packed:
        assert b"/captured" not in b"".join(map(packed.read, packed.namelist()))
