"""The story of two commits in docs/paddle.md, command by command: what it shows is what is said."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import warm
import whence
from inside import or_outside
from stories import shown_in_order

if importlib.util.find_spec("paddle") is None:
    pytest.skip(
        "paddlepaddle is not installed: pip install paddlepaddle==3.3.1", allow_module_level=True
    )
# Eight commands in a row, as the tutorial: each of them has tests of its own in the default run.
pytestmark = [pytest.mark.paddle, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CODES = {
    "tokens": 1,
    "run": 0,
    "compare": 1,
    "trace": 0,
    "locate": 1,
}  # those that end otherwise stand in the test


def ran(folder, *words):
    return subprocess.run(
        words,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """`ref`, `a` and `b`, asked once each as their users did it."""
    folder = tmp_path_factory.mktemp("project")
    made = ran(folder, warm.PADDLE, str(ROOT / "tests" / "comparison" / "paddle_story.py"), ".")
    assert made.returncode == 0, made.stderr[-3000:]
    for name, code in (("ref", 0), ("a", 0), ("b", 1)):
        if name != "ref":
            shutil.copy(folder / "ref" / "answers.json", folder / name / "expected.json")
        done = ran(folder, warm.PADDLE, "-m", "pytest", "-q", f"{name}/test_predictor.py")
        assert done.returncode == code, done.stdout[-3000:]
    return folder


def test_the_story(project):
    counts = whence.tokens(
        before=pair(project, "a"), after=pair(project, "b")
    )  # `locate` asks the prompts anew
    page = (ROOT / "docs" / "paddle.md").read_text()
    story = page[page.index("## Two commits, one story") : page.index("## Comparing")]
    said, names = "", []
    for kind, body in re.findall(r"^```(\w+)\n(.*?)^```", story, re.MULTILINE | re.DOTALL):
        if kind == "text":
            shown_in_order(body, said)
            said = ""
            continue
        for line in body.splitlines():
            words = [warm.PADDLE if w == "python" else w for w in shlex.split(line)]
            done = or_outside(project, *words[1:])
            expected = {"runs/b": 1, "margins": 0, "runs/ref": 0, "runs/a": 0}.get(
                words[words.index("-o") + 1] if "-o" in words else ""
            )
            assert done.returncode == (CODES[words[1]] if expected is None else expected), (
                line,
                done.stdout[-2000:],
                done.stderr[-2000:],
            )
            said += done.stdout
            names.append(words[1])
    assert names == ["tokens", "run", "run", "compare", "run", "compare", "trace", "locate"]
    assert (counts.before.full_count, counts.full_count, counts.count) == (17, 10, 20)
    margins, fault = (
        whence.load_comparison(project / name).generation for name in ("margins", "cmp")
    )
    tied = {p.ids for p in margins.prompts if p.outcome == "explained"}
    wrong = {p.ids for p in fault.prompts if p.outcome == "unexplained"}
    failing = {
        tuple(map(int, re.findall(r"\d+", p.prompt))) for p in counts.prompts if p.verdict == "FAIL"
    }
    newly = {
        tuple(map(int, re.findall(r"\d+", counts.prompts[n - 1].prompt)))
        for n in counts.newly_failing
    }
    assert failing == tied | newly
    assert newly <= wrong
    assert len(tied) == 3
    assert {p.outcome for p in margins.prompts} == {"equal", "explained"}


def pair(project, name):
    return project / name / "expected.json", project / name / "answers.json"
