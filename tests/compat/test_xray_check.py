"""whence xray check: two dumps, or a dump and the table of another machine, in one command."""

import csv
import subprocess
from pathlib import Path

import pytest

import whence
from whence.cli import execute
from whence.errors import CaptureError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def dumped(name, approximate):
    x = torch.linspace(-2, 2, 24).reshape(4, 6)
    whence.begin_dump(f"{name}/proc_1/dump")
    torch.nn.functional.gelu(x, approximate=approximate)
    whence.end_dump()
    Path(name, "proc_1", "dump.json").write_text("{}")


@pytest.fixture
def dumps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dumped("gpu", "none")
    dumped("xpu", "tanh")


def test_the_operator_is_named_and_both_tables_are_compared(dumps, capsys):
    assert execute(["xray", "check", "gpu/proc_1", "xpu/proc_1/dump.json"]) == 1
    said = capsys.readouterr().out
    assert "approximate is none in the reference, tanh in the target" in said
    assert "SAME" not in said
    assert "TESTS              every operator passes on the target\n" in said
    asked = "so the operator computes what it is asked: what it is asked to compute differs"
    assert f"  gelu: 1 of 1 test pass on cpu, {asked}\n" in said
    assert Path("xray_check/result.csv").read_text().startswith("name,op_name,dtype,shape,")
    assert execute(["xray", "check", "xray_check/reference.csv", "xpu/proc_1", "-o", "two"]) == 0
    assert "reference        xray_check/reference.csv" in capsys.readouterr().out
    assert execute(["xray", "check", "gpu/proc_1", "xpu/proc_1"]) == 3  # the folder is there


def test_a_table_from_another_machine_stands_for_the_tests_of_the_target(dumps, capsys):
    assert execute(["xray", "check", "gpu/proc_1", "xpu/proc_1"]) == 1
    with Path("xray_check/target.csv").open() as made, Path("xpu.csv").open("w") as brought:
        rows = list(csv.DictReader(made))
        table = csv.DictWriter(brought, rows[0])
        table.writeheader()
        table.writerows({**row, "max": "0.5"} for row in rows)
    capsys.readouterr()
    words = ["xray", "check", "gpu/proc_1", "xpu/proc_1", "--tested", "xpu.csv", "-o", "two"]
    assert execute(words) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAULT")
    assert "  gelu: 0 of 1 test pass on cpu: the operator itself is at fault there\n" in said
    assert "target           xpu.csv" in said
    assert not Path("two/target.csv").exists()


def test_what_cannot_be_checked_is_said(dumps, capsys, monkeypatch):
    assert execute(["xray", "check", "a.csv", "b.csv"]) == 3
    assert "whence xray summary_diff_check" in capsys.readouterr().err
    failed = subprocess.CompletedProcess((), 4, "no such device\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CaptureError, match="cannot run on cpu"):
        whence.api.check_operators("gpu/proc_1/dump", "xpu/proc_1/dump", "out", device="xpu:0")
