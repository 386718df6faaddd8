"""Every command where torch, Paddle or both are not installed: it works without, or says in one
sentence what it needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import whence

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

OTHERS = (
    "transformers",
    "onnx",
    "onnxruntime",
    "openvino",
    "h5py",
    "jax",
    "pandas",
    "polars",
    "matplotlib",
    "ray",
    "pyarrow",
)
# A module that is None in sys.modules cannot be imported and cannot be found, as where it is not
# installed.
PROGRAM = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
from whence.cli import _execute
answers = {}
for name, arguments in json.loads(sys.argv[2]).items():
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = _execute(arguments)
    answers[name] = code, text.getvalue()
import whence
answers["python"] = 0, repr((whence.compare("ref", "same").status, [f.name for f in whence.compare("ref", "wrong").findings]))
answers["loaded"] = 0, " ".join(sorted(n for n in ("torch", "paddle") if sys.modules.get(n) is not None))
print(json.dumps(answers))
"""
COMMANDS = {
    "same": ["compare", "ref", "same", "-o", "c-same"],
    "wrong": ["compare", "ref", "wrong", "-o", "c-wrong"],
    "plan": ["compare", "ref", "wrong", "--plan"],
    "logits": ["compare", "l-ref", "l-wrong", "-o", "c-logits"],
    "ops compare": ["compare", "o-ref", "o-wrong", "-o", "c-ops"],
    "show": ["show", "ref"],
    "report": ["report", "c-wrong"],
    "trace": ["trace", "c-wrong", "down"],
    "convert": ["convert", "ref", "converted", "--to", "npy"],
    "align": ["align", "ref", "wrong", "-o", "map.yaml"],
    "tokens": ["tokens", "a.json", "b.json"],
    "locate": ["locate", "c-wrong"],
    "repro": ["repro", "c-wrong", "-o", "reproduced"],
    "model": ["compare", "ref", "wrong", "--model", "net:Net", "-o", "c-model"],
    "doctor": ["doctor", "--", sys.executable, "-c", "print('no model')"],
    "ladder": ["ladder", "-o", "rungs", "--", sys.executable, "-c", "print('no model')"],
    "ops list": ["ops", "list", "o-ref"],
    "ops generate": ["ops", "generate", "o-ref", "-o", "tests"],
    "run": ["run", "-o", "captured", "--", sys.executable, "-c", "print('no model')"],
}


class Net(torch.nn.Module):
    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.up, self.down = (
            torch.nn.Embedding(9, 6),
            torch.nn.Linear(6, 8),
            torch.nn.Linear(8, 9),
        )
        self.by = by

    def forward(self, ids: Any) -> Any:
        return self.down(torch.tanh(self.up(self.emb(ids)))) * self.by


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, level in (("", {}), ("o-", {"level": "op"}), ("l-", {"logits": True})):
        for kind in ("ref", "same", "wrong"):
            net = Net()
            if kind == "wrong":
                net.down.weight.data[3] *= 1.5
            with torch.no_grad(), whence.capture(net, folder / f"{name}{kind}", **level):
                net(ids=torch.arange(8).reshape(2, 4))
    (folder / "net.py").write_text("def Net():\n    return None\n")
    for name, text in (("a", "one two"), ("b", "one three")):
        (folder / f"{name}.json").write_text(json.dumps([{"prompt": "count", "output": text}]))
    return folder


def _answers(folder: Path, absent: tuple[str, ...]) -> dict[str, tuple[int, str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([*absent, *OTHERS]), json.dumps(COMMANDS)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return {
        name: (code, text)
        for name, (code, text) in json.loads(done.stdout.splitlines()[-1]).items()
    }


ABSENT = {"core only": ("torch", "paddle"), "Paddle only": ("torch",), "torch only": ("paddle",)}


@pytest.fixture(scope="module", params=ABSENT)
def answers(request: pytest.FixtureRequest, runs: Path) -> tuple[str, dict[str, tuple[int, str]]]:
    folder = runs.parent / request.param.replace(" ", "-")
    folder.mkdir()
    for own in runs.iterdir():
        (folder / own.name).symlink_to(own)
    return request.param, _answers(folder, ABSENT[request.param])


def test_every_command_answers_or_says_what_it_needs(answers):
    kind, found = answers
    codes = {name: code for name, (code, _) in found.items()}
    for name, (_, text) in found.items():
        assert "unexpected" not in text and "Traceback" not in text, (name, text)
    works = {
        "same": 0,
        "plan": 0,
        "show": 0,
        "report": 0,
        "trace": 0,
        "convert": 0,
        "align": 0,
        "ops list": 0,
        "wrong": 1,
        "logits": 1,
    }
    assert {name: codes[name] for name in works} == works
    assert codes["tokens"] in (0, 1, 2)
    assert found["python"][1] == "('same', ['down'])"
    assert (codes["ladder"], codes["doctor"], codes["run"]) == (
        3,
        3,
        3,
    )  # of a program that has no model
    needing = {"repro", "ops generate", "model"}
    if kind != "torch only":
        for name in needing:
            assert codes[name] == 3, name
            assert (
                "torch, which is not installed here: pip install 'torch>=2.6,<2.14'"
                in found[name][1]
            ), (name, found[name][1])
            assert found[name][1].count("\n") == 1, name


def test_two_dumps_are_judged_with_a_note(answers):
    kind, found = answers
    for name in ("wrong", "ops compare"):
        said = "torch is not installed here, so nothing is replayed" in found[name][1]
        assert said == (kind != "torch only"), name
    assert "down" in found["wrong"][1]


def test_no_framework_is_loaded_for_nothing(answers):
    kind, found = answers
    assert found["loaded"][1] == ("torch" if kind == "torch only" else "")
