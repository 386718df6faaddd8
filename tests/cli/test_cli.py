"""The command line as a user meets it: help is cheap, mistakes say what to do, every ending has its
exit code.
"""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import numpy as np
import pytest

import warm
from whence import cli, store
from whence.errors import OutputExists, UsageError, WhenceError
from whence.records import Call, Ref, RunInfo, Statistics, Step

HEAVY = ("numpy", "torch", "msgspec", "ml_dtypes", "rich", "orjson", "yaml")


def whence(*words, env=None, **more):
    return subprocess.run(
        [warm.TORCH, "-m", "whence", *map(str, words)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        **more,
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A run of two calls and one tensor on disk."""
    path = tmp_path_factory.mktemp("runs") / "ref"
    store.create(path, RunInfo(command=("python", "x.py")))
    writer = store.Writer(path, 0)
    array = np.arange(6, dtype=np.float32)
    figures = Statistics(6, 0.0, 5.0, 2.5, 1.707825127659933, float(np.linalg.norm(array)), 0, 0, 1)
    record = writer.record("float32", (2, 3), array.view(np.uint8), b"\0" * 16, figures, None)
    writer.call(Call(0, "", "model", 0, 0, op_type="Tiny", refs=(Ref("output.0", record),)))
    writer.call(
        Call(
            1,
            "head",
            "model",
            0,
            1,
            op_type="Linear",
            parent=0,
            number="1",
            leaf=True,
            refs=(Ref("output.0", record),),
        )
    )
    writer.step(Step("model", 0, 24, True))
    writer.close()
    return path


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["-h"], ["run", "--help"], ["show", "--help"], ["scrub", "-h"]],
)
def test_help_loads_nothing_heavy(words):
    check = (
        f"import sys; from whence import cli; code = cli.execute({words!r}); print([m for m "
        f"in {HEAVY!r} if m in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


def started(*words):
    """What the command imports and opens in a process of its own: (modules, files opened, exit
    code).
    """
    check = (
        "import sys; opened = []\n"
        "sys.addaudithook(lambda event, given: opened.append(given[0]) if event == 'open' else "
        "None)\n"
        f"from whence import cli; code = cli.execute({[*map(str, words)]!r})\n"
        "import json; print(json.dumps([sorted(sys.modules), len(opened), code]))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    modules, opened, code = json.loads(done.stdout.splitlines()[-1])
    return modules, opened, code


def test_help_costs_little():
    modules, opened, code = started("--help")
    assert [m for m in modules if m.partition(".")[0] == "whence"] == [
        "whence",
        "whence._version",
        "whence.cli",
        "whence.errors",
    ]
    assert (len(modules) < 250, opened < 400, code) == (True, True, 0), (
        len(modules),
        opened,
    )  # measured: 170 and 240


def test_every_command_is_listed_with_its_own_first_line():
    group, context = cli.group, click.Context(cli.group)
    names = group.list_commands(context)
    assert names[0] == "run"
    assert {"run", "show", "scrub", "recover", "pack"} <= set(names)
    listed = whence("--help").stdout
    for name in names:
        command = group.get_command(context, name)
        assert command is not None
        assert command.name == name
        first = " ".join((command.help or "").split("\n\n")[0].split())
        assert cli.one_line(name) == first
        assert len(first) <= 100
        assert re.sub(r"\s+", " ", first) in re.sub(r"\s+", " ", listed)
        assert all(
            option.help or isinstance(option, click.Argument) or option.name == "form"
            for option in command.params
            if isinstance(option, click.Option)
        )


def test_no_name_of_the_package_is_a_command():
    """A submodule, once imported, takes the place of a name of its package."""
    names = set(cli.group.list_commands(click.Context(cli.group)))
    assert not names & {"main", "group", "execute", "one_line", "FOLDER", "GROUPS"}


def test_version():
    from whence._version import __version__

    assert whence("--version").stdout == f"whence, version {__version__}\n"


# -- endings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shwo"], "no command 'shwo'; did you mean show?"),
        (["xyzzy"], "commands: run, "),
        (["show"], "Missing argument"),
        (["run", "-o", "r"], "Missing argument"),
        (["run", "--", "true"], "Missing option '-o'"),
        (["run", "-o", "r", "--slots", "inputs", "--", "true"], "'inputs' is not one of"),
        (["run", "-o", "r", "--steps", "3:1", "--", "true"], "holds no step"),
        (["run", "-o", "r", "--include", "re:(", "--", "true"], "not a regular expression"),
        (["run", "-o", "r", "--inclde", "x", "--", "true"], "No such option"),
        (["run", "-o", "r", "--", "no-such-command"], "not found on PATH"),
        (["show", "/nowhere/run"], "/nowhere/run"),
        (["show", "/nowhere/run", "--tree", "--format", "csv"], "--tree is text only"),
        (["scrub", "/nowhere/run"], "/nowhere/run"),
        (["recover", "/nowhere/run"], "/nowhere/run"),
    ],
)
def test_mistakes_are_exit_code_3(words, said, tmp_path):
    done = whence(*words, cwd=tmp_path)
    assert done.returncode == 3
    assert said in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_command_is_help_where_nothing_lies(tmp_path):
    done = whence(cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Capture:" in done.stdout


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (WhenceError("what was tried"), 3, "whence: what was tried\n"),
        (OutputExists("there"), 3, "whence: there\n"),
        (KeyboardInterrupt(), 130, "whence: interrupted\n"),
        (click.Abort(), 130, "whence: interrupted\n"),
        (ValueError("odd"), 3, "whence: unexpected ValueError: odd\n"),
        (click.UsageError("bad"), 3, "Error: bad\n"),
        (click.FileError("f", "gone"), 3, "gone"),
    ],
)
def test_errors_and_their_exit_codes(monkeypatch, capsys, error, code, said):
    def fail(*_):
        raise error

    monkeypatch.setattr(cli.group, "invoke", fail)
    monkeypatch.delenv("WHENCE_DEBUG", raising=False)
    assert cli.execute(["recover", "x"]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("error", [ValueError("odd"), UsageError("odd")])
def test_debug_shows_where(monkeypatch, capsys, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(cli.group, "invoke", fail)
    assert cli.execute(["--debug", "recover", "x"]) == 3
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("WHENCE_DEBUG", "1")
    assert cli.execute(["recover", "x"]) == 3
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("value", [0, 1, 2, 3])
def test_the_number_a_command_returns_is_the_exit_code(monkeypatch, value):
    monkeypatch.setattr(cli.group, "invoke", lambda context: value)
    assert cli.execute(["recover", "x"]) == value


def test_a_closed_pipe_is_quiet(stored):
    command = f"{warm.TORCH} -m whence show {stored} --format json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")


def test_commands_of_other_packages(monkeypatch, capsys):
    added = {
        "extra": EntryPoint("extra", "whence.cli.recover:command", "whence.cli"),
        "broken": EntryPoint("broken", "nowhere:x", "whence.cli"),
    }
    monkeypatch.setattr(cli, "_added", lambda: added)
    context = click.Context(cli.group)
    assert cli.group.list_commands(context)[-2:] == ["broken", "extra"]
    assert cli.one_line("extra") == "(from whence.cli.recover:command)"
    assert cli.group.get_command(context, "extra") is not None
    assert cli.execute(["broken"]) == 3
    assert "nowhere:x and cannot be loaded" in capsys.readouterr().err


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_starts_without_a_framework(stored):
    modules, opened, code = started("show", stored)
    assert [m for m in ("torch", "paddle", "rich") if m in modules] == []
    assert (len(modules) < 650, opened < 700, code) == (True, True, 0), (
        len(modules),
        opened,
    )  # measured: 440 and 450


def test_show_views(stored, tmp_path):
    text = whence("show", stored)
    assert text.returncode == 0, text.stderr
    assert "python x.py" in text.stdout
    assert "head   Linear" in text.stdout
    assert "head" in whence("show", stored, "--tree").stdout
    assert (
        whence("show", stored, "--format", "table", "--name", "head")
        .stdout.splitlines()[1]
        .split()[3]
        == "head:output.0"
    )
    assert (
        len(json.loads(whence("show", stored, "--format", "json", "--ids", "1").stdout)["calls"])
        == 1
    )
    one = whence("show", stored, "head")
    assert "histogram" in one.stdout
    assert (
        json.loads(whence("show", stored, "head", "--format", "json").stdout)["slot"] == "output.0"
    )
    assert whence("show", stored, "--format", "csv").stdout.startswith("index,rank,root,")


def test_show_writes_a_file_and_keeps_an_existing_one(stored, tmp_path):
    file = tmp_path / "ref.csv"
    assert whence("show", stored, "--format", "csv", "-o", file).returncode == 0
    assert file.read_text().startswith("index,")
    again = whence("show", stored, "--format", "csv", "-o", file)
    assert again.returncode == 3
    assert "--force" in again.stderr
    assert whence("show", stored, "-o", file, "--force").returncode == 0
    assert not file.read_text().startswith("index,")
    full = whence("show", stored, "-o", "/dev/full")
    assert full.returncode == 3
    assert "/dev/full" in full.stderr


def test_show_of_a_name_that_is_not_there(stored):
    done = whence("show", stored, "hed")
    assert done.returncode == 3
    assert "nearest: head" in done.stderr


def test_scrub_and_recover(stored, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(stored, copy)
    assert whence("recover", copy).returncode == 0
    done = whence("scrub", copy)
    assert done.returncode == 0, done.stderr
    assert "removed" in done.stderr
    shown = whence("show", copy, "head")
    assert "histogram" not in shown.stdout
    assert "x.py" not in whence("show", copy).stdout


def test_names_that_the_terminal_cannot_show_or_should_not_obey(tmp_path):
    store.create(tmp_path / "run", RunInfo())
    writer = store.Writer(tmp_path / "run", 0)
    writer.call(Call(0, "h\u2192\x1b[31m", "model", 0, 0))
    writer.close()
    env = {"PYTHONIOENCODING": "latin-1"}
    done = whence("show", tmp_path / "run", "--tree", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "h\\u2192\\x1b[31m" in done.stdout
    done = whence("show", tmp_path / "run", "h", env=env)
    assert (done.returncode, done.stdout) == (3, "")
    assert "nearest: h\\u2192\\x1b[31m" in done.stderr


def test_run_through_the_command_line(tmp_path):
    done = whence(
        "run",
        "-o",
        tmp_path / "run",
        "--",
        warm.TORCH,
        "-c",
        "import sys; print(sys.argv[1:])",
        "--",
        "-o",
        "--help",
    )
    assert done.stdout == "['--', '-o', '--help']\n"
    assert done.returncode == 3
    assert "none of torch, paddle, onnxruntime, openvino was ever imported" in done.stderr


def test_print_takes_a_pattern_or_none(monkeypatch):
    captured = []
    monkeypatch.setattr("whence.api.run_command", lambda *_, **how: captured.append(how) or 0)
    for given, pattern in ((["--print"], "*"), (["--print", "a*"], "a*")):
        assert cli.execute(["run", "-o", "run", *given, "--", "x"]) == 0
        assert captured.pop()["print_pattern"] == pattern


def test_every_public_file_has_a_first_line():
    for path in Path(cli.__file__).parent.glob("[!_]*.py"):
        assert cli.one_line(path.stem.replace("_", "-")).endswith("."), path
