"""`whence compare` from outside: exit codes, formats, files, errors."""

import errno
import io
import json
import os
import sys
import time
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from handmade import bfloat16, net
from whence import api, cache_folders
from whence.cli import execute
from whence.errors import UnreadableRun


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Names on the command line stand for hand-made runs."""
    made = {
        "ref": net(),
        "ref2": net(),
        "bf16": net(bfloat16),
        "bad": net(change=lambda n, v: v * 1.5 if n == "h" else v),
        "part": net(drop=("fc1",)),
    }

    def open_run(path):
        if path not in made:
            raise UnreadableRun(f"no run at {path}")
        return made[path]

    # Modules that import the name first: those that were loaded later would keep this stand-in.
    for module in (
        "workflows.saved",
        "workflows.reopen",
        "workflows.locate.locate",
        "readers.opening",
    ):
        monkeypatch.setattr(f"whence.{module}.open_run", open_run)
    monkeypatch.setattr(
        "whence.cache_folders.homes", lambda: [tmp_path.parent / f"{tmp_path.name}-cache"]
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys, *args):
    code = execute(["compare", *args])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("target", "code", "bisect"),
    [("ref", 0, 0), ("bf16", 0, 0), ("bad", 1, 1), ("part", 2, 125), ("nowhere", 3, 125)],
)
def test_exit_codes(runs, capsys, target, code, bisect):
    assert call(capsys, "ref", target)[0] == code
    assert call(capsys, "ref", target, "--bisect")[0] == bisect


def test_the_answer_is_on_stdout_and_files_are_written_where_they_are_asked_for(runs, capsys):
    before = sorted(runs.rglob("*"))
    code, out, err = call(capsys, "ref", "bad")
    assert (code, out.startswith("FAULT              fc1 "), "written to" in out, err) == (
        1,
        True,
        False,
        "",
    )
    assert sorted(runs.rglob("*")) == before
    assert call(capsys, "ref", "bad", "-o", "cmp")[1].endswith(
        "written to cmp: summary.json, report.csv, report.json\n"
    )
    assert json.loads((runs / "cmp" / "summary.json").read_text())["status"] == "different"
    assert api.load_comparison(runs / "cmp").findings[0].name == "fc1"
    assert call(capsys, "ref", "bad", "--view", "msit")[0] == 3


def test_the_last_comparison_of_a_folder_is_taken_and_named(runs, capsys, monkeypatch):
    (runs / "inner").mkdir()
    assert execute(["report", "--format", "json"]) == 3
    assert "no comparison was made in this folder yet" in capsys.readouterr().err
    call(capsys, "ref", "bad")
    assert execute(["report", "--format", "json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["status"] == "different"
    assert (
        said.err
        == "whence: using the last comparison made here: <Net> against <Net>, made just now\n"
    )
    call(capsys, "ref", "ref", "-o", "cmp")
    assert execute(["report", "--format", "json"]) == 0
    said = capsys.readouterr()
    assert (json.loads(said.out)["status"], str(runs / "cmp") in said.err) == ("same", True)
    for command in (["trace"], ["repro", "-o", "out"], ["locate"]):
        assert execute(command) == 3
        assert str(runs / "cmp") in capsys.readouterr().err.splitlines()[0]
    monkeypatch.chdir(runs / "inner")
    assert execute(["report", "--format", "json"]) == 3
    assert "no comparison was made in this folder yet" in capsys.readouterr().err


def test_old_comparisons_are_deleted_and_files_are_private(runs, capsys, tmp_path):
    folder = cache_folders.folder("comparisons")
    for i in range(40):
        (folder / f"{i:032}.json").write_text("{}")
        os.utime(folder / f"{i:032}.json", (1e9 + i, time.time() - 86_400 * (i - 1)))
    (folder / "x.1.tmp").write_text("left by a killed process")
    os.utime(folder / "x.1.tmp", (0, 0))
    call(capsys, "ref", "bad")
    left = list(folder.iterdir())
    assert 29 <= len(left) <= 32 and not list(folder.glob("*.tmp"))
    old = {f"{i:032}.json" for i in range(40)}
    (mine,) = [f for f in left if f.name not in old]
    assert (mine.stat().st_mode & 0o777, folder.stat().st_mode & 0o077) == (0o600, 0)
    mine.write_bytes(b"{")
    assert execute(["report"]) == 3
    assert "cannot be read" in capsys.readouterr().err


def test_where_nothing_can_be_written_the_answer_stands(runs, capsys, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_, **__):
        raise full

    monkeypatch.setattr("whence.cache_folders.private", lambda folder: False)
    code, out, err = call(capsys, "ref", "bad")
    assert (code, out[:5], err.count("\n")) == (1, "FAULT", 1) and err.startswith(
        "note: this comparison is not remembered for whence report"
    )
    monkeypatch.setattr("whence.disk.System.open", refuse)
    monkeypatch.setattr("whence.disk.System.make_folder", refuse)
    for form, start in (("text", "FAULT"), ("json", "{")):
        code, out, err = call(
            capsys,
            "ref",
            "bad",
            "-o",
            "cmp",
            "--format",
            form,
            "--junit",
            "j/x.xml",
            "--html",
            "x.html",
        )
        assert (code, out.startswith(start), "written to" in out) == (3, True, False)
        assert (
            "cannot write the comparison to cmp: No space left on device" in err
            and "j/x.xml" in err
            and "x.html" in err
        )
        assert "the answer above is still valid" in err


def test_stdout_that_takes_nothing_is_said(runs, monkeypatch, capsys):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert execute(["compare", "ref", "bad"]) == 3
    assert (
        capsys.readouterr().err
        == "whence: the answer cannot be written to stdout: No space left on device\n"
    )


def test_json_and_csv(runs, capsys):
    code, out, _ = call(capsys, "ref", "bad", "--format", "json")
    assert (code, json.loads(out)["status"]) == (1, "different")
    assert call(capsys, "ref", "bad", "--format", "csv")[1].startswith("verdict,name,op_type,")


def test_what_build_machines_read(runs, capsys):
    assert call(capsys, "ref", "bad", "--format", "markdown")[1].startswith(
        "### whence: DIFFERENT\n\nfc1 (Linear), "
    )
    assert call(capsys, "ref", "bad", "--format", "github")[1].startswith(
        "::error title=whence%3A fc1::fc1 (Linear) "
    )
    code, out, _ = call(capsys, "ref", "bad", "--annotations", "--junit", "out/whence.xml")
    assert (code, out.splitlines()[-1][:8]) == (1, "::error ")
    assert ElementTree.parse(runs / "out" / "whence.xml").getroot().get("failures") == "2"
    code, out, err = call(capsys, "ref", "ref", "--junit", "out/whence.xml")
    assert (code, out, "--force" in err) == (3, "", True)
    assert call(capsys, "ref", "ref", "--junit", "out/whence.xml", "--force")[0] == 0
    assert ElementTree.parse(runs / "out" / "whence.xml").getroot().get("failures") == "0"
    assert call(capsys, "ref", "ref", "--annotations", "--format", "json")[0] == 3


def test_the_same_from_what_was_written(runs, capsys):
    call(capsys, "ref", "bad", "-o", "cmp")
    for words in (["--format", "markdown"], ["--format", "github"], ["--format", "csv"]):
        now = call(capsys, "ref", "bad", "-o", "again", "--force", *words)[1].replace(
            "report again", "report cmp"
        )
        assert execute(["report", "cmp", *words]) == 0
        assert capsys.readouterr().out == now
    assert execute(["report", "cmp", "--junit", "out.xml", "--annotations"]) == 0
    assert capsys.readouterr().out.startswith("::error ")
    assert ElementTree.parse(runs / "out.xml").getroot().get("failures") == "2"
    assert not (runs / "cmp" / "report.html").exists(), "the page is written when it is asked for"
    assert execute(["report", "nowhere", "--junit", "other.xml"]) == 3


def test_plots_from_what_was_written(runs, capsys):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    call(capsys, "ref", "bad", "-o", "cmp")
    assert execute(["report", "cmp", "--plots", "plots"]) == 0
    assert {path.name for path in (runs / "plots").iterdir()} == {
        "error-along-the-run.png",
        "error-along-the-run.svg",
    }
    assert capsys.readouterr().out == "written to plots: 2 files\n"
    assert execute(["report", "cmp", "--plots", "plots"]) == 3


def test_a_further_run_of_the_reference(runs, capsys):
    code, out, _ = call(capsys, "ref", "bf16", "--again", "ref2", "--again", "ref2")
    assert (code, "nothing: 2 further runs bitwise equal to the reference" in out) == (0, True)
    code, out, err = call(capsys, "ref", "bf16", "--again", "bad", "--format", "json")
    assert (code, json.loads(out)["repetition"]["names"]) == (0, ["fc1"])
    code, _, err = call(capsys, "ref", "bf16", "--again", "./ref")
    assert (code, "the reference itself" in err) == (3, True)
    code, out, err = call(capsys, "ref", "bf16", "--again", "nowhere")
    assert (code, out) == (3, "")
    assert "no run at nowhere" in err


def test_a_third_run(runs, capsys):
    code, out, _ = call(capsys, "bf16", "bf16", "--third", "ref")
    assert (code, "third run        not needed: nothing differs" in out) == (0, True)
    code, _, err = call(capsys, "ref", "bad", "--third", "bf16")
    assert code == 3
    assert "higher precision" in err


def test_an_existing_folder_stays_without_force(runs, capsys):
    assert call(capsys, "ref", "ref", "-o", "cmp")[0] == 0
    code, out, err = call(capsys, "ref", "bad", "-o", "cmp")
    assert (code, out) == (3, "")
    assert "--force" in err
    assert call(capsys, "ref", "bad", "-o", "cmp", "--force")[0] == 1
    (runs / "file").write_text("")
    assert "it is a file" in call(capsys, "ref", "bad", "-o", "file")[2]


def test_strict_and_coverage(runs, capsys):
    assert call(capsys, "ref", "part", "--min-coverage", "0.5")[0] == 0
    assert call(capsys, "ref", "part", "--min-coverage", "1.5")[0] == 3


def test_bisect_skips_what_is_no_answer_also_a_misspelt_option(runs, capsys):
    assert call(capsys, "ref", "ref", "--bisect", "--nonsense")[0] == 125


def test_unreadable_input_is_one_line(runs, capsys):
    code, out, err = call(capsys, "ref", "nowhere")
    assert (code, out) == (3, "")
    assert "no run at nowhere" in err
    assert "Traceback" not in err


def test_help_lists_every_option():
    text = (
        CliRunner()
        .invoke(__import__("whence.cli.compare", fromlist=["command"]).command, ["--help"])
        .output
    )
    for option in (
        "--no-replay",
        "--strict",
        "--bisect",
        "--min-coverage",
        "--format",
        "--force",
        "-o",
    ):
        assert option in text
