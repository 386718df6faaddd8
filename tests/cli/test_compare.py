"""`whence compare` from outside: exit codes, formats, files, errors."""

import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from handmade import bfloat16, net
from whence import api
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

    monkeypatch.setattr("whence.api.runs.open_run", open_run)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys, *args):
    code = execute(["compare", *args])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("target", "code", "bisect"), [("ref", 0, 0), ("bf16", 0, 0), ("bad", 1, 1), ("part", 2, 125), ("nowhere", 3, 125)]
)
def test_exit_codes(runs, capsys, target, code, bisect):
    assert call(capsys, "ref", target)[0] == code
    assert call(capsys, "ref", target, "--bisect")[0] == bisect


def test_the_answer_is_on_stdout_and_the_files_in_a_numbered_folder(runs, capsys):
    assert call(capsys, "ref", "bad")[1].startswith("FAULT              fc1 ")
    call(capsys, "ref", "ref")
    assert json.loads((runs / "whence-cmp" / "summary.json").read_text())["status"] == "different"
    assert json.loads((runs / "whence-cmp-2" / "summary.json").read_text())["status"] == "same"
    assert api.load_comparison(runs / "whence-cmp").findings[0].name == "fc1"


def test_json_and_csv(runs, capsys):
    code, out, _ = call(capsys, "ref", "bad", "--format", "json")
    assert (code, json.loads(out)["status"]) == (1, "different")
    assert call(capsys, "ref", "bad", "--format", "csv")[1].startswith("verdict,name,op_type,")


def test_what_build_machines_read(runs, capsys):
    assert call(capsys, "ref", "bad", "--format", "markdown")[1].startswith("### whence: DIFFERENT\n\nfc1 (Linear), ")
    assert call(capsys, "ref", "bad", "--format", "github")[1].startswith("::error title=whence%3A fc1::fc1 (Linear) ")
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
        now = call(capsys, "ref", "bad", "-o", "again", "--force", *words)[1]
        assert execute(["report", "cmp", *words]) == 0
        assert capsys.readouterr().out == now
    assert execute(["report", "cmp", "--junit", "out.xml", "--annotations"]) == 0
    assert capsys.readouterr().out.startswith("::error ")
    assert ElementTree.parse(runs / "out.xml").getroot().get("failures") == "2"
    assert not (runs / "cmp" / "report.html").exists(), "the page is written when it is asked for"
    assert execute(["report", "nowhere", "--junit", "other.xml"]) == 3


def test_plots_from_what_was_written(runs, capsys):
    pytest.importorskip("matplotlib", reason="plots need whence[plots]")
    call(capsys, "ref", "bad", "-o", "cmp")
    assert execute(["report", "cmp", "--plots", "plots"]) == 0
    assert {path.name for path in (runs / "plots").iterdir()} == {"error-along-the-run.png", "error-along-the-run.svg"}
    out, err = capsys.readouterr()
    assert out == "written to plots: 2 files\n"
    assert err.startswith("note: the runs could not be read again"), "runs made by hand lie nowhere"
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
    text = CliRunner().invoke(__import__("whence.cli.compare", fromlist=["command"]).command, ["--help"]).output
    for option in ("--no-replay", "--strict", "--bisect", "--min-coverage", "--format", "--force", "-o"):
        assert option in text
