"""The tools whose formats whence writes read them: Polygraphy, h5py, msprobe (in an environment of
its own), torch.
"""

import csv
import os
import shutil
import subprocess

import numpy as np
import pytest

import whence
from handmade import net
from whence import dtypes, writers
from whence.report.views import view_csv
from whence.writers.support import encodings
from writers import every_kind

RUN = every_kind.run()


def test_polygraphy_loads_run_results(tmp_path):
    comparator = pytest.importorskip(
        "polygraphy.comparator", reason="Polygraphy is not installed: pip install polygraphy"
    )
    # float8_e8m0fnu came with torch 2.7
    torch = pytest.importorskip("torch", "2.7", "Polygraphy keeps bfloat16 as a tensor of torch")
    whence.convert(RUN, tmp_path / "dump.json", to="polygraphy")
    whence.convert(RUN, tmp_path / "folder", to="polygraphy")
    whole = comparator.RunResults.load(str(tmp_path / "dump.json"))
    parts = [
        comparator.RunResults.load(str(file)) for file in sorted((tmp_path / "folder").iterdir())
    ]
    assert [(name, len(iterations)) for name, iterations in whole.items()] == [
        ("rank0", 2),
        ("rank1", 2),
    ]
    joined = comparator.RunResults.concat(parts)
    assert [[list(one) for one in its] for its in joined.values()] == [
        [list(one) for one in its] for its in whole.values()
    ]
    outputs = whole["rank1"][0]
    root = next(c for c in RUN.calls if (c.rank, c.step, c.scope) == (1, 0, ""))
    zoo = next(c for c in RUN.calls if (c.rank, c.step, c.scope) == (1, 0, "every.dtype"))
    assert len(outputs) == sum(len(c.refs) for c in RUN.calls if (c.rank, c.step) == (1, 0))
    assert outputs["Net.input.ids"].tolist() == RUN.array(root.slots("input")[1].record).tolist()
    for ref in zoo.slots("output"):
        found, expected = outputs[f"every.dtype.{ref.slot}"], RUN.array(ref.record)
        if isinstance(found, torch.Tensor):
            assert str(found.dtype).removeprefix("torch.") == dtypes.of(expected).name
            found = found.reshape(-1).view(torch.uint8).numpy()
        else:
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes(), ref.slot


def test_polygraphy_inspects_what_was_written(tmp_path):
    pytest.importorskip("polygraphy", reason="Polygraphy is not installed: pip install polygraphy")
    tool = shutil.which("polygraphy")
    if tool is None:
        pytest.skip("the command polygraphy is not on the path")
    whence.convert(net(), tmp_path / "dump.json", to="polygraphy")
    done = subprocess.run(
        [tool, "inspect", "data", str(tmp_path / "dump.json")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "fc1.output.0 [dtype=float32, shape=(5, 32)]" in done.stdout + done.stderr


def test_h5py_lists_the_order_of_execution_and_plain_types(tmp_path):
    h5py = pytest.importorskip("h5py")
    written = whence.convert(RUN, tmp_path / "dump", to="torch_xray")
    ended = [c for c in RUN.calls if (c.rank, c.step) == (0, 1)]
    with h5py.File(written.files[0]) as file:
        assert list(file) == ["1", "2"]
        assert [file["2"][name].attrs["module"] for name in file["2"]] == [
            c.scope.replace("\0", "%00") for c in ended for _ in c.refs
        ]
        assert "layers.0.attn.Linear.0.forward_params.weight" in file["2"]
        zoo = next(c for c in ended if c.scope == "every.dtype")
        for ref in zoo.slots("output"):
            dataset, expected = (
                file["2"][f"every.dtype.Zoo.0.forward_{ref.slot}"],
                RUN.array(ref.record),
            )
            assert dataset.attrs["dtype"] == f"torch.{dtypes.of(expected).name}"
            assert dataset[()].tobytes() == expected.tobytes() and dataset.shape == expected.shape
            assert dataset.dtype == (
                expected.dtype
                if encodings.has_numpy_type(expected)
                else np.dtype(f"u{expected.itemsize}")
            )


@pytest.mark.torch
def test_torch_loads_every_dtype_and_shape(tmp_path):
    torch = pytest.importorskip("torch", "2.7")  # float8_e8m0fnu
    for shape in ((3, 5), (), (0, 3), (1,), (2, 1, 3)):
        for kind in dtypes.DTYPES.values():
            raw = np.random.default_rng(0).integers(
                0, 2 if kind.name == "bool" else 256, int(np.prod(shape)) * kind.itemsize, np.uint8
            )
            encodings.write_torch(tmp_path / "x.pt", raw.view(kind.numpy).reshape(shape))
            for mapped in (False, True):
                found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mapped)
                assert (str(found.dtype), tuple(found.shape), found.stride()) == (
                    f"torch.{kind.name}",
                    shape,
                    torch.empty(shape).stride(),
                )
                assert found.reshape(-1).view(torch.uint8).numpy().tobytes() == raw.tobytes()


def msprobe():
    """The command of an msprobe: that of WHENCE_MSPROBE, or on the path."""
    tool = os.environ.get("WHENCE_MSPROBE") or shutil.which("msprobe")
    if tool is None:
        pytest.skip(
            "msprobe (mindstudio-probe) is not there; WHENCE_MSPROBE names its command, as of a "
            "virtual environment of its own"
        )
    return tool


@pytest.mark.msprobe
def test_msprobe_reads_and_compares_what_was_written(tmp_path):
    tool = msprobe()
    target = net(change=lambda name, value: value * 1.01 if name == "h" else value)
    whence.convert(net(), tmp_path / "golden", to="msprobe")
    whence.convert(target, tmp_path / "target", to="msprobe")
    theirs = compared(tool, tmp_path, "golden", "target")
    names = [row["NPU Name"] for row in theirs]
    assert names == [row["Bench Name"] for row in theirs]
    assert {
        "Module.fc1.Linear.forward.0.parameters.weight",
        "Module.fc2.Linear.forward.0.output.0",
    } <= set(names)
    assert len(names) == len(set(names)) == 9
    result = whence.compare(
        tmp_path / "golden", tmp_path / "target", view="msprobe", output=tmp_path / "cmp"
    )
    ours = list(csv.DictReader(view_csv("msprobe", result.views["msprobe"]).splitlines()))
    for figure in ("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "Bench l2norm", "NPU max"):
        mine = {row["Bench Name"]: row[figure] for row in ours}
        for row in theirs:
            if row[figure] not in ("None", "N/A"):
                assert float(mine[row["Bench Name"]]) == pytest.approx(
                    float(row[figure]), rel=1e-5
                ), (figure, row["Bench Name"])


@pytest.mark.msprobe
def test_msprobe_takes_hostile_names_and_small_floats(tmp_path):
    tool = msprobe()
    names = (*every_kind.NAMES, "-c", "@x", "a;=b")
    built = every_kind.Builder()
    import ml_dtypes

    for i, name in enumerate(names):
        array = np.arange(6 * (i + 1), dtype=np.float32).astype(
            ml_dtypes.bfloat16 if i % 2 else np.float16
        )
        built.call(
            name, {"input.0": array, "output.0": array + array, "output.1": array > 2}, op_type="-X"
        )
    whence.convert(built.run(), tmp_path / "golden", to="msprobe")
    rows = compared(tool, tmp_path, "golden", "golden")
    assert len(rows) == 3 * len(names)
    assert {float(row["Cosine"]) for row in rows} == {1.0}


def compared(tool, folder, golden, target):
    """The rows of msprobe's own table of two dumps."""
    out = folder / "out"
    line = [
        tool,
        "compare",
        "-tp",
        str(folder / target / "step0"),
        "-gp",
        str(folder / golden / "step0"),
        "-o",
        str(out),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    tables = list(out.glob("compare_result_*.csv"))
    assert len(tables) == 1, done.stdout + done.stderr
    with tables[0].open(newline="") as file:
        return list(csv.DictReader(file))


def test_there_is_a_writer_of_each_format_that_others_announce_too(monkeypatch):
    class Point:
        name, value = "mine", "package:module"

        def load(self):
            return writers.npy_like

    monkeypatch.setattr(writers, "npy_like", writers.named("npy"), raising=False)
    monkeypatch.setattr("whence.writers._added", lambda: {"mine": Point()})
    writers.known.cache_clear()
    try:
        assert writers.known()[-1] == "mine"
        assert writers.named("mine") is writers.named("npy")
    finally:
        writers.known.cache_clear()
