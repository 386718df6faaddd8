"""The race: what is not installed is listed with the line that installs it, and what a tool names
is read from what it wrote.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
race = pytest.importorskip("race")
contestants = pytest.importorskip("_contestants")


def test_a_tool_that_is_missing_is_listed_with_the_line_that_installs_it(tmp_path, capsys):
    run = race.Race(tmp_path, {}, {})
    missing = race.TOOLS["msit"]._replace(package="no_such_package_of_anybody")
    assert not run.is_here(missing) and run.is_here(missing._replace(package="json"))
    run.ceiling.append(1e9)
    row = {"capture": 1.5, "first": 3.0, "mb": 2.0, "start": 0.1, "cpu_s": 1.0, "wall_s": 1.0}
    run.rows["whence"] = [row | {"peak": 30.0, "over_reading": 2.0}]
    run.named["whence"] = "layers.4.post_attention_layernorm.0."
    answer = race.table(run, ["whence", "msprobe L1"], 4)
    assert answer["whence"]["right"] and "install" in answer["msprobe L1"]
    printed = capsys.readouterr().out
    assert "layers.4.post_attention_layernorm.0: right" in printed
    assert "not installed: pip install mindstudio-probe" in printed
    assert not race.table(run, ["whence"], 3)["whence"]["right"]


def test_what_a_table_of_msprobe_names_is_its_first_row_that_does_not_pass(tmp_path):
    table = tmp_path / "compare_result_1.csv"
    table.write_text("NPU Name,Result\na,pass\nb,error\nc,error\n", encoding="utf-8-sig")
    assert race.TOOLS["msprobe L1"].named(tmp_path, "") == "b"
    table.write_text("NPU Name,Result\na,pass\n", encoding="utf-8-sig")
    assert race.TOOLS["msprobe L1"].named(tmp_path, "") == ""


def test_allclose_names_the_first_output_that_is_not_close(tmp_path):
    torch = pytest.importorskip("torch")
    x = torch.ones(3)
    for side, values in (("reference", (x, x, x)), ("target", (x + 1e-9, x + 1e-3, x + 1))):
        (tmp_path / side).mkdir()
        for i, (name, value) in enumerate(zip(("a", "layers.0.b", "c"), values)):
            torch.save(value, tmp_path / side / f"{i:05}.{name}.pt")
    assert contestants.COMPARE["torch.save, allclose"](tmp_path, {}) == "layers.0.b"
