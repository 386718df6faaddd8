"""The page of bugs of released software: each has its thread, releases, script and answer.

Typing its commands downloads releases: `python examples/findings/reproduce.py` does that.
"""

import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest

from whence import cli

FOLDER = Path(__file__).parents[2] / "examples" / "findings"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


def typist():
    spec = importlib.util.spec_from_file_location("reproduce", FOLDER / "reproduce.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FINDINGS = typist().findings()
GROUP = click.Context(cli.group, info_name="whence")


def test_every_finding_has_a_script_and_a_thread():
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"reproduce"}
    assert scripts == {*FINDINGS} and len(scripts) >= 12
    threads = re.findall(r"\(https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+\)", PAGE)
    assert len({*threads}) == len(FINDINGS)
    three = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    assert "(examples/findings/README.md)" in three


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_names_releases_and_an_answer(name):
    _, commands, answer = FINDINGS[name]
    lines = [shlex.split(line) for line in commands.splitlines()]
    pinned = [word for words in lines if words[0] == "pip" for word in words if "==" in word]
    assert pinned
    for words in lines:
        words = words[words[0].startswith("PYTHONPATH=") :]
        if words[0] == "whence":
            command = cli.group.get_command(GROUP, words[1])
            command.make_context(words[1], words[2:])
        else:
            assert words[0] in ("pip", "python")
    assert answer[0].split()[0] in ("FAULT", "FIRST", "OPTIMISER") and len(answer) >= 3
    compile((FOLDER / f"{name}.py").read_text(encoding="utf-8"), name, "exec")


def test_an_answer_that_is_not_printed_is_lost(monkeypatch, tmp_path):
    module = typist()
    name = next(iter(FINDINGS))
    missing, printed = module.lost(name, "echo FAULT 12 of 3; echo other", ["FAULT 7 of", "gone"])
    assert missing == ["gone"] and "other" in printed
