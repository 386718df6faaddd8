"""`whence serve-check` that was stopped goes on, and never with what is of another content."""

import os
import subprocess
from pathlib import Path

import pytest

import warm

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

SERVING = f"""
import os
import sys
from pathlib import Path

sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_serve_check as t
import torch


def stops(stage):
    # a file that exists is not one that was read
    if Path(f"stop-{{stage}}").exists():
        raise KeyboardInterrupt
    with open("log", "a") as log:
        log.write(stage + "\\n")


class Counted(t.Net):
    scored = 0

    def forward(self, *args, **kwargs):
        if self.head.weight.dtype == torch.float64:
            Counted.scored += 1
            stops(f"score-{{Counted.scored}}")
        return super().forward(*args, **kwargs)


class Engine(t.Engine):
    asked = 0

    def generate(self, prompts, count):
        Engine.asked += 1
        stops(f"ask-{{'alone' if len(prompts) == 1 else 'all'}}")
        if Path("stop-inside").exists() and Engine.asked == 2:
            raise KeyboardInterrupt
        return super().generate(prompts, count)


def reference():
    model = Counted()
    if Path("weights.pt").exists():
        model.load_state_dict(torch.load("weights.pt"))
    return model


def engine():
    return Engine(spoil=t.zeroed)


class Hidden:
    def __init__(self):
        self.generate = engine().generate
"""
PROMPTS = "[1, 2, 3, 4]\n[5, 6, 7, 8, 9, 10]\n[11, 12]\n"


class Home:
    """A folder with a script and prompts, and a cache of its own."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "serving.py").write_text(SERVING)
        (folder / "prompts.jsonl").write_text(PROMPTS)

    def check(self, *options, target="engine", **variables):
        """(exit code, answer without notes, stderr and notes, what was asked and scored)."""
        (self.folder / "log").unlink(missing_ok=True)
        words = ["serve-check", "serving:reference", f"serving:{target}", "--tokens", "8"]
        ran = subprocess.run(
            [warm.TORCH, "-m", "whence", *words, "--prompts", "prompts.jsonl", *options],
            cwd=self.folder,
            env={**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache"), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        log = self.folder / "log"
        answer, _, notes = ran.stdout.partition("note: ")
        done = log.read_text().split() if log.exists() else []
        return ran.returncode, answer, ran.stderr + notes, done


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a check says that nobody stops."""
    return Home(tmp_path_factory.mktemp("whole")).check()


def test_nothing_is_kept_at_first(whole):
    code, answer, notes, done = whole
    assert code == 1
    assert answer.startswith("FAULT ")
    assert "kept" not in notes
    assert done == ["ask-all", "score-1", "score-2", "score-3", "ask-all", "score-4", "score-5",
                    "ask-alone", "score-6"]  # fmt: skip


@pytest.mark.parametrize(
    ("stop", "left"),
    [
        ("ask-all", 9),
        ("score-2", 7),  # the answers and one score are kept
        ("inside", 5),
        ("score-4", 5),
        ("ask-alone", 5),
    ],
)
def test_a_check_that_was_stopped_goes_on(home, whole, stop, left):
    (home.folder / f"stop-{stop}").touch()
    code, *_ = home.check()
    assert code not in (0, 1)
    (home.folder / f"stop-{stop}").unlink()
    code, answer, notes, done = home.check()
    assert (code, answer) == whole[:2]
    assert len(done) == left
    assert ("going on with what was kept" in notes) == (stop != "ask-all")


def test_a_check_that_ended_asks_nothing_again(home, whole):
    assert home.check()[:2] == whole[:2]
    code, answer, notes, done = home.check()
    assert (code, answer, done) == (*whole[:2], [])
    assert "5 results are kept ones" in notes
    assert home.check("--fresh")[3] == whole[3]
    assert "ask-alone" in home.check("--alone")[3]


def other_script(folder):
    script = folder / "serving.py"
    script.write_text(SERVING.replace("spoil=t.zeroed", "spoil=t.late"))
    return "serving.py changed"


def other_weights(folder):
    code = (
        "import serving, torch\nmodel = serving.Counted()\n"
        "torch.nn.init.constant_(model.norm.weight, 1.5)\n"
        "torch.save(model.state_dict(), 'weights.pt')"
    )
    subprocess.run([warm.TORCH, "-c", code], cwd=folder, check=True)
    return "the reference changed"


def other_prompts(folder):
    (folder / "prompts.jsonl").write_text(PROMPTS.replace("11", "13"))
    return ""


@pytest.mark.parametrize("change", [other_script, other_weights, other_prompts])
def test_other_content_is_asked_anew(home, change):
    home.check()
    reason = change(home.folder)
    _, answer, notes, done = home.check()
    assert reason in notes
    assert "results are kept ones" not in notes
    assert done[:2] == ["ask-all", "score-1"]
    assert answer == home.check("--fresh")[1]


def test_variables_of_the_environment_count_but_for_those_of_the_terminal(home):
    home.check()
    assert home.check(COLUMNS="70")[3] == []
    _, _, notes, done = home.check(MODE="fast")
    assert "the environment changed" in notes
    assert "ask-all" in done


def test_answers_are_not_kept_of_what_cannot_be_looked_into(home):
    home.check(target="Hidden")
    _, _, notes, done = home.check(target="Hidden")
    assert done == ["ask-all"]  # scores are those of the same answers
    assert "3 results are kept ones" in notes


def test_code_that_changes_while_it_runs_keeps_nothing(home):
    script = SERVING.replace("def stops(stage):", "def stops(stage):\n    os.utime(__file__)")
    (home.folder / "serving.py").write_text(script)
    home.check()
    assert "kept" not in home.check()[2]
