"""`whence` alone: what lies in the folder and what one could do next, told at once."""

import json
import os
import shlex
import subprocess
import sys

import click
import pytest

import inside
import whence
from whence import cli, store
from whence.records import RunInfo
from whence.results import NextStep
from whence.workflows import contents as looking

AGE = 1_000_000


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of its own, in which no comparison was made yet."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def run(place, *command, minutes=0, exit_code=0):
    store.create(place, RunInfo(command=command, settings={"exit_code": exit_code}))
    at = (place / "run.json").stat().st_mtime - 60 * minutes
    os.utime(place / "run.json", (at, at))


def comparison(place, status="different", steps=(), **more):
    place.mkdir(parents=True)
    fields = {"status": status, "reference": "runs/ref", "target": "runs/tgt", **more}
    fields["next"] = [{"command": step, "decides": "it"} for step in steps]
    (place / "summary.json").write_text(json.dumps(fields))


def said(folder):
    done = inside.whence(folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_folder_without_any_shows_the_help(folder):
    (folder / "src").mkdir()
    (folder / "src" / "run.json").write_text('{"kind": "another tool\'s"}')
    assert said(folder) == inside.whence(folder, "--help").stdout


def test_one_run_asks_for_another(folder):
    run(folder / "ref", "python", "infer.py", "--text", "two words", minutes=5)
    lines = said(folder).splitlines()
    assert lines[:2] == ["Runs", "  ref  python infer.py --text 'two words'  5 minutes ago"]
    assert "  whence run -o ref-2 -- python infer.py --text 'two words'" in lines
    assert "  whence show ref --tree" in lines
    assert lines[-1] == "  whence --help"


def test_runs_that_were_not_compared(folder):
    run(folder / "runs" / "ref", "python", "infer.py", minutes=200)
    run(folder / "runs" / "new one", "python", "infer.py", "--bf16", exit_code=2)
    text = said(folder)
    assert "  whence compare runs/ref 'runs/new one' -o cmp\n" in text
    assert "ended with exit code 2, just now" in text
    assert text.index("runs/new one") < text.index("runs/ref"), "the newest first"


def test_comparisons_come_with_their_answer_and_their_next_steps(folder):
    for name in ("ref", "tgt"):
        run(folder / "runs" / name, "python", "infer.py")
    finding = {"name": "layers.3.norm", "op_type": "LayerNorm"}
    comparison(
        folder / "cmp",
        steps=("whence repro cmp -o repro", "whence locate cmp", "whence report cmp"),
        findings=[finding],
    )
    text = said(folder)
    assert "cmp  different: layers.3.norm (LayerNorm)  runs/ref against runs/tgt  just now" in text
    assert "  whence repro cmp -o repro\n  whence locate cmp\n" in text
    assert "whence compare" not in text, "both were compared"


def test_steps_that_must_be_filled_in_or_are_about_another_place_are_not_shown(folder):
    comparison(folder / "cmp", "undecided")
    steps = [
        NextStep("whence run --level op -o MORE -- CMD", "it", fill_in=True),
        NextStep("whence repro -o repro", "it", takes_comparison=True),
        NextStep("whence report elsewhere/c", "it"),
    ]
    fields = json.loads((folder / "cmp" / "summary.json").read_text())
    fields["next"] = [{key: getattr(step, key) for key in step.__struct_fields__} for step in steps]
    (folder / "cmp" / "summary.json").write_text(json.dumps(fields))
    text = said(folder)
    assert "whence repro cmp -o repro" in text
    assert "MORE" not in text and "elsewhere" not in text


def test_the_last_comparison_is_told_and_can_be_taken_up(folder):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for name in ("ref", "tgt"):
        with whence.capture(model, name), torch.no_grad():
            model(torch.ones(1, 4))
        model[0].weight.data *= 1.5
    assert inside.whence(folder, "compare", "ref", "tgt").returncode == 1
    text = said(folder)
    assert "Last comparison made here: ref against tgt: different (just now)" in text
    commands = [line.strip() for line in text.splitlines() if line.startswith("  whence ")]
    assert "whence repro -o repro" in commands
    for name, *words in (shlex.split(command)[1:] for command in commands[:-1]):
        cli.group.get_command(click.Context(cli.group), name).make_context(name, [*words])
        if name in ("show", "report"):
            assert inside.whence(folder, name, *words).returncode == 0
    assert inside.whence(folder, "compare", "ref", "tgt", "-o", "cmp").returncode == 1
    assert "Last comparison made here: cmp: different" in said(folder)


@pytest.mark.parametrize(
    "broken",
    [
        ("run.json", b""),
        ("run.json", b"[]"),
        ("run.json", b'{"kind": "whence", "command": 7, "settings": [], "format": 1}'),
        ("summary.json", b"{"),
        ("summary.json", b'{"status": ["x"], "findings": 3}'),
        ("summary.json", b'{"status": "same", "findings": {"a": 1}, "next": [3]}'),
    ],
)
def test_nothing_in_a_folder_makes_it_fail(folder, broken):
    name, content = broken
    (folder / "odd").mkdir()
    (folder / "odd" / name).write_bytes(content)
    run(folder / "e\x1b[31m", "python", "x\x1b[31m")
    text = said(folder)
    assert "\x1b" not in text
    assert "e\\x1b[31m" in text


def test_it_looks_at_few_names_and_reads_few_files(folder, monkeypatch):
    for number in range(20):
        run(folder / "runs" / f"r{number:02}", "python", minutes=number)
    for deep in ("a/b/c/run", ".hidden/run"):
        run(folder / deep, "python")
    read = []
    was = looking._read
    monkeypatch.setattr(looking, "_read", lambda file: read.append(file) or was(file))
    text = said(folder)
    assert "... 12 older runs" in text
    assert len(read) == 8
    assert "a/b/c" not in text and "hidden" not in text
    (folder / "also").mkdir()
    run(folder / "b", "python")
    monkeypatch.setattr(looking, "_MOST_NAMES", 10)
    assert "This folder holds more than was looked at." in said(folder)


def test_it_starts_without_a_framework(folder):
    run(folder / "ref", "python", "infer.py")
    check = (
        "import sys; from whence import cli; code = cli.execute([]); "
        "print([m for m in ('torch', 'numba', 'paddle', 'rich') if m in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
