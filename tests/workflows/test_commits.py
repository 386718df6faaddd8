"""Two commits of a repository, captured and compared. The command is a function of this process
that reads what the checkout holds.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

import whence
from whence.cli import execute
from whence.errors import CaptureError, UsageError
from whence.workflows.commits import commits, first_different
from whence.workflows.rerun import Command

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Scaled(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


def git(*words):
    done = subprocess.run(
        ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def runs_what_is_there(program, path):
    """In the place of a process: `python` computes with `scale`, `false` computes nothing."""
    if program.command[0] == "false":
        raise CaptureError("false ended with exit code 1")
    if program.command[0] == "interrupted":
        raise KeyboardInterrupt
    folder = Path(program.cwd)
    model = torch.nn.Sequential(Scaled(float((folder / "scale").read_text())))
    with whence.capture(model, path):
        model(torch.linspace(-1, 1, 12).reshape(3, 4))
    answer = {"src": "one", "output": (folder / "scale").read_text()}
    (folder / "answers.json").write_text(json.dumps(answer) + "\n")


class Shifted(torch.nn.Module):
    """Logits that favour the token that came last, more or less clearly, and a shift of token 0."""

    def __init__(self, shift):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.diag(torch.tensor([4.0, 0.5, 4.0, 0.25])))
        self.shift = shift

    def forward(self, ids):
        return self.weight[ids] + self.shift * torch.eye(4)[0]


def generates(program, path):
    """In the place of a process: three prompts, of which the shift of 1 changes two."""
    folder = Path(program.cwd)
    model = Shifted(float((folder / "scale").read_text()) - 2)
    ids = torch.tensor([[3], [2], [1]])
    with torch.no_grad(), whence.capture(model, path):
        for _ in range(2):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    lines = [{"src": f"prompt {row[0]}", "output": row[1:]} for row in ids.tolist()]
    (folder / "answers.json").write_text("\n".join(map(json.dumps, lines)) + "\n")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Five commits; the third computes something else."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Command, "capture", runs_what_is_there)
    git("init", "-q")
    for number, scale in enumerate(("2", "2", "3", "3", "3")):
        (folder / "scale").write_text(scale)
        (folder / "number").write_text(str(number))
        git("add", "-A")
        git("commit", "-qm", f"commit {number}")
    git("tag", "old", "HEAD~4")
    return folder


def one_checkout():
    return len(git("worktree", "list").splitlines()) == 1


def test_the_commit_is_named_and_no_checkout_is_left(repository, tmp_path):
    (repository / "scale").write_text("2")  # in no commit
    result = commits(
        "old", "HEAD", ["python"], output=str(tmp_path / "out"), bisect=True, texts="answers.json"
    )
    assert result.comparison.status == "different"
    assert "commit 2" in result.broken_by
    assert (result.texts.status, result.texts.prompts[0].verdict) == ("fail", "FAIL")
    assert "changes that are in no commit" in result.notes[0]
    assert one_checkout()
    assert git("status", "--porcelain") == "M scale"


def test_a_finding_stands_beside_the_answers_that_it_changes(
    repository, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Command, "capture", generates)
    words = ["old", "HEAD", "--texts", "answers.json", "--", "python"]
    assert execute(["commits", "-o", str(tmp_path / "out"), *words]) == 1
    screen = capsys.readouterr().out
    name, why = re.search(r"changes +the answers to prompts 1, 3: (.+) \((.+)\)\n", screen).groups()
    assert f"  evidence         {why}" in screen
    said = ["commits", "-o", str(tmp_path / "json"), "--format", "json", *words]
    assert execute(said) == 1
    whole = json.loads(capsys.readouterr().out)
    assert whole["behind"] == {name: [1, 3]}
    assert [p["verdict"] for p in whole["texts"]["prompts"]] == ["FAIL", "PASS", "FAIL"]


def test_folders_stand_for_commits(repository, tmp_path, capsys):
    words = ["commits", "-o", str(tmp_path / "out"), "HEAD~1", ".", "--", "python"]
    assert execute(words) == 0
    assert "commit 3" in capsys.readouterr().out
    words[2] = str(tmp_path / "json")
    assert execute([*words[:3], "--format", "json", "old", ".", "--", "python"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["status"], said["second"]["given"], said["broken_by"]) == ("different", ".", "")


def test_environments_run_the_command_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def capture(program, path):
        asked.append((program.cwd, program.environment()["PATH"].partition(":")[0]))
        (tmp_path / "scale").write_text(str(len(asked)))
        runs_what_is_there(program, path)

    monkeypatch.setattr(Command, "capture", capture)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyvenv.cfg").write_text("")
    result = commits("old", "new", ["python"], output="out")
    assert asked == [(str(tmp_path), str(tmp_path / name / "bin")) for name in ("old", "new")]
    assert result.comparison.status == "different"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("nowhere", "HEAD"), "'nowhere' is not a commit of .*, and no folder"),
        (("HEAD", "old", "--bisect"), "is not an ancestor of"),
        (("old", ".", "--bisect"), "takes two commits"),
        (("old", "HEAD", "--texts", "other.json"), "wrote no other.json on old"),
        (("old", "HEAD", "--link", "weights"), "nothing of that name lies in .*; give a path"),
    ],
)
def test_what_cannot_be_done_is_said(repository, tmp_path, capsys, words, why):
    code = execute(["commits", "-o", str(tmp_path / "out"), *words, "--", "python"])
    assert code in (2, 3)
    assert re.search(why, capsys.readouterr().err)
    assert one_checkout()


def test_a_failing_and_an_interrupted_command_leave_no_checkout(repository, tmp_path):
    with pytest.raises(CaptureError, match="exit code 1"):
        commits("old", "HEAD", ["false"], output=str(tmp_path / "a"))
    with pytest.raises(KeyboardInterrupt):
        commits("old", "HEAD", ["interrupted"], output=str(tmp_path / "b"))
    assert one_checkout()


def test_without_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="this folder is in no repository"):
        commits("HEAD", "HEAD~1", ["python"], output="out")


@pytest.mark.parametrize(
    ("answers", "first", "open_"),
    [
        ("SSDDD", 2, []),
        ("D", 0, []),
        ("SUUDD", 3, [1, 2]),
        ("USSSD", 4, []),
        ("UUUUD", 4, [0, 1, 2, 3]),
    ],
)
def test_the_first_that_is_different(answers, first, open_):
    kinds = {"S": "same", "D": "different", "U": "undecided"}
    names = [str(number) for number in range(len(answers))]
    found = first_different(names, lambda name: kinds[answers[int(name)]])
    assert found == (str(first), [str(number) for number in open_])
