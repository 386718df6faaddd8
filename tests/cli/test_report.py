"""`whence report` as a user runs it: where the page lies, what it says, what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from whence import cli


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A comparison of two folders of arrays, without a framework."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for side in ("ref", "tgt"):
        (tmp_path / side).mkdir()
    for name in ("a", "b", "c"):
        array = rng.standard_normal((16, 32)).astype(np.float32)
        np.save(tmp_path / "ref" / f"{name}.npy", array)
        np.save(tmp_path / "tgt" / f"{name}.npy", array * (1.5 if name == "c" else 1))
    assert cli.execute(["compare", "ref", "tgt", "-o", "cmp", "--html", "beside.html"]) in (1, 2)
    return tmp_path


def told(file):
    return json.loads(file.read_text().split('id="data">')[1].split("</script>")[0])


def test_report_writes_a_page_beside_the_comparison_and_never_over_one(folder, capsys):
    assert cli.execute(["report", "cmp"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("written to cmp/report.html: ")
    assert cli.execute(["report", "cmp"]) == 3
    assert "--force" in capsys.readouterr().err
    assert cli.execute(["report", "cmp", "--force", "--details", "0"]) == 0
    assert told(folder / "cmp" / "report.html")["details"] == []
    found = told(folder / "beside.html")
    assert {found["strings"][k] for k in found["calls"]["name"]} >= {"a", "b", "c"}
    assert {found["strings"][found["calls"]["name"][d["call"]]] for d in found["details"]} >= {"c"}


def test_the_answer_of_tokens_is_a_page_and_goes_onto_one(folder, capsys):
    for name, text in (("a.json", "one two"), ("b.json", "one <b>")):
        (folder / name).write_text(json.dumps({"src": "p", "output": text}) + "\n")
    cli.execute(["tokens", "a.json", "b.json", "--format", "json"])
    (folder / "tokens.json").write_text(capsys.readouterr().out)
    assert cli.execute(["report", "tokens.json"]) == 0
    found = told(folder / "tokens.html")
    assert found["head"]["word"] == "Different"
    assert found["texts"]["prompts"][0]["target_at"] == "<b>"
    assert cli.execute(["report", "cmp", "-o", "both.html", "--tokens", "tokens.json"]) == 0
    assert told(folder / "both.html")["texts"] == found["texts"]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["report", "nothing"], "whence compare"), (["report", "cmp", "-o", "ref"], "is a folder")],
)
def test_refusals(folder, capsys, words, said):
    assert cli.execute(words) == 3
    assert said in capsys.readouterr().err


def test_programs_without_values_have_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = Path(__file__).parent.parent / "data" / "paddle"
    cli.execute(
        [
            "compare",
            str(data / "tiny_legacy.pdmodel"),
            str(data / "tiny_legacy_bug.pdmodel"),
            "-o",
            "cmp",
            "--html",
            "page.html",
        ]
    )
    found = told(tmp_path / "page.html")
    assert found["head"]["sentence"] == "The structure differs at scale_4.tmp_0 (scale)."
    assert "no tensor" in found["missing"][0]


def test_a_root_that_only_stands_for_a_dump_is_no_call_that_was_not_replayed(tmp_path, capsys):
    data = Path(__file__).parent.parent / "data" / "msprobe"
    cli.execute(
        [
            "compare",
            str(data / "L1_md5"),
            str(data / "L1_xor"),
            "-o",
            str(tmp_path / "cmp"),
            "--format",
            "json",
        ]
    )
    assert json.loads(capsys.readouterr().out)["coverage"]["replayed"] >= 0
