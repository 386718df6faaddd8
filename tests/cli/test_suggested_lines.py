"""Every suggested line can be typed: those of the golden answers, and of commands under other
tools' names, are, and end as commands do that found what they were given.
"""

import re
import shlex
from pathlib import Path

import pytest

import whence
from whence import cli
from whence.cli import execute

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "0.1.0"
RUNS = sorted(path.name for path in GOLDEN.iterdir() if (path / "run.json").is_file())
PAIRS = [
    (a, b)
    for a in RUNS
    for b in RUNS
    if a == b or {a, b} <= {"modules", "modules_fault", "statistics", "recorded", "topology", "op"}
]
_VARIABLES = re.compile(r"([A-Za-z_]+=('[^']*'|\S*) )*")
_ENDS_WELL = {0, 1, 2}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def typed(line):
    """Type a line, but for the programs of the user in it, which are not here."""
    for part in line.removeprefix("(").removesuffix(")").split(" && "):
        program, name, *words = shlex.split(part[_VARIABLES.match(part).end() :])
        if program == "cd":
            continue
        assert program == "whence", line
        if "--" in words or name == "locate":
            cli.group.get_command(None, name).make_context(name, words)
            return  # the lines behind it take what that program would have made
        assert execute([name, *words]) in _ENDS_WELL, line


def suggested(output):
    """The lines under `next` in an answer, without those that have words to fill in."""
    lines = re.findall(r"^(?:  next  |   {8,})\s+(\(?.*\bwhence .*?)   # ", output, re.MULTILINE)
    return [line for line in lines if not line.startswith("# fill in")]


@pytest.mark.parametrize(("reference", "target"), PAIRS)
def test_every_line_of_a_golden_answer(reference, target, capsys):
    sides = [str(GOLDEN / name) for name in (reference, target)]
    code = execute(["compare", *sides])
    assert code in _ENDS_WELL
    steps = whence.compare(*sides).next
    shown = suggested(capsys.readouterr().out)
    assert len(shown) == sum(not step.fill_in for step in steps)
    for line in shown:
        typed(line)


@pytest.mark.parametrize(
    "words",
    [
        ["msit", "llm", "compare", "-gp", "REF", "-mp", "TGT"],
        ["ait", "llm", "compare", "-gp", "REF", "-mp", "TGT", "-cl", "module"],
        ["xray", "compare", "REF", "TGT", "result.csv"],
        ["msprobe", "compare", "-gp", "REF", "-tp", "TGT", "-o", "out"],
    ],
)
def test_every_line_after_a_command_of_another_tool(words, capsys):
    sides = {"REF": str(GOLDEN / "modules"), "TGT": str(GOLDEN / "modules_fault")}
    assert execute([sides.get(word, word) for word in words]) == 1
    lines = suggested(capsys.readouterr().out)
    assert any(re.match("whence (report|repro|trace)", line) for line in lines)
    for line in lines:
        typed(line)


@pytest.mark.parametrize("missing", [False, True])
def test_every_line_after_labels(missing, capsys):
    import numpy as np

    a = np.linspace(1, 2, 32, dtype=np.float32).reshape(4, 8)
    with whence.recording("run"):
        for name in ("one", "two"):
            whence.label(name, a, side="reference")
            whence.label(name, a * (1 if missing else 2), side="target")
        if missing:
            whence.label("gone", a, side="reference")
            whence.label("gone", file="gone.bin", side="target")
    assert execute(["labels", "run", "-o", "cmp"]) == (2 if missing else 1)
    for line in suggested(capsys.readouterr().out):
        assert "(" not in line
        typed(line)
