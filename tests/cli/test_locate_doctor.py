"""`whence locate` and `whence doctor` from outside: exit codes, JSON, errors, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import warm
from inside import or_outside as whence

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

SCRIPT = """
    import sys, time, torch
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n = torch.nn
    model = n.Sequential(n.Linear(16, 32), n.Tanh(), n.LayerNorm(32), n.Linear(32, 8)).eval()
    if "bad" in sys.argv:
        model[2].eps = 1e-2
    with torch.no_grad():
        print("the program's own words", model(torch.randn(6, 16)).sum().item())
    if "slow" in sys.argv:
        open("started", "a").write("x")
        time.sleep(60)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "infer.py").write_text(textwrap.dedent(SCRIPT))
    done = whence(folder, "run", "-o", "ref", "--", warm.TORCH, "infer.py")
    assert done.returncode == 0, done.stderr
    return folder


def test_locate(place):
    done = whence(place, "locate", "ref", "--keep", "kept", "--", warm.TORCH, "infer.py", "bad")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("OUTPUT ERROR       rel_l2 ")
    assert lines[1].split() == ["1", "2"]
    assert "before, 0 after: explains 100% of the squared error" in done.stdout
    assert lines[-1] == "kept in kept"
    assert "own words" not in done.stdout
    again = whence(
        place, "locate", "ref", "kept/target", "--patch", "2:output.0", "--format", "json"
    )
    assert again.returncode == 1, again.stderr
    found = json.loads(again.stdout)
    assert [(r["name"], r["calls"], round(r["share"], 6)) for r in found["rounds"]] == [
        ("2:output.0", 1, 1.0)
    ]
    assert found["runs"] == 1


def test_locate_between_equal_runs(place):
    done = whence(place, "locate", "ref", "--search", "--", warm.TORCH, "infer.py")
    assert (done.returncode, "there is no error to explain" in done.stdout) == (0, True)


def test_run_with_a_patch(place):
    done = whence(
        place,
        "run",
        "-o",
        "patched",
        "--patch",
        "2",
        "--patch-from",
        "ref",
        "--",
        warm.TORCH,
        "infer.py",
        "bad",
    )
    assert done.returncode == 0, done.stderr
    compared = whence(place, "compare", "ref", "patched", "--format", "json", "-o", "cmp")
    assert compared.returncode == 0
    assert any("patched with outputs of" in n for n in json.loads(compared.stdout)["notes"])
    wrong = whence(
        place,
        "run",
        "-o",
        "new",
        "--patch",
        "9",
        "--patch-from",
        "ref",
        "--",
        warm.TORCH,
        "infer.py",
    )
    assert (wrong.returncode, wrong.stdout) == (3, "")
    assert "no output of a call 9" in wrong.stderr
    assert not (place / "new").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("locate", "ref"), "which program is the target?"),
        (("locate", "ref", "--"), "no command after --"),
        (("locate", "nowhere", "--", sys.executable, "infer.py"), "no run at nowhere"),
        (("locate", "ref", "--", "no-such-program"), "cannot run no-such-program"),
        (("doctor",), "no command given"),
        (("doctor", "--", sys.executable, "missing.py"), "ended with exit code 2"),
        (("doctor", "--faults", "x", "--", sys.executable, "infer.py"), "not a valid integer"),
        (("_progress",), "no command '_progress'"),
    ],
)
def test_usage_errors(place, words, said):
    done = whence(place, *words)
    assert (done.returncode, done.stdout) == (3, "")
    assert said in done.stderr


@pytest.mark.slow
def test_doctor(place):
    done = whence(
        place,
        "doctor",
        "--faults",
        "2",
        "--seed",
        "0",
        "--keep",
        "healthy",
        "--",
        warm.TORCH,
        "infer.py",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "HEALTHY            0 of 2 clean runs flagged; 2 of 2 clear faults named first"
    )
    assert "own words" not in done.stdout
    unseeded = "import torch; m = torch.nn.Linear(8, 8); m(torch.ones(1, 8))"
    done = whence(
        place, "doctor", "--faults", "0", "--format", "json", "--", warm.TORCH, "-c", unseeded
    )
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["clean"][0]["status"] == "different"
    done = whence(place, "doctor", "--faults", "0", "--seed", "0", "--", warm.TORCH, "-c", unseeded)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("command", ["doctor", "locate"])
def test_an_interrupt_leaves_nothing_half(place, tmp_path, command):
    words = ["ref"] if command == "locate" else []
    line = [
        warm.TORCH,
        "-m",
        "whence",
        command,
        *words,
        "--keep",
        "stopped-" + command,
        "--",
        warm.TORCH,
        "infer.py",
        "slow",
    ]
    (place / "started").unlink(missing_ok=True)
    process = subprocess.Popen(
        line,
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while not (place / "started").exists():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in err
    assert list((place / ("stopped-" + command)).iterdir()) == []
