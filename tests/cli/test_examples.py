"""The folders of `examples/`: what each page shows is what its commands print."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.parent.name for path in FOLDER.glob("[0-9]*/README.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS = {"04-onnx": ("onnx", "onnxruntime"), "15-serving": ("transformers",)}
NUMBER = re.compile(r"\d[\d.]*(e[+-]?\d+)?")


def blocks(name: str, language: str) -> str:
    page = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    return "".join(body for kind, body in BLOCK.findall(page) if kind == language)


# Whole processes that import torch several times; what they type has tests in the default run.
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_its_page_shows(name, tmp_path):
    pytest.importorskip("torch")
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    shutil.copytree(FOLDER / name, tmp_path / name)
    shutil.copy(FOLDER / "story_tools.py", tmp_path)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "PATH": path}
    printed = ""
    for line in blocks(name, "sh").splitlines():
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path / name,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        finds = line.startswith(("whence compare", "whence diverge"))
        assert done.returncode in ((0, 1) if finds else (0,)), line + done.stdout + done.stderr
        printed += done.stdout
    lines = [NUMBER.sub("#", line) for line in printed.splitlines()]
    shown = [NUMBER.sub("#", line) for line in blocks(name, "text").splitlines()]
    assert shown
    assert [line for line in shown if not any(real.startswith(line) for real in lines)] == []


def test_the_page_lists_every_example():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    scripts = {path.parent.name for path in FOLDER.glob("[0-9]*/*.py")}
    assert scripts == {*EXAMPLES}
    assert [name for name in EXAMPLES if f"[{name}]({name}/README.md)" not in page] == []
    assert [int(name[:2]) for name in EXAMPLES] == [*range(1, 16)]
    sizes = {name: (FOLDER / name / "README.md").read_text().count("\n") for name in EXAMPLES}
    assert {name: lines for name, lines in sizes.items() if lines > 40} == {}
