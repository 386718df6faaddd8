"""`whence convert` and the commands of torch_xray and msprobe from the command line."""

import csv
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import warm
import whence
from handmade import net
from whence.cli import execute

DATA = Path(__file__).parent.parent / "data" / "torch_xray"
GPU, XPU = (str(DATA / f"{name}_globalrank-0_localrank-0.h5") for name in ("gpu", "xpu"))


def rows(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_convert_says_what_it_wrote_and_refuses_what_is_there(tmp_path, capsys):
    out = str(tmp_path / "npy")
    assert execute(["convert", GPU, out, "--to", "npy"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}: 31 tensors, 23 kB, in 32 files of npy\n"
    assert 22_950 <= sum(np.load(file).nbytes for file in Path(out).rglob("*.npy")) < 23_050
    assert said.err == ""
    assert execute(["convert", XPU, out, "--to", "npy"]) == 3
    assert "exists; --force replaces it" in capsys.readouterr().err
    assert execute(["convert", XPU, out, "--to", "npy", "--force"]) == 0
    assert execute(["compare", XPU, out, "-o", str(tmp_path / "cmp")]) == 0
    assert execute(["convert", GPU, str(tmp_path / "x"), "--to", "zip"]) == 3
    assert "no writer for 'zip'" in capsys.readouterr().err


def test_what_is_left_out_is_counted_and_named(tmp_path, capsys):
    whole = net()
    whence.convert(whole, tmp_path / "one", to="msprobe")
    (tmp_path / "one/step0/rank0/dump_tensor_data/Module.fc1.Linear.forward.0.output.0.pt").unlink()
    assert (
        execute(["convert", str(tmp_path / "one"), str(tmp_path / "two"), "--to", "torch_xray"])
        == 0
    )
    text = capsys.readouterr().out
    assert "8 tensors" in text
    assert "left out: 1: elements are missing" in text and "fc1.Linear.0.forward_output.0" in text


def test_ctrl_c_leaves_nothing_that_looks_whole(tmp_path):
    code = (
        "import sys, time, whence.records as r, whence.cli\n"
        "from whence.readers.assembly.builder import _Built\n"
        "def slow(self, record, array=_Built.array):\n"
        "    print('writing', file=sys.stderr, flush=True); time.sleep(0.2); return array(self, "
        "record)\n"
        "_Built.array = slow\n"
        f"whence.cli.main(['convert', {GPU!r}, {str(tmp_path / 'out')!r}, '--to', 'msprobe'])\n"
    )
    process = subprocess.Popen([warm.TORCH, "-c", code], stderr=subprocess.PIPE, env={**os.environ})
    assert process.stderr is not None
    for _ in range(3):
        process.stderr.readline()
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 130
    assert list(tmp_path.iterdir()) == []


def test_xray_summary_has_the_names_of_the_file_whole(tmp_path, capsys):
    h5py = pytest.importorskip("h5py")
    text, table = tmp_path / "out.txt", tmp_path / "out.csv"
    assert execute(["xray", "summary", GPU, str(text)]) == 0
    assert capsys.readouterr().err == f"whence: the same as  whence show {GPU}\n"
    assert execute(["xray", "summary", GPU, str(table)]) == 0
    with h5py.File(GPU) as file:
        stored = {name: dataset[()].astype(np.float64) for name, dataset in file["1"].items()}
    found = rows(table)
    assert [row["Module"] for row in found] == list(stored)
    assert list(found[0]) == ["Index", "Step", "Rank", "Module", "Min", "Max", "Mean", "Std"]
    assert {(row["Step"], row["Rank"]) for row in found} == {("1", "0")}
    for row in found:
        array = stored[row["Module"]]
        figures = [float(row[name]) for name in ("Min", "Max", "Mean", "Std")]
        np.testing.assert_allclose(
            figures, [array.min(), array.max(), array.mean(), array.std()], rtol=1e-9, atol=1e-12
        )
    rule, head, again, *lines, last = text.read_text().splitlines()
    assert rule == again == last and set(rule) == {"+", "-"}
    assert head.replace("|", " ").split() == [
        "Index",
        "Step",
        "Rank",
        "Module",
        "Min",
        "Max",
        "Mean",
        "Std",
    ]
    assert [line.split()[7] for line in lines] == list(stored)
    assert {len(line) for line in lines} == {len(rule)}
    assert execute(["xray", "summary", GPU, str(text)]) == 3


def test_xray_compare_writes_the_tools_table_and_says_which_is_which(tmp_path, capsys):
    out = str(tmp_path / "result.csv")
    assert execute(["xray", "compare", XPU, GPU, out, "--golden", GPU]) == 1
    said = capsys.readouterr()
    assert (
        f"whence compare {GPU} {XPU} --view torch_xray -o CMP   (Bench, the reference: {GPU}; "
        f"Target: {XPU})" in said.err
    )
    assert said.out.startswith("FAULT              blocks.1.act_fn") and said.out.endswith(
        f"written to {out}\n"
    )
    found = rows(out)
    assert list(found[0])[:8] == [
        "Index",
        "Status",
        "Module (Bench/Target)",
        "Cosine",
        "RMSE",
        "IsClose (%)",
        "Max Err (t)",
        "GtNum",
    ]
    assert "blocks.1.act_fn.GELU.1.forward_output.0" in [
        row["Module (Bench/Target)"] for row in found
    ]
    failing = [row for row in found if row["Status"] == "Fail"]
    capsys.readouterr()
    judged = str(tmp_path / "judged.csv")
    words = ["xray", "compare", XPU, GPU, judged, "--golden", GPU, "--status", "verdict"]
    assert execute(words) == 1
    at_fault = [row for row in rows(judged) if row["Status"] == "Fail"]
    assert {row["whence_status"] for row in at_fault} == {"Fail"}
    assert 0 < len(at_fault) < len(failing)
    assert execute(["xray", "compare", GPU, GPU, out]) == 3
    assert execute(["xray", "compare", GPU, GPU, out, "--force", "--match", "exact"]) == 0
    assert execute(["xray", "compare", GPU, XPU, out, "--golden", "other.h5"]) == 3


def test_msprobe_compare_writes_one_table_a_rank(tmp_path, capsys):
    target = net(change=lambda name, value: value * 1.01 if name == "h" else value)
    for name, run in (("gold", net()), ("mine", target)):
        whence.convert(run, tmp_path / name, to="msprobe")
    assert (
        execute(
            [
                "msprobe",
                "compare",
                "-tp",
                str(tmp_path / "mine"),
                "-gp",
                str(tmp_path / "gold"),
                "-o",
                str(tmp_path / "out"),
            ]
        )
        == 1
    )
    said = capsys.readouterr()
    assert (
        said.err
        == f"whence: the same as  whence compare {tmp_path / 'gold'} {tmp_path / 'mine'} --view "
        "msprobe -o CMP\n"
    )
    assert said.out.startswith("FAULT              fc1")
    (table,) = (tmp_path / "out").iterdir()
    assert table.name.startswith("compare_result_rank0_") and len(table.stem) == len(
        "compare_result_rank0_20260101000000"
    )
    found = rows(table)
    assert list(found[0])[:4] == ["NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype"]
    changed = next(
        row for row in found if row["Bench Name"] == "Module.fc1.Linear.forward.0.output.0"
    )
    assert float(changed["MaxRelativeErr"]) == pytest.approx(0.01, rel=1e-3)
    one = [str(tmp_path / name / "step0" / "rank0" / "dump.json") for name in ("gold", "gold")]
    assert (
        execute(["msprobe", "compare", "-tp", one[0], "-gp", one[1], "-o", str(tmp_path / "alone")])
        == 0
    )
    (table,) = (tmp_path / "alone").iterdir()
    assert not table.name.startswith("compare_result_rank")


@pytest.mark.torch
@pytest.mark.slow
def test_xray_jprof_and_summary_diff_check_from_a_dump_to_its_report(tmp_path, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    folder = tmp_path / "xray_debug" / "proc_1"
    folder.mkdir(parents=True)
    whence.begin_dump(folder / "dump")
    torch.nn.GELU()(torch.nn.Linear(8, 8)(torch.ones(2, 8)))
    whence.end_dump()
    assert execute(["xray", "jprof", str(folder / "dump.json")]) == 3
    assert "dump.json does not exist" in capsys.readouterr().err
    (folder / "dump.json").write_text("{}")
    monkeypatch.chdir(folder)
    assert (
        execute(["xray", "jprof", "--cpu_init", "--blacklist", "--factory=load", "dump.json"]) == 0
    )
    said = capsys.readouterr()
    assert "whence ops generate dump -o pytests --factory load" in said.err
    assert "left out: view operator" in said.out
    for name in ("xpu", "gpu"):
        line = [
            warm.TORCH,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--detail_compare_path={name}.csv",
            "--seed",
            "42",
        ]
        done = subprocess.run(
            [*line, str(folder / "pytests")],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout
    monkeypatch.chdir(tmp_path)
    assert execute(["xray", "summary_diff_check", "xpu.csv", "gpu.csv", "result.csv"]) == 0
    assert (
        "whence ops diff gpu.csv xpu.csv -o result.csv   (the reference: gpu.csv)"
        in capsys.readouterr().err
    )
    found = rows("result.csv")
    assert list(found[0])[:11] == [
        "name",
        "op_name",
        "dtype",
        "shape",
        "min-val",
        "max-val",
        "is_pass",
        "xpu_max",
        "gpu_max",
        "xpu_1e-1",
        "gpu_1e-1",
    ]
    assert {row["is_pass"] for row in found} == {"pass"}
    assert {(row["dtype"], row["name"].partition("-")[2]) for row in found} == {
        ("torch.float", "aten")
    }
    Path("bad.csv").write_text(Path("xpu.csv").read_text().replace(",pass,", ",fail,"))
    assert execute(["xray", "summary_diff_check", "bad.csv", "gpu.csv", "bad_result.csv"]) == 1
