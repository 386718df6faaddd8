"""`whence run --compare`: two sides in one process, or in two of which one is C++ with
whence_label.h and a library's files.
"""

import csv
import json
import os
import pty
import shutil
import subprocess
from ast import literal_eval
from pathlib import Path

import numpy as np
import pytest

import warm
import whence
from whence import api

HERE = Path(__file__).parent
COLUMNS = (
    "data_id,pta_data_path,pta_dtype,pta_shape,acl_data_path,acl_dtype,acl_shape,cmp_flag,cosine_similarity,max_relative_error,"
    "mean_relative_error,relative_euclidean_distance,cmp_fail_reason"
)
ONE = """
import sys
import numpy as np
import whence

fault, code = sys.argv[1:]
rng = np.random.default_rng(0)
weights = rng.standard_normal((4, 16, 16)).astype(np.float32) / 4
for turn in range(2):
    with whence.task(f"turn {turn}"):
        x = y = rng.standard_normal((3, 16)).astype(np.float32)
        for i, w in enumerate(weights):
            x = np.tanh(x @ w)
            whence.label("layer", x, side="reference")
            y = np.tanh(np.einsum("bi,io->bo", y, w * np.float32(1.02 if fault == f"{turn}.{i}" else 1)))
            whence.label("layer", y, side="target")
sys.exit(int(code))
"""
TWO = """
import subprocess, sys
import numpy as np
import whence

side, fault = sys.argv[1:]
rng = np.random.default_rng(1)
weights = rng.standard_normal((3, 8, 8)).astype(np.float32) / 3
weights.tofile("weights")
for turn in range(2):
    whence.task(f"turn {turn}")
    x = rng.standard_normal((2, 8)).astype(np.float32)
    x.tofile("input")
    for i, w in enumerate(weights):
        x = x @ w
        whence.label(f"matmul {i}", x, side="reference")
        x = np.tanh(x)
        whence.label("tanh", x, side="reference")
    whence.label("absent", x, side="reference")
    whence.label("out", x, side="reference")
    whence.label("out", file="0_Linear/after/outTensor0.bin", side="target")
    whence.label("never", x, side="reference")
    whence.label("never", file="9_Gone/outTensor0.bin", side="target")
    import pathlib
    folder = pathlib.Path("dump", f"turn {turn}", "0_Linear", "after")
    folder.mkdir(parents=True)
    wrong = fault if turn == 1 else "-1"
    subprocess.run([side, "weights", "input", "8", "3", wrong, str(folder / "outTensor0.bin")], check=True)
"""


def run(folder, *words, stdin=subprocess.DEVNULL):
    line = [warm.TORCH, "-m", "whence", "run", *words]
    return subprocess.run(
        line, cwd=folder, capture_output=True, text=True, stdin=stdin, timeout=300, check=False
    )


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def side(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    built = tmp_path_factory.mktemp("side") / "label_side"
    flags = [
        "-std=c++11",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Wshadow",
        "-Werror",
        "-O1",
        "-I",
        api.include(),
    ]
    subprocess.run(["g++", *flags, str(HERE / "label_side.cpp"), "-o", str(built)], check=True)
    return built


@pytest.mark.parametrize(
    ("fault", "code", "status"),
    [
        ("", 0, "same"),
        ("", 130, "undecided"),  # stopped: what it did not reach was not compared
        ("1.2", 0, "different"),
        ("1.2", 9, "different"),
    ],
)
def test_two_sides_in_one_process(tmp_path, fault, code, status):
    (tmp_path / "one.py").write_text(ONE)
    done = run(
        tmp_path,
        "--compare",
        "-o",
        "cmp",
        "--",
        warm.TORCH,
        "one.py",
        fault or "none",
        str(code),
    )
    assert done.returncode == (code or {"same": 0, "different": 1}[status]), (
        done.stdout + done.stderr
    )
    summary = json.loads((tmp_path / "cmp" / "summary.json").read_text())
    assert summary["status"] == status
    if fault:
        found = summary["findings"][0]
        assert (found["name"], found["step"], found.get("occurrence"), found["root"]) == (
            "layer",
            1,
            2,
            "turn 1",
        )
        assert len(summary["findings"]) == 1
        assert "turn 1" in done.stdout
    assert (tmp_path / "cmp" / "cmp_report.csv").read_text().splitlines()[0] == COLUMNS
    rows = table(tmp_path / "cmp" / "cmp_report.csv")
    assert [row["data_id"] for row in rows] == [
        f"turn {t}/layer#{i}" for t in range(2) for i in range(4)
    ]
    assert {row["cmp_flag"] for row in rows} == {"True"}
    assert "cmp_report.csv" in done.stdout


def test_the_figures_are_those_of_the_tensors(tmp_path):
    (tmp_path / "one.py").write_text(ONE)
    run(tmp_path, "--compare", "-o", "cmp", "--", warm.TORCH, "one.py", "0.1", "0")
    opened = whence.open_run(str(tmp_path / "cmp" / "run"))
    sides = {"reference": [], "target": []}
    for call in opened.calls:
        sides[call.root].append(opened.array(call.refs[0].record))
    rows = table(tmp_path / "cmp" / "cmp_report.csv")
    assert len(rows) == len(sides["reference"]) == len(sides["target"]) == 8
    for row, g, m in zip(rows, sides["reference"], sides["target"]):
        wide, other = g.astype(np.float64).ravel(), m.astype(np.float64).ravel()
        there = np.abs(g.ravel()) > np.finfo(np.float32).eps
        relative = np.where(there, np.abs(m.ravel() / g.ravel() - 1), 0)
        assert float(row["cosine_similarity"]) == pytest.approx(
            wide @ other / np.linalg.norm(wide) / np.linalg.norm(other), abs=1e-9
        )
        assert float(row["max_relative_error"]) == pytest.approx(relative.max(), rel=1e-5, abs=2e-7)
        assert float(row["mean_relative_error"]) == pytest.approx(
            relative.mean(), rel=1e-5, abs=2e-7
        )
        distance = np.linalg.norm(other - wide) / np.linalg.norm(wide)
        assert float(row["relative_euclidean_distance"]) == pytest.approx(
            distance, rel=1e-5, abs=1e-9
        )
        assert (row["pta_dtype"], row["acl_shape"]) == ("torch.float32", "[3, 16]")
        assert Path(tmp_path, row["pta_data_path"].rpartition("#")[0]).is_file()


@pytest.mark.parametrize(("code", "expected"), [(0, 3), (7, 7)])
def test_a_program_without_labels_is_an_error(tmp_path, code, expected):
    done = run(
        tmp_path, "--compare", "-o", "cmp", "--", warm.TORCH, "-c", f"raise SystemExit({code})"
    )
    assert done.returncode == expected
    assert "no label was recorded" in done.stderr
    assert not (tmp_path / "cmp" / "summary.json").exists()


def test_the_program_keeps_its_terminal(tmp_path):
    """A prompt inside the program works: its stdin and stdout are ours."""
    script = (
        'import sys, whence; print("tty", sys.stdin.isatty()); x = [float(input("user: "))]\n'
        + "".join(f'whence.label("x", x, side="{side}")\n' for side in ("reference", "target"))
    )
    (tmp_path / "ask.py").write_text(script)
    here, there = pty.openpty()
    os.write(here, b"2.5\n")
    done = run(tmp_path, "--compare", "-o", "cmp", "--", warm.TORCH, "ask.py", stdin=there)
    os.close(here)
    os.close(there)
    assert (done.returncode, "tty True" in done.stdout) == (0, True), done.stderr
    assert table(tmp_path / "cmp" / "cmp_report.csv")[0]["relative_euclidean_distance"] == "0.0"


@pytest.mark.parametrize("fault", ["-1", "1"])
def test_a_side_in_cpp_and_files_of_a_library(tmp_path, side, fault):
    (tmp_path / "two.py").write_text(TWO)
    (tmp_path / "library.yaml").write_text(
        'variables: {LIBRARY_SAVE: "{max}:{runner}"}\nplaces: ["{task}/{file}"]\n'
    )
    words = [
        "--library",
        "library.yaml",
        "--library-dump",
        "dump",
        "--",
        warm.TORCH,
        "two.py",
        str(side),
        fault,
    ]
    done = run(tmp_path, "--compare", "-o", "cmp", *words)
    rows = {row["data_id"]: row for row in table(tmp_path / "cmp" / "cmp_report.csv")}
    summary = json.loads((tmp_path / "cmp" / "summary.json").read_text())
    names = [
        "matmul 0#0",
        "tanh#0",
        "matmul 1#0",
        "tanh#1",
        "matmul 2#0",
        "tanh#2",
        "absent#0",
        "out#0",
        "never#0",
    ]
    assert set(rows) == {f"turn {t}/{name}" for t in range(2) for name in names}
    for t in range(2):
        assert rows[f"turn {t}/absent#0"]["cmp_fail_reason"] == "target: the pointer is null"
        assert (
            "9_Gone/outTensor0.bin never appeared" in rows[f"turn {t}/never#0"]["cmp_fail_reason"]
        )
        assert rows[f"turn {t}/never#0"]["cmp_flag"] == "False"
        assert rows[f"turn {t}/out#0"]["acl_data_path"].endswith(
            f"dump/turn {t}/0_Linear/after/outTensor0.bin"
        )
        assert float(rows[f"turn {t}/matmul 0#0"]["relative_euclidean_distance"]) < 1e-6
    wrong = float(rows["turn 1/matmul 1#0"]["relative_euclidean_distance"])
    if fault == "-1":
        assert wrong < 1e-6
        # Nothing differs, but two labels of each turn could not be compared.
        assert (done.returncode, summary["status"]) == (2, "undecided")
    else:
        assert wrong > 1e-2
        assert float(rows["turn 0/matmul 1#0"]["relative_euclidean_distance"]) < 1e-6
        assert done.returncode == 1
        assert [(f["name"], f["root"]) for f in summary["findings"]] == [("matmul 1", "turn 1")]
        assert "never appeared" in done.stdout


def test_the_variables_of_a_library(tmp_path):
    script = """
import os, whence
with whence.task("a"): pass
with whence.task("b"):
    whence.label("x", [1.0], side="reference"); whence.label("x", [1.0], side="target")
    print({k: v for k, v in os.environ.items() if "SAVE_TENSOR" in k or k == "AIT_CMP_TASK_ID" or k.startswith("ATB_OUTPUT")}, os.getpid())
"""
    words = [
        "--library-max",
        "3",
        "--library-runner",
        "Linear,Norm",
        "--",
        warm.TORCH,
        "-c",
        script,
    ]
    done = run(tmp_path, "--compare", "-o", "a", "--library", "acltransformer", *words)
    said, pid = done.stdout.splitlines()[0].rsplit(" ", 1)
    assert literal_eval(said) == {
        "ACLTRANSFORMER_SAVE_TENSOR": "1",
        "ACLTRANSFORMER_SAVE_TENSOR_MAX": "3",
        "ACLTRANSFORMER_SAVE_TENSOR_RUNNER": "Linear,Norm",
        "AIT_CMP_TASK_ID": f"{pid}_1",
    }
    done = run(
        tmp_path,
        "--compare",
        "-o",
        "b",
        "--library",
        "acltransformer",
        "--",
        warm.TORCH,
        "-c",
        script,
    )
    assert (
        literal_eval(done.stdout.splitlines()[0].rsplit(" ", 1)[0])[
            "ACLTRANSFORMER_SAVE_TENSOR_RUNNER"
        ]
        == ""
    )
    done = run(
        tmp_path, "--compare", "-o", "c", "--library", "atb", "--library-dump", "there", *words
    )
    said = literal_eval(done.stdout.splitlines()[0].rsplit(" ", 1)[0])
    assert (said["ATB_SAVE_TENSOR"], said["ATB_SAVE_TENSOR_RANGE"], said["ATB_OUTPUT_DIR"]) == (
        "1",
        "0,3",
        f"{tmp_path / 'there'}/",
    )


def test_variables_that_the_user_exported_are_kept(tmp_path):
    from whence.instrument.labels import library

    mine = {
        "ACLTRANSFORMER_SAVE_TENSOR_MAX": "2",
        "ACLTRANSFORMER_SAVE_TENSOR_RUNNER": "Linear",
        "ATB_OUTPUT_DIR": "/data/mine/",
    }
    assert library.load("acltransformer", environment=mine).variables == {
        "ACLTRANSFORMER_SAVE_TENSOR": "1",
        "ACLTRANSFORMER_SAVE_TENSOR_MAX": "2",
        "ACLTRANSFORMER_SAVE_TENSOR_RUNNER": "Linear",
    }
    asked = library.load("acltransformer", runner="Norm", max_tokens=5, environment=mine).variables
    assert (
        asked["ACLTRANSFORMER_SAVE_TENSOR_MAX"],
        asked["ACLTRANSFORMER_SAVE_TENSOR_RUNNER"],
    ) == ("5", "Norm")
    atb = library.load("atb", environment=mine, start=tmp_path)
    assert (atb.dump, atb.variables["ATB_OUTPUT_DIR"]) == (
        "/data/mine",
        "/data/mine/",
    )  # files are looked for where the library puts them
    assert library.load("atb", dump="there", environment=mine, start=tmp_path).dump == str(
        tmp_path / "there"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--library", "abt"], "did you mean atb"),
        (["--library-max", "3"], "need --library"),
        (["--library", "atb", "--library-max", "0"], "1 or more"),
        (["--library", "odd.yaml"], "known keys"),
    ],
)
def test_a_library_that_cannot_be_meant(tmp_path, words, said):
    (tmp_path / "odd.yaml").write_text("variable: {}\n")
    done = run(
        tmp_path,
        "--compare",
        "-o",
        "cmp",
        *words,
        "--",
        warm.TORCH,
        "-c",
        "raise SystemExit(5)",
    )
    assert (done.returncode, said in done.stderr) == (3, True), done.stderr
    assert not (tmp_path / "cmp").exists()


def test_labels_recorded_first_are_compared_later_from_two_runs(tmp_path, side):
    """Each side in a run of its own, one of them a program without Python; then `whence labels REF
    TGT`, and `whence compare`.
    """
    rng = np.random.default_rng(1)
    w, x = (
        rng.standard_normal((3, 8, 8)).astype(np.float32) / 3,
        rng.standard_normal((2, 8)).astype(np.float32),
    )
    w.tofile(tmp_path / "weights")
    x.tofile(tmp_path / "input")
    script = """
import numpy as np, whence
w, x = np.fromfile("weights", np.float32).reshape(3, 8, 8), np.fromfile("input", np.float32).reshape(2, 8)
for i in range(3):
    x = x @ w[i]; whence.label(f"matmul {i}", x); x = np.tanh(x); whence.label("tanh", x)
"""
    assert run(tmp_path, "-o", "ref", "--", warm.TORCH, "-c", script).returncode == 0
    for name, fault in (("good", "-1"), ("bad", "2")):
        done = run(
            tmp_path,
            "-o",
            name,
            "--",
            str(side),
            "weights",
            "input",
            "8",
            "3",
            fault,
            f"{name}.bin",
        )
        assert done.returncode == 0, done.stderr
        answers = []
        for words in (["labels"], ["compare", "--strict"]):
            line = [
                warm.TORCH,
                "-m",
                "whence",
                *words,
                "ref",
                name,
                "-o",
                f"cmp-{name}-{words[0]}",
            ]
            answers.append(
                subprocess.run(
                    line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
                )
            )
        assert answers[0].returncode == (2 if name == "good" else 1), answers[0].stdout
        assert ("matmul 2" in answers[0].stdout) == (name == "bad")
        assert "absent" in answers[0].stdout  # only the target has it
        assert answers[1].returncode in ((0, 2) if name == "good" else (1,)), answers[1].stdout
    line = [warm.TORCH, "-m", "whence", "labels", "ref", "-o", "alone"]
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, "names no side" in done.stdout) == (2, True)
