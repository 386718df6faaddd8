"""Tests that whence writes: they run without whence and numpy, pass on a right device, and name a
faulty operator.
"""

import ast
import csv
import os
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest

import warm
import whence
from handmade import record
from whence.errors import OutputExists, UnreadableRun, UsageError
from whence.records import Call, MemoryRun, Ref
from whence.report.own_files import is_own

torch = pytest.importorskip("torch")
from whence.frameworks import torch_schema  # noqa: E402 - imports torch

pytestmark = pytest.mark.torch

ALONE = """
import sys

sys.modules["whence"] = sys.modules["numpy"] = None  # as if they were not installed
"""
OTHER = "import torch\ntorch._C._set_mkldnn_enabled(False)\ntorch.set_num_threads(1)\n"
FAULTY = """
import os
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Faulty(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if str(func) == os.environ.get("CRASHES"):
            os._exit(9)
        if str(func) == "aten.silu_backward.default":
            return out * 1.001
        if str(func) == "aten._softmax.default":
            out = out.clone()
            out.view(-1)[3] += 1e-3
        return out

def pytest_configure(config):
    Faulty().__enter__()
"""


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        x = x + self.down(torch.nn.functional.silu(self.up(x)))
        return (x @ x.mT).softmax(-1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A training step at operator level and a forward at module level."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    with whence.capture(net, folder / "op", level="op"):
        net(torch.randint(0, 20, (3, 7))).square().sum().backward()
        optimizer.step()
    with whence.capture(net, folder / "module"):
        for _ in range(2):
            net(torch.randint(0, 20, (3, 7)))
    return folder


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    for name, text in (("alone", ALONE), ("other_device", OTHER), ("faulty_device", FAULTY)):
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def run_tests(plugins, tmp_path):
    """pytest in a process of its own, in a folder of its own, where neither whence nor numpy can be
    imported.
    """

    def run(tests, table, *words, plugin="", code=0, **environment):
        # An installed whence is a plugin of pytest.
        command = [
            warm.TORCH,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:whence",
            "-p",
            "alone",
            "--tb=short",
        ]
        command += [str(tests), *words]
        command += ["-p", plugin] if plugin else []
        env = (
            {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
            | {"PYTHONPATH": str(plugins), "OMP_NUM_THREADS": "1"}
            | environment
        )
        command += ["--detail_compare_path", table] if table else []
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-2000:]
        return tmp_path / table if table else done.stdout

    return run


def rows(path):
    with Path(path).open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_two_devices_and_a_faulty_one(runs, run_tests, tmp_path):
    written = whence.generate_tests(runs / "op", tmp_path / "tests")
    assert written.tests > 40
    one = run_tests(tmp_path / "tests", "one.csv")
    two = run_tests(tmp_path / "tests", "two.csv", plugin="other_device")
    same = whence.diff_results(one, two, tmp_path / "result.csv")
    assert (same.status, same.operators, len(same.rows)) == ("same", (), written.tests)
    bad = run_tests(tmp_path / "tests", "bad.csv", plugin="faulty_device", code=1)
    assert is_own(tmp_path / "result.csv")
    mine = foreign(tmp_path / "mine.csv", "x")
    with pytest.raises(OutputExists, match="was not written by whence"):
        whence.diff_results(one, two, mine, force=True)
    found = whence.diff_results(one, bad)
    assert found.status == "different"
    assert set(found.operators) == {"aten.silu_backward.default", "aten._softmax.default"}
    table = rows(one)
    assert set(next(iter(table.values()))) >= {
        "name",
        "op_name",
        "dtype",
        "shape",
        "min-val",
        "max-val",
        "max",
        "1e-1",
        "1e-8",
        "ulp",
        "time",
    }
    assert {r["status"] for r in table.values()} == {"pass"}
    backward = [n for n in table if "backward" in n and "aten.silu.default" in table[n]["op_name"]]
    assert backward, "the forward operator and its backward are tested together too"
    assert "aten.silu_backward.default" in table[backward[0]]["calls"]
    head = (tmp_path / "result.csv").read_text().splitlines()[0]
    assert head.startswith(
        "name,op_name,dtype,shape,min-val,max-val,is_pass,tgt_max,ref_max,tgt_1e-1,ref_1e-1,tgt_1e-2,ref_1e-2"
    )


def test_a_row_of_the_table_against_numpy(runs, run_tests, tmp_path):
    """Softmax in float64 by numpy is the reference that the row was measured against."""
    whence.generate_tests(runs / "op", tmp_path / "tests", include=["_softmax"])
    row = next(iter(rows(run_tests(tmp_path / "tests", "one.csv")).values()))
    run = whence.open_run(str(runs / "op"))
    call = next(c for c in run.calls if c.op == "aten._softmax.default")
    x = run.array(next(r.record for r in call.refs if r.slot == "input.self")).astype(np.float64)
    y = run.array(next(r.record for r in call.refs if r.slot == "output.0")).astype(np.float64)
    right = np.exp(x - x.max(-1, keepdims=True))
    right /= right.sum(-1, keepdims=True)
    assert float(row["max"]) == pytest.approx(np.abs(y - right).max(), rel=1e-6)
    assert float(row["max-val"]) == pytest.approx(right.max(), rel=1e-12)
    assert int(row["1e-8"]) == (np.abs(y - right) > 1e-8).sum()


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["random", "special"])
def test_other_elements(runs, run_tests, tmp_path, factory):
    whence.generate_tests(
        runs / "op", tmp_path / "tests", factory=factory, cpu_init=True, samples=1
    )
    one = run_tests(tmp_path / "tests", "one.csv", "--seed", "3")
    again = run_tests(tmp_path / "tests", "again.csv", "--seed", "3", plugin="other_device")
    assert whence.diff_results(one, again).status == "same"
    other = run_tests(tmp_path / "tests", "other.csv", "--seed", "4")
    assert {n: r["max"] for n, r in rows(one).items()} != {
        n: r["max"] for n, r in rows(other).items()
    }


def test_trivial_operators_are_left_out_unless_asked_for(runs, run_tests, tmp_path):
    short = whence.generate_tests(runs / "op", tmp_path / "short")
    left = {name for names in short.left_out.values() for name in names}
    assert {"aten.t.default", "aten.view.default"} <= left
    kept = whence.generate_tests(
        runs / "op",
        tmp_path / "kept",
        keep_trivial=True,
        include=["t", "view", "ones_like", "transpose", "zeros_like"],
    )
    assert kept.tests
    table = rows(run_tests(tmp_path / "kept", "kept.csv"))
    assert {r["reason"] for r in table.values()} == {"compared structurally"}


def test_leaf_modules(runs, run_tests, tmp_path):
    written = whence.generate_tests(runs / "module", tmp_path / "tests", level="module")
    assert (tmp_path / "tests" / "test_LayerNorm.py").exists()
    assert "ops.aten.native_layer_norm" in (tmp_path / "tests" / "test_LayerNorm.py").read_text()
    one = run_tests(tmp_path / "tests", "one.csv")
    assert {r["op_name"] for r in rows(one).values()} == {"embed", "norm", "up", "down"}
    assert len(rows(one)) == written.tests == 8
    with pytest.raises(UsageError, match="--level op"):
        whence.generate_tests(runs / "module", tmp_path / "none")


@pytest.mark.slow
def test_a_crash_keeps_the_rows_before_it(runs, run_tests, tmp_path):
    whence.generate_tests(runs / "op", tmp_path / "tests", samples=1)
    one = run_tests(tmp_path / "tests", "one.csv")
    crashed = run_tests(
        tmp_path / "tests",
        "crashed.csv",
        plugin="faulty_device",
        code=9,
        CRASHES="aten.native_layer_norm.default",
    )
    assert 0 < len(rows(crashed)) < len(rows(one))
    found = whence.diff_results(one, crashed)
    assert "aten.native_layer_norm.default" in found.operators
    assert any("missing in the target" in r.why for r in found.failed)


@pytest.mark.slow
def test_workers_write_one_table(runs, run_tests, tmp_path):
    pytest.importorskip("xdist")
    written = whence.generate_tests(runs / "op", tmp_path / "tests", samples=1)
    assert len(rows(run_tests(tmp_path / "tests", "one.csv", "-n", "2"))) == written.tests


@pytest.mark.slow
def test_a_custom_operator_comes_with_import(runs, run_tests, plugins, tmp_path):
    (plugins / "mine.py").write_text(
        "import torch\nlib = torch.library.Library('mine', 'DEF')\nlib.define('twice(Tensor x) "
        "-> Tensor')\n"
        "lib.impl('twice', lambda x: x * 2, 'CPU')\n"
    )
    x = np.linspace(-1, 1, 9, dtype=np.float32)
    run = one_call("mine.twice.default", {"input.x": x, "output.0": 2 * x})
    whence.generate_tests(run, tmp_path / "tests")
    (row,) = rows(run_tests(tmp_path / "tests", "one.csv", "--import", "mine")).values()
    assert (row["op_name"], row["status"]) == ("mine.twice.default", "pass")
    (row,) = rows(run_tests(tmp_path / "tests", "two.csv", code=1)).values()
    assert "--import MODULE" in row["reason"]


def one_call(op, arrays, arguments=None, scope="", source=""):
    records = [record(k, a) for k, a in enumerate(arrays.values())]
    refs = tuple(Ref(slot, k) for k, slot in enumerate(arrays))
    call = Call(
        0,
        scope,
        "Net",
        0,
        0,
        op=op,
        kind="operator",
        refs=refs,
        arguments=arguments or {},
        source=source,
        leaf=True,
    )
    return MemoryRun([call], records, dict(enumerate(arrays.values())))


def test_nothing_of_a_run_becomes_code(tmp_path):
    hostile = 'x"""\nimport os; os.system("true")\n#\u2028\\'
    x = np.ones((2, 2), np.float32)
    run = one_call(
        "aten.mm.default",
        {"input.self": x, "input.mat2": x, "output.0": x},
        scope=hostile,
        source=hostile,
    )
    whence.generate_tests(run, tmp_path / "tests")
    for file in (tmp_path / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert [n.name for n in node.names] in (["pytest"], ["torch"])
            if isinstance(node, ast.Call):
                assert isinstance(node.func, (ast.Name, ast.Attribute))
                assert getattr(node.func, "id", getattr(node.func, "attr", "")) in (
                    "check",
                    "tensor",
                    "parametrize",
                    "gradient",
                    "module",
                )
    for op in ("aten.mm.default)\nimport os", "../../x.y.z", "aten.from_file.default", "os.system"):
        bad = one_call(op, {"input.self": x}, {"filename": "/etc/passwd"} if "file" in op else {})
        with pytest.raises(UsageError, match="no test can be written"):
            whence.generate_tests(bad, tmp_path / "bad", force=True)
    with pytest.raises(UsageError, match="cannot be written down"):
        whence.generate_tests(
            one_call("aten.sum.default", {"input.self": x}, {"dtype": {"dtype": "x; y"}}),
            tmp_path / "bad",
            force=True,
        )


def test_a_range_is_written_only_where_it_is_known(tmp_path):
    x = np.full((2, 2), 3.0, np.float32)
    run = one_call("aten.mm.default", {"input.self": x, "input.mat2": x, "output.0": x})
    whence.generate_tests(run, tmp_path / "known")
    known = [r for r in run.records if r.statistics is not None]
    unknown = MemoryRun(
        run.calls, [msgspec.structs.replace(r, statistics=None) for r in run.records], {}
    )
    whence.generate_tests(unknown, tmp_path / "unknown")
    texts = [next((tmp_path / n).glob("test_mm*.py")).read_text() for n in ("known", "unknown")]
    assert len(known) == 3
    assert texts[0].count("values=(3.0, 3.0)") == 2
    assert "values=" not in texts[1]


def test_numbers_of_a_module_are_written_as_short_as_they_stay_the_same(tmp_path):
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.softplus(x * 0.1, 2.0).clamp(max=1e-5)

    model = torch.nn.Sequential(Scaled())
    with torch.no_grad(), whence.capture(model, tmp_path / "run"):
        model(torch.ones(2, 3))
    whence.generate_tests(tmp_path / "run", tmp_path / "tests", level="module")
    text = (tmp_path / "tests" / "test_Scaled.py").read_text()
    (source,) = (line for line in text.splitlines() if "ops.aten.mul" in line)
    assert source.rstrip(")").endswith(", 0.1"), source
    assert "softplus.default(v0, 2.0" in text
    assert "1e-05" in text


def test_folders_are_not_overwritten(runs, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for force in (False, True):
        with pytest.raises(OutputExists):
            whence.generate_tests(runs / "op", tmp_path / "mine", force=force)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    for force in (False, True):
        whence.generate_tests(runs / "op", tmp_path / "tests", include=["mm"], force=force)
    with pytest.raises(OutputExists, match="--force"):
        whence.generate_tests(runs / "op", tmp_path / "tests")


@pytest.mark.parametrize(
    "given", [{"factory": "lod"}, {"level": "operator"}, {"samples": 0}, {"include": ["nothing*"]}]
)
def test_misspelt_options_fail_at_once(runs, tmp_path, given):
    with pytest.raises(UsageError):
        whence.generate_tests(runs / "op", tmp_path / "tests", **given)


def test_the_data_is_a_safetensors_file(runs, tmp_path):
    """Read by the format's own library."""
    from safetensors.numpy import load_file

    whence.generate_tests(runs / "op", tmp_path / "tests", include=["_softmax"])
    run = whence.open_run(str(runs / "op"))
    call = next(c for c in run.calls if c.op == "aten._softmax.default")
    x = run.array(next(r.record for r in call.refs if r.slot == "input.self"))
    assert any(
        np.array_equal(x, stored)
        for stored in load_file(tmp_path / "tests" / "data.safetensors").values()
    )


# ---- diff

HEAD = "name,op_name,dtype,shape,min-val,max-val,max,1e-1,1e-2,1e-3,1e-4,1e-5,1e-6,1e-7,1e-8"


def foreign(path, *lines):
    """A table with the columns of the public tool only."""
    path.write_text("\n".join([HEAD, *lines]) + "\n")
    return path


RULE = [
    ("0", "0,0,0,0,0,0,0,0", "1.9e-6", "0,0,0,0,0,1,5,9", False),
    ("1.9e-6", "0,0,0,0,0,1,5,9", "0", "0,0,0,0,0,0,0,0", True),
    ("1e-4", "0,0,0,0,10,20,30,40", "1.9e-4", "0,0,0,1,20,40,60,80", True),
    ("1e-4", "0,0,0,0,10,20,30,40", "2.1e-4", "0,0,0,1,20,40,60,80", False),
    ("1e-4", "0,0,0,0,10,20,30,40", "1e-4", "0,0,0,0,22,40,60,80", False),
    ("1e-4", "0,0,0,0,10,20,30,40", "1e-4", "0,0,0,0,21,41,61,81", True),
    ("1e-6", "0,0,0,0,0,0,30,40", "9e-6", "0,0,0,0,0,1,30,40", True),
    ("1e-4", "0,0,0,0,10,20,30,40", "nan", "0,0,0,0,10,20,30,40", False),
]


@pytest.mark.parametrize(("golden", "golden_counts", "worst", "counts", "passes"), RULE)
def test_the_rule(golden, golden_counts, worst, counts, passes, tmp_path):
    """target_k <= 2 golden_k + max(1, 1e-4 numel); max_t <= max(2 max_g, tol); one-sided."""
    row = 'add_0,aten.add.Tensor,float32,"[64, 64]",-1.0,1.0'
    one, two = (
        foreign(tmp_path / "a.csv", f"{row},{golden},{golden_counts}"),
        foreign(tmp_path / "b.csv", f"{row},{worst},{counts}"),
    )
    found = whence.diff_results(one, two)
    assert found.rows[0].passed is passes, found.rows[0].why
    assert found.status == ("same" if passes else "different")


def test_missing_and_skipped_rows(tmp_path):
    row = "aten.add.Tensor,float32,[64],-1.0,1.0,0,0,0,0,0,0,0,0,0"
    one, two = (
        foreign(tmp_path / "a.csv", f"x,{row}", f"y,{row}"),
        foreign(tmp_path / "b.csv", f"y,{row}", f"z,{row}"),
    )
    found = whence.diff_results(one, two)
    assert [(r.name, r.passed) for r in found.rows] == [("x", False), ("y", True), ("z", False)]
    head = HEAD + ",status,reason"
    (tmp_path / "s.csv").write_text(f"{head}\nx,{row},skipped,no kernel\n")
    assert whence.diff_results(tmp_path / "s.csv", tmp_path / "s.csv").status == "undecided"
    assert (
        whence.diff_results(foreign(tmp_path / "x.csv", f"x,{row}"), tmp_path / "s.csv").status
        == "different"
    )
    (tmp_path / "f.csv").write_text(f"{head}\nx,{row},fail,error 9 x its floor\n")
    assert whence.diff_results(
        foreign(tmp_path / "x.csv", f"x,{row}"), tmp_path / "f.csv"
    ).operators == ("aten.add.Tensor",)
    assert whence.diff_results(
        tmp_path / "f.csv", foreign(tmp_path / "x.csv", f"x,{row}")
    ).operators == ("aten.add.Tensor",)


def test_the_command_says_which_is_which_and_quotes_formulas(tmp_path, capsys):
    from whence import cli

    row = "float32,[64],-1.0,1.0"
    one = foreign(
        tmp_path / "a.csv",
        f"=cmd(),aten.add.Tensor,{row},0,0,0,0,0,0,0,0,0",
        f"m,aten.mm.default,{row},0,0,0,0,0,0,0,0,0",
    )
    two = foreign(
        tmp_path / "b.csv",
        f"=cmd(),aten.add.Tensor,{row},0,0,0,0,0,0,0,0,0",
        f"m,aten.mm.default,{row},3,64,64,64,64,64,64,64,64",
    )
    assert cli.execute(["ops", "diff", str(one), str(one)]) == 0
    assert "SAME" in capsys.readouterr().out
    assert cli.execute(["ops", "diff", str(one), str(two), "-o", str(tmp_path / "r.csv")]) == 1
    said = capsys.readouterr().out
    assert "aten.mm.default" in said
    assert "aten.add.Tensor" not in said
    assert said.index("a.csv") < said.index("b.csv")
    assert "\n'=cmd()," in (tmp_path / "r.csv").read_text()
    assert cli.execute(["ops", "diff", str(one), str(two), "-o", str(tmp_path / "r.csv")]) == 3
    assert cli.execute(["ops", "diff", str(one), str(tmp_path / "nothing.csv")]) == 3
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UnreadableRun, match="detail_compare_path"):
        whence.diff_results(one, tmp_path / "other.csv")


def test_what_is_computed_of_numbers_alone_is_tested():
    aten = torch.ops.aten
    numbers = {"start": 0, "end": 47, "steps": 10}
    assert torch_schema.kind(aten.linspace.default, numbers) == torch_schema.PLAIN
    assert torch_schema.kind(aten.arange.default, {"end": 47}) == torch_schema.CREATION
