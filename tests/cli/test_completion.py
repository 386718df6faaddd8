"""Completion: the script that whence prints completes commands, options and paths in a shell."""

import os
import subprocess
import sys

import pytest

import inside
from whence import cli

ASK = """
eval "$(whence completion bash)"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
compopt() { echo "compopt $*"; }
_whence_completion whence
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """What bash would show for a line whose last word is being typed."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "whence").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m whence "$@"\n')
    (folder / "whence").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}

    def asked(*words):
        done = subprocess.run(
            ["bash", "-c", ASK, "bash", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return asked


@pytest.mark.skipif(
    subprocess.run(
        ["bash", "-c", "((BASH_VERSINFO[0] * 10 + BASH_VERSINFO[1] >= 44))"], check=False
    ).returncode,
    reason="click's script needs bash 4.4",
)
def test_bash_completes(ask):
    assert ask("whence", "com") == ["compare", "commits", "completion"]
    assert ask("whence", "compare", "a", "b", "--match", "") == ["auto", "exact", "names", "order"]
    assert ask("whence", "show", "ru") == ["compopt", "-o", "default"], "files, by bash itself"


def completed(tmp_path, monkeypatch, *words):
    """Lines of click's protocol for zsh: type, value, help."""
    monkeypatch.setenv("_WHENCE_COMPLETE", "zsh_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    return inside.whence(tmp_path).stdout.splitlines()


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "runs/r"),
        ("compare", "runs/ref", "runs/t"),
        ("compare", "a", "b", "-o", "c"),
        ("show", "runs/r"),
        ("report", "cm"),
        ("trace", "cm"),
        ("repro", "cm"),
        ("locate", "runs/r"),
        ("tokens", "re"),
        ("labels", "ru"),
        ("align", "ru"),
        ("map-weights", "ru"),
        ("convert", "ru"),
        ("scrub", "ru"),
        ("recover", "ru"),
        ("run", "-o", "ru"),
        ("run", "-o", "r", "--", "python", "in"),
        ("doctor", "--", "python", "in"),
        ("ladder", "-o", "l", "--", "python", "in"),
        ("ops", "list", "ru"),
        ("xray", "compare", "a"),
    ],
)
def test_runs_comparisons_and_files_are_paths(words, tmp_path, monkeypatch):
    kind, value, _ = completed(tmp_path, monkeypatch, "whence", *words)
    assert (kind, value) == ("file", words[-1])


def test_commands_come_with_what_they_do_and_none_is_imported(tmp_path, monkeypatch):
    def imported(self, context, name):
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(cli.Commands, "get_command", imported)
    lines = completed(tmp_path, monkeypatch, "whence", "la")
    expected = [("plain", name, cli.one_line(name)) for name in ("labels", "ladder")]
    assert lines == [part for item in expected for part in item]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed(shell, tmp_path):
    done = inside.whence(tmp_path, "completion", shell)
    assert done.returncode == 0
    assert f"_WHENCE_COMPLETE={shell}_complete" in done.stdout
    assert ("alias whence=" in done.stdout) == (shell == "zsh")
    assert ("split -m 1" in done.stdout) == (shell == "fish")


@pytest.mark.parametrize(
    ("shell", "script", "start"),
    [
        ("bash", ".local/share/whence/completion.bash", ".bashrc"),
        ("zsh", ".local/share/whence/completion.zsh", ".zshrc"),
        ("fish", ".config/fish/completions/whence.fish", None),
    ],
)
def test_installed_once(shell, script, start, tmp_path, monkeypatch):
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    if start:
        (tmp_path / start).write_text("export EDITOR=vi")
    for words in ((), ("--shell", shell)):
        done = inside.whence(tmp_path, "completion", "install", *words)
        assert done.returncode == 0, done.stderr
        assert str(tmp_path / script) in done.stdout
    assert "whence" in (tmp_path / script).read_text()
    if start:
        lines = (tmp_path / start).read_text().splitlines()
        assert lines[0] == "export EDITOR=vi"
        assert len(lines) == 2
        assert str(tmp_path / script) in lines[1]
        assert "loads it already" in done.stdout


def test_the_shell_must_be_known(tmp_path, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    done = inside.whence(tmp_path, "completion", "install")
    assert (done.returncode, done.stdout) == (3, "")
    assert "tcsh; choose one: whence completion install --shell bash|zsh|fish" in done.stderr
    done = inside.whence(tmp_path, "completion", "bash", "--shell", "bash")
    assert done.returncode == 3


def test_a_start_file_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    (tmp_path / ".bashrc").mkdir()
    done = inside.whence(tmp_path, "completion", "install", "--shell", "bash")
    assert done.returncode == 3
    assert "add this line yourself: [ -f " in done.stderr
