"""The GitHub Action and the GitLab template: their scripts, run as a build server runs them."""

import os
import subprocess
from pathlib import Path

import pytest

import warm

ROOT = Path(__file__).parents[2]
yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.torch
PROGRAM = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).eval()
if len(sys.argv) > 1:
    model[1].eps = 0.1
with torch.no_grad():
    model(torch.randn(2, 8))
"""


class BuildServer:
    """Runs scripts in a folder with variables, and keeps what they write for the server."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "net.py").write_text(PROGRAM)
        self.commands = folder / "commands"
        self.commands.mkdir()
        for name, words in (("python", ""), ("whence", "-m whence")):
            (self.commands / name).write_text(f'#!/bin/sh\nexec {warm.TORCH} {words} "$@"\n')
            (self.commands / name).chmod(0o755)
        self.summary, self.output = folder / "summary.md", folder / "output.txt"

    def runs(self, script, **variables):
        environment = {
            **os.environ,
            "PATH": f"{self.commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_OUTPUT": str(self.output),
            "PARITY_BASELINE": ".whence/baseline",
            "PARITY_ACCEPT": "false",
            "PARITY_OPTIONS": "",
            **variables,
        }
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture
def server(tmp_path):
    return BuildServer(tmp_path)


def test_the_action_accepts_a_baseline_and_names_what_differs_from_it(server):
    pytest.importorskip("torch")
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    capture, compare, comment = action["runs"]["steps"]
    assert {"command", "baseline", "accept", "options", "comment"} == set(action["inputs"])

    assert server.runs(capture["run"], PARITY_COMMAND="python net.py").returncode == 0
    missing = server.runs(compare["run"])
    assert missing.returncode == 3, "a build without a baseline does not pass"
    assert missing.stdout.startswith("::error::there is no baseline at .whence/baseline")
    assert server.runs(compare["run"], PARITY_ACCEPT="true").returncode == 0
    assert server.output.read_text() == "status=accepted\n"

    same = server.runs(compare["run"])
    assert same.returncode == 0, same.stderr
    assert "**Drift:** none, bitwise identical." in server.summary.read_text()
    assert server.runs(capture["run"], PARITY_COMMAND="python net.py broken").returncode == 0
    different = server.runs(compare["run"], PARITY_OPTIONS="--strict")
    assert different.returncode == 1
    assert different.stdout.startswith("::error file=net.py,line=")
    assert "**Drift:** a fault in 1." in server.summary.read_text()
    assert server.output.read_text().splitlines()[-2:] == ["status=same", "status=different"]
    written = {path.name for path in (server.folder / ".whence" / "cmp").iterdir()}
    assert {"answer.md", "whence.xml", "summary.json"} <= written
    assert ".whence/cmp/answer.md" in comment["run"]


def test_the_template_of_gitlab(server):
    pytest.importorskip("torch")
    job = yaml.safe_load((ROOT / "ci" / "gitlab.yml").read_text())[".whence"]
    script = "\n".join(job["script"])
    accepted = server.runs(script, PARITY_COMMAND="python net.py", PARITY_ACCEPT="true")
    assert accepted.returncode == 0, accepted.stderr
    different = server.runs(script, PARITY_COMMAND="python net.py broken")
    assert different.returncode == 1
    assert "native_layer_norm: eps is 1e-05 in the reference, 0.1 in the target" in different.stdout
    assert (server.folder / job["artifacts"]["reports"]["junit"]).exists()
    assert (
        server.runs(script, PARITY_COMMAND="python net.py", PARITY_BASELINE="none").returncode == 3
    )
