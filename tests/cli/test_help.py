"""Help: commands and options stand under headings, and rare options wait for --help-all."""

import re
import shutil

import click
import pytest

import inside
from whence import cli

CONTEXT = click.Context(cli.group, info_name="whence")
GROUPED = [
    name
    for name in cli.group.list_commands(CONTEXT)
    if any(getattr(cli.group.get_command(CONTEXT, name), "groups", ()))
]


def sections(text):
    """Headings of a help with the words that begin its rows."""
    found, heading = {}, ""
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z][^.]*:", line):
            heading = line[:-1]
        elif heading and re.match(r"  \S", line):
            found.setdefault(heading, []).append(line.split()[0].strip(","))
    return found


def test_every_command_of_ours_has_a_heading(tmp_path):
    listed = sections(inside.whence(tmp_path, "--help").stdout)
    assert cli.UNGROUPED not in listed
    assert list(listed) == ["Options", *cli.GROUPS]
    assert {h: tuple(names) for h, names in listed.items() if h != "Options"} == cli.GROUPS
    names = [name for group in cli.GROUPS.values() for name in group]
    assert len(names) == len({*names})


def test_the_list_of_commands_is_one_line_each(tmp_path):
    lines = inside.whence(tmp_path, "--help").stdout.splitlines()
    commands = {name for group in cli.GROUPS.values() for name in group}
    assert len([line for line in lines if line[:2] == "  " and line.split()[0] in commands]) == len(
        commands
    )
    assert not [line for line in lines if line.startswith("   ")], "a line of a command is wrapped"


def test_a_command_without_a_heading_stands_under_the_last(tmp_path, monkeypatch):
    for path in cli.FOLDER.glob("[!_]*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "brand_new.py").write_text('"""Do something new."""\n')
    monkeypatch.setattr(cli, "FOLDER", tmp_path)
    listed = sections(inside.whence(tmp_path, "--help").stdout)
    assert list(listed)[-1] == cli.UNGROUPED
    assert listed[cli.UNGROUPED] == ["brand-new"]
    (tmp_path / "scrub.py").unlink()
    assert "scrub" not in sections(inside.whence(tmp_path, "--help").stdout)["Maintenance"]


def test_grouped_commands():
    assert {"compare", "run"} <= {*GROUPED}


@pytest.mark.parametrize("name", GROUPED)
def test_every_option_stands_under_one_heading(name, tmp_path):
    command = cli.group.get_command(CONTEXT, name)
    given = [
        max(option.opts, key=len)
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
    ]
    assert "" not in command.groups
    rare = {max(option.opts, key=len) for option in command.rare}
    shown = inside.whence(tmp_path, name, "--help").stdout
    everything = inside.whence(tmp_path, name, "--help-all").stdout if rare else shown
    for option in given:
        row = rf"^  (-\w, )?{re.escape(option)}\b"
        assert bool(re.search(row, shown, re.MULTILINE)) == (option not in rare)
        assert re.search(row, everything, re.MULTILINE)
    last = shown.splitlines()[-1]
    assert last.endswith(f"whence {name} --help-all") == bool(rare)
    assert "rarely needed" not in everything
    assert [line for line in everything.splitlines() if len(line) > 80] == []


def test_the_help_of_every_command_at_once(tmp_path):
    shown = inside.whence(tmp_path, "--help-all")
    assert (shown.returncode, shown.stderr) == (0, "")
    usages = re.findall(r"^Usage: whence ?(.*?) ?\[OPTIONS\]", shown.stdout, re.MULTILINE)
    assert {"", *cli.group.list_commands(CONTEXT), "ops diff", "msit llm compare"} <= {*usages}
    assert all(
        option.opts[-1] in shown.stdout
        for name in GROUPED
        for option in cli.group.get_command(CONTEXT, name).rare
    )


def test_few_options_are_rare():
    rare = [o for name in GROUPED for o in cli.group.get_command(CONTEXT, name).rare]
    assert 10 <= len(rare) <= 20


def test_rare_options_work_as_the_others(tmp_path):
    done = inside.whence(tmp_path, "compare", "a", "b", "--tier", "core")
    assert (done.returncode, "no such option" in done.stderr.lower()) == (3, False)
