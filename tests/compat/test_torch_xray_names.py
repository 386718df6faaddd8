"""torch_xray: module dumps and operator dumps of scripts as its guide has them, up to their
reports.
"""

import csv
import json
import subprocess

import numpy as np
import pytest
from scripts import VISION, python, whence

import warm
from whence import compare, load_comparison, open_run

torch = pytest.importorskip("torch")
h5py = pytest.importorskip("h5py")
pytestmark = pytest.mark.torch

MODULES = (
    VISION
    + """
from whence.compat.torch_xray import PrecisionDebugger

debugger = PrecisionDebugger(dump_path=sys.argv[1], hook_name="dump", rank=[0], step=[1, 3], model=model)
seen = []
model.blocks[0][1].register_forward_hook(lambda m, i, o: seen.append(o.clone()))
generator = torch.Generator().manual_seed(1)
with torch.no_grad():
    for step in range(4):
        debugger.start()
        debugger.start()
        out = model(torch.randn(1, 3, 8, 8, generator=generator))
torch.save((seen, out, torch.get_rng_state()), sys.argv[1] + ".pt")
"""
)
KEY = "blocks.0.1.Linear.0.forward_output.0"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xray")
    said = python(folder, MODULES, "gpu").stderr
    python(folder, MODULES, "xpu", "bug")
    plain = "".join(line + "\n" for line in MODULES.splitlines() if "ebugger" not in line)
    python(folder, plain, "plain")
    return folder, said


def test_a_vision_tower_with_start_in_every_step(dumps):
    folder, said = dumps
    assert said.count("torch_xray.PrecisionDebugger is  whence run -o RUN -- CMD") == 1
    seen, _, _ = torch.load(folder / "gpu.pt")
    with h5py.File(folder / "gpu" / "globalrank-0_localrank-0.h5") as file:
        assert sorted(file) == ["1", "3"]
        for group, step in (("1", 0), ("3", 2)):
            np.testing.assert_array_equal(file[group][KEY][()], seen[step].numpy())
        names = list(file["1"])
    # Leaf modules in the order in which they ran, parameters first; n counts the calls of a class.
    assert [n for n in names if n.endswith("forward_output.0")] == [
        "patch.Conv2d.0.forward_output.0",
        *(
            f"blocks.{b}.{i}.{c}.{n}.forward_output.0"
            for b in (0, 1)
            for i, c, n in (
                (0, "LayerNorm", b),
                (1, "Linear", 2 * b),
                (2, "GELU", b),
                (3, "Linear", 2 * b + 1),
            )
        ),
    ]
    rows = list(
        csv.reader(
            (folder / "gpu" / "globalrank-0_localrank-0_summary.csv").read_text().splitlines()
        )
    )
    assert rows[0] == ["Step", "Rank", "Module", "Min", "Max", "Mean", "Std"]
    row = next(r for r in rows if r[:3] == ["3", "0", KEY])
    np.testing.assert_allclose(
        [float(v) for v in row[3:6]], [seen[2].min(), seen[2].max(), seen[2].mean()], rtol=1e-6
    )


def test_the_program_is_not_changed(dumps):
    folder, _ = dumps
    (_, with_dump, state), (_, without, plain_state) = (
        torch.load(folder / "gpu.pt"),
        torch.load(folder / "plain.pt"),
    )
    assert torch.equal(with_dump, without)
    assert torch.equal(state, plain_state)


@pytest.mark.parametrize("name", ["", "globalrank-0_localrank-0.h5"])
def test_the_same_folders_give_our_verdict(dumps, name):
    folder, _ = dumps
    found = compare(folder / "gpu" / name, folder / "xpu" / name)
    assert (found.status, found.findings[0].name) == ("different", "blocks.1.2")
    assert compare(folder / "gpu" / name, folder / "gpu" / name).status == "same"


def test_stop_step_and_operators(tmp_path):
    script = (
        VISION
        + """
from whence.compat.torch_xray import PrecisionDebugger
debugger = PrecisionDebugger("dump", dump_torch_api=True)
x = torch.ones(1, 3, 8, 8)
for step in range(2):
    debugger.start(model)
    model(x), model(x)
    debugger.stop()
    model(x)
    debugger.step()
    import os
    assert os.path.exists("dump/globalrank-0_localrank-0.h5")
"""
    )
    python(tmp_path, script, RANK="0", LOCAL_RANK="0")
    with h5py.File(tmp_path / "dump" / "globalrank-0_localrank-0.h5") as file:
        assert sorted(file) == ["1", "2"]
        assert (
            sum("gelu" in name and "output" in name for name in file["1"]) == 4
        )  # two calls of two blocks, the third is not taken


ANEW = """
from whence.compat.torch_xray import PrecisionDebugger


def execute(x, step, model=model, path=sys.argv[1]):
    debugger = PrecisionDebugger(dump_path=path, hook_name="dump", rank=[0], step=step, model=model, dump_torch_api=False)
    debugger.start()
    with torch.no_grad():
        return model(x)


import os
seen = []
model.patch.register_forward_hook(lambda m, i, o: seen.append(o.clone()))
for n in range(3):
    out = execute(torch.full((1, 3, 8, 8), 0.5 + n), STEP)
    there = os.path.exists(sys.argv[1] + "/globalrank-0_localrank-0.h5")
    assert there == (n >= STEP[-1] - 1 and STEP != [7]), n  # as soon as the last step that is wanted is there
try:
    execute(torch.ones(1, 3, 8, 8), STEP, torch.nn.Linear(8, 8))
except Exception as error:
    assert "already dumps Vision there" in str(error), error
else:
    raise AssertionError("two models in one folder")
torch.save(seen, sys.argv[1] + ".pt")
"""


def test_a_debugger_made_anew_in_every_call_goes_on_with_the_dump(tmp_path):
    said = python(tmp_path, VISION + ANEW.replace("STEP", "[1, 3]"), "dump").stderr
    assert "nothing was dumped" not in said and "was deleted" not in said
    seen = torch.load(tmp_path / "dump.pt")
    with h5py.File(tmp_path / "dump" / "globalrank-0_localrank-0.h5") as file:
        assert sorted(file) == ["1", "3"]
        for group, step in (("1", 0), ("3", 2)):
            np.testing.assert_array_equal(
                file[group]["patch.Conv2d.0.forward_output.0"][()], seen[step].numpy()
            )
    # Once more into the same folder, by a new process: the dump is that of the second.
    python(tmp_path, VISION + ANEW.replace("STEP", "[1]"), "dump")
    with h5py.File(tmp_path / "dump" / "globalrank-0_localrank-0.h5") as file:
        assert sorted(file) == ["1"]


@pytest.mark.slow
def test_a_dump_that_took_nothing_says_why(tmp_path):
    said = python(tmp_path, VISION + ANEW.replace("STEP", "[7]"), "dump").stderr
    assert (
        "nothing was dumped into" in said
        and "step 7 was asked for, and 3 ran (the first is step 1)" in said
    )
    never = (
        VISION + "from whence.compat.torch_xray import "
        "PrecisionDebugger\nPrecisionDebugger(sys.argv[1], model=model).start()\n"
    )
    assert (
        "the Vision that it was given was never called" in python(tmp_path, never, "never").stderr
    )
    other = (
        never.replace("model=model", "rank=[1], model=model") + "model(torch.ones(1, 3, 8, 8))\n"
    )
    assert "rank 0 was not asked for" in python(tmp_path, other, "other").stderr


def test_what_is_not_understood_is_an_error():
    from whence.compat.torch_xray import PrecisionDebugger, begin_dump
    from whence.errors import UsageError

    for wrong in (
        {"hook_name": "overflow"},
        {"stepp": 1},
        {"step": ["x"]},
        {"step": [0]},
        {"rank": [-1]},
    ):
        with pytest.raises(UsageError):
            PrecisionDebugger("dump", **wrong)
    with pytest.raises(UsageError, match=r"no option 'hook_nam'; did you mean hook_name\?"):
        PrecisionDebugger("dump", hook_nam="dump")
    with pytest.raises(UsageError, match="X_DUMP_NUM='many'"):
        begin_dump(X_DUMP_NUM="many")


OPERATORS = """
from whence.compat.torch_xray import begin_dump, end_dump
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
ARGS
for _ in range(4):
    model(torch.randn(2, 8)).sum().backward()
end_dump(clear_context=True)
torch.ones(3).cumsum(0)
"""


@pytest.mark.slow
def test_operators_become_tests_and_their_tables_a_diff(tmp_path):
    python(
        tmp_path, OPERATORS.replace("ARGS", "begin_dump(X_DEBUG=0x102, X_DEDUP=True, X_DUMP_NUM=5)")
    )
    (folder,) = (tmp_path / "xray_debug").glob("proc_*")
    told = json.loads((folder / "dump.json").read_text())
    gelu = [r for r in told["records"] if r["op"] == "aten.gelu.default"]
    assert {(*r["args"]["self"]["shape"], r["args"]["self"]["dtype"]) for r in gelu} == {
        (2, 8, "torch.float32")
    }
    assert sum(r["count"] for r in gelu) == 4
    assert not any(r["op"].startswith("aten.cumsum") for r in told["records"])
    whence(folder, *JPROF, "dump.json")
    for device in ("xpu", "gpu"):
        options = [f"--detail_compare_path={device}.csv", str(folder / "pytests"), "--seed", "42"]
        command = [warm.TORCH, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        done = subprocess.run(
            command,
            cwd=tmp_path / "xray_debug",
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout
    whence(
        tmp_path / "xray_debug", "xray", "summary_diff_check", "xpu.csv", "gpu.csv", "result.csv"
    )
    rows = list(csv.DictReader((tmp_path / "xray_debug" / "result.csv").read_text().splitlines()))
    assert {"aten.gelu.default", "aten.addmm.default"} <= {r["op_name"] for r in rows}


JPROF = ("xray", "jprof", "--cpu_init", "--blacklist", "--factory=load")


def test_the_environment_alone_begins_a_dump(tmp_path):
    python(
        tmp_path,
        OPERATORS.replace("ARGS", "").replace("end_dump(", "(lambda **_: 0)("),
        X_DEBUG="0x102",
        X_DUMP_NUM="0",
        X_DEDUP="True",
    )
    (folder,) = (tmp_path / "xray_debug").glob("proc_*")
    told = json.loads((folder / "dump.json").read_text())
    assert [r["count"] for r in told["records"] if r["op"] == "aten.gelu.default"] == [4]
    assert any(r["op"] == "aten.cumsum.default" for r in told["records"])
    run = open_run(str(folder / "dump"))
    assert all(record.elements is None for record in run.records)


def test_ranks_of_one_job_share_a_dump(tmp_path):
    script = """
import os
import torch.multiprocessing as mp

def work(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    from whence.compat.torch_xray import PrecisionDebugger
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 4)
    debugger = PrecisionDebugger("dump", model=model)
    debugger.start()
    model(torch.ones(1, 4))
    debugger.stop()
    debugger.close()

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""
    python(tmp_path, script)
    assert {p.name for p in (tmp_path / "dump").glob("*.h5")} == {
        f"globalrank-{r}_localrank-{r}.h5" for r in range(2)
    }
    assert {call.rank for call in open_run(str(tmp_path / "dump")).calls} == {0, 1}


def test_a_comparison_is_read_again(dumps, tmp_path):
    folder, _ = dumps
    whence(tmp_path, "compare", folder / "gpu", folder / "xpu", "-o", tmp_path / "cmp", code=1)
    assert load_comparison(tmp_path / "cmp").status == "different"
