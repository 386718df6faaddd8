"""`whence.testing` and the pytest plugin, as a user's tests meet them."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

import warm
import whence
from whence.testing import ParityError, assert_parity

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
torch.set_num_threads(1)

NET = """
import torch
from whence.testing import assert_parity

def net(eps=1e-5):
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16, eps=eps)).eval()

x = torch.linspace(-1, 1, 48).reshape(3, 16)
"""
PLUGIN = "whence.testing.plugin"


def pytest_run(folder, *words):
    """pytest in a process of its own; the plugin is loaded by name where whence was not installed
    with its entry point.
    """
    known = any(
        point.value == PLUGIN for point in importlib.metadata.entry_points(group="pytest11")
    )
    command = [
        warm.TORCH,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *([] if known else ["-p", PLUGIN]),
        *words,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )


def net(eps=1e-5):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32, eps=eps)
    ).eval()


X = torch.linspace(-1, 1, 48).reshape(3, 16)


def test_a_failure_says_which_operator_why_by_how_much_and_where_to_look(tmp_path):
    with pytest.raises(ParityError) as caught:
        assert_parity(net(), net(eps=0.1), X, tmp_path / "kept")
    lines = str(caught.value).splitlines()
    assert (
        lines[0]
        == "models differ: 2 (LayerNorm), step 0, rank 0: semantic: the code computes something "
        "else (certain)"
    )
    assert lines[1].startswith("FAULT              2   LayerNorm   output.0")
    assert "eps is 1e-05 in the reference, 0.1 in the target" in " ".join(" ".join(lines).split())
    assert max(len(line) for line in lines[1:-3]) <= 120
    assert [line.split()[-3:] for line in lines[-2:]] == [
        [str(tmp_path / "kept" / "cmp"), "-o", "report.html"],
        ["show", str(tmp_path / "kept" / "target"), "2"],
    ]
    assert (
        whence.load_comparison(tmp_path / "kept" / "cmp").findings
        == caught.value.comparison.findings
    )


def test_a_temporary_folder_stays_when_it_is_needed_only(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert assert_parity(net(), net(), X).status == "same"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ParityError):
        assert_parity(net(), net(eps=0.1), X)
    assert [p.name[:14] for p in tmp_path.iterdir()] == ["whence-parity-"]


def test_what_cannot_be_told_is_no_parity(tmp_path):
    with pytest.raises(
        ParityError, match=r"cannot be told: no call could be paired \(4 against 1\)"
    ):
        assert_parity(net(), torch.nn.Linear(16, 4), X, tmp_path, match="exact")


def test_a_run_kept_from_before_is_a_reference(tmp_path):
    golden = net()
    with whence.capture(golden, tmp_path / "golden"), torch.no_grad():
        golden(X)
    assert assert_parity(tmp_path / "golden", net(), X).status == "same"
    with pytest.raises(ParityError):
        assert_parity(tmp_path / "golden", net(eps=0.1), X)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_the_fixture(tmp_path, words):
    (tmp_path / "test_ports.py").write_text(
        NET
        + textwrap.dedent("""
        def test_same(whence_compare):
            assert whence_compare(net(), net(), x).status == "same"

        def test_other(whence_compare, tmp_path):
            whence_compare(net(), net(), x)
            whence_compare(net(), net(0.1), x)

        def test_bf16(whence_compare):
            whence_compare(net(), net().bfloat16(), x)
        """)
    )
    done = pytest_run(tmp_path, *words, "--basetemp", str(tmp_path / "kept"), "test_ports.py")
    assert done.returncode == 1, done.stdout
    assert "1 failed, 2 passed" in done.stdout
    assert "E       FAULT              3   LayerNorm   output.0   step 0, rank 0" in done.stdout
    assert "plugin.py" not in done.stdout, "frames of whence are not shown"
    kept = sorted(p.name for p in (tmp_path / "kept").glob("**/test_other0/*"))
    assert kept == ["whence", "whence-2"]


def test_tests_that_were_generated_keep_their_own_options(tmp_path):
    model = net()
    with whence.capture(model, tmp_path / "run", level="op"), torch.no_grad():
        model(X)
    whence.generate_tests(tmp_path / "run", tmp_path / "tests")
    done = pytest_run(
        tmp_path, "tests", "--seed", "42", "--device", "cpu", "--detail_compare_path", "x.csv"
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "x.csv").exists()


CHECKS = """
import numpy as np, pytest, torch
from numpy.testing import assert_allclose
from torch.testing import assert_close

@pytest.fixture
def linear():
    torch.manual_seed(1)
    return torch.nn.Linear(64, 64)

def test_other_order(linear):
    x = torch.randn(5, 64)
    with torch.no_grad():
        assert_close((x[:, :31] @ linear.weight.T[:31] + x[:, 31:] @ linear.weight.T[31:]), x @ linear.weight.T, rtol=0, atol=0)

def test_other_formula(linear):
    gelu, x = torch.nn.functional.gelu, torch.randn(5, 64)
    with torch.no_grad():
        assert_close(gelu(linear(x)), gelu(linear(x), approximate="tanh"), rtol=0, atol=1e-5)

def test_unseeded():
    assert_allclose(np.random.default_rng().normal(size=3), np.zeros(3))

def test_golden(golden):
    torch.manual_seed(0)
    golden("sums.json", program=lambda: {"sums": (torch.randn(64, 64) @ torch.ones(64)).tolist()})
"""


@pytest.mark.slow
def test_comparisons_that_fail_are_explained(tmp_path):
    torch.manual_seed(0)
    sums = (torch.randn(64, 64) @ torch.ones(64)) * (1 + 1e-7)
    (tmp_path / "sums.json").write_text(json.dumps({"sums": sums.tolist()}))
    (tmp_path / "test_checks.py").write_text(CHECKS)
    done = pytest_run(tmp_path, "--whence-accept", "--tb=line", "test_checks.py")
    assert "3 failed, 1 passed" in done.stdout, done.stdout
    heads = re.findall(r"whence accept call -+\n(\w+)", done.stdout)
    assert heads == ["NOISE", "REFUSED", "CANNOT"]
    assert "whence accept" not in pytest_run(tmp_path, "--tb=line", "test_checks.py").stdout


def test_the_plugin_loads_nothing_heavy():
    code = (
        f"import sys, {PLUGIN}; print([m for m in ('torch', 'numpy', 'whence.api', "
        "'whence.report') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
