"""The recipes of docs/ci.md, run as they stand there: a workflow's step, and git bisect over a
small repository.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

import warm

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PAGE = (Path(__file__).parents[2] / "docs" / "ci.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PROGRAM = """
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.{act}(), torch.nn.LayerNorm(16, eps={eps})).eval()
{more}
with torch.no_grad():
    model(torch.linspace(-1, 1, 24).reshape(3, 8))
"""


@pytest.fixture
def shell(tmp_path):
    """Runs a shell line in a folder, where `whence` and `python` are this whence and this
    Python.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in {"python": "", "whence": " -m whence"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{warm.TORCH}"{words} "$@"\n')
        (tools / name).chmod(0o755)
    git = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    environment = {
        **os.environ,
        **git,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }

    def run(line, folder):
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", line]
        return subprocess.run(
            words,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def write(folder, act="GELU", eps="1e-5", more=""):
    (folder / "infer.py").write_text(PROGRAM.format(act=act, eps=eps, more=more))


def test_the_step_of_a_workflow(shell, tmp_path):
    # the one before it uses the action: tests/cli/test_build_servers.py
    _, workflow = [yaml.safe_load(body) for kind, body in BLOCKS if kind == "yaml"]
    capture, compare = [
        s["run"]
        for s in workflow["jobs"]["parity"]["steps"]
        if "run" in s and "whence " in s["run"] and "pip" not in s["run"]
    ]
    write(tmp_path)
    assert shell("whence run -o golden -- python infer.py", tmp_path).returncode == 0
    write(tmp_path, eps="1e-2")
    assert shell(capture, tmp_path).returncode == 0
    done = shell(compare, tmp_path)
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "summary.md").read_text() == done.stdout
    assert done.stdout.startswith(
        "### whence: DIFFERENT\n\n2 (LayerNorm), step 0, rank 0: semantic"
    )
    assert re.search(
        r"\n::error file=\S*infer\.py,line=\d+,title=whence%3A 2::2 \(LayerNorm\)", done.stdout
    )
    assert int(ElementTree.parse(tmp_path / "whence.xml").getroot().get("failures")) == 2
    assert (tmp_path / "cmp" / "report.json").exists()
    shutil.rmtree(tmp_path / "cmp")
    (tmp_path / "whence.xml").unlink()
    write(tmp_path)
    shell(capture.replace("-o now", "--force -o now"), tmp_path)
    assert shell(compare, tmp_path).returncode == 0


@pytest.fixture
def bisected(shell, tmp_path):
    """Runs the recipe over a history of changes to the program: (what it printed, git's log of it,
    the commits).
    """
    if shutil.which("git") is None:
        pytest.skip("git is not here")

    def run(*history):
        golden, start, bisect = next(
            body for kind, body in BLOCKS if kind == "sh" and "git bisect" in body
        ).splitlines()
        repository = tmp_path / "repository"
        repository.mkdir()
        shell("git init -q .", repository)
        commits = []
        for change in history:
            write(repository, **change)
            shell("git add -A && git commit -qm change", repository)
            commits.append(shell("git rev-parse HEAD", repository).stdout.strip())
        assert len(set(commits)) == len(history)
        shell(f"git checkout -q {commits[0]}", repository)
        assert shell(golden, repository).returncode == 0
        assert (
            shell(
                start.replace("BAD", commits[-1]).replace("GOOD", commits[0]), repository
            ).returncode
            == 0
        )
        return shell(bisect, repository).stdout, shell("git bisect log", repository).stdout, commits

    return run


def test_git_bisect_names_the_culprit(bisected):
    said, _, commits = bisected({}, {"more": "2"}, {"eps": "1e-2"}, {"eps": "1e-2", "more": "3"})
    assert f"{commits[2]} is the first bad commit" in said


@pytest.mark.slow
def test_git_bisect_skips_what_does_not_run(bisected):
    said, log, commits = bisected(
        {},
        {"more": "2"},
        {"more": "raise SystemExit(1)"},
        {"act": "SiLU"},
        {"act": "SiLU", "more": "3"},
    )
    assert [
        f"# {word}: [{commits[at]}]" in log for at, word in ((1, "good"), (2, "skip"), (3, "bad"))
    ] == [True] * 3
    # The one that does not run stands before the first bad one, so either may be it.
    assert said.partition("The first bad commit could be any of:")[2].split()[:2] == commits[2:4]
