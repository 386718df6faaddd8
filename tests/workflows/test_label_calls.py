"""Labels in code: what is taken of what, who faces whom, and that the program is never changed,
stopped or slowed.
"""

import csv
import os
import subprocess
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import warm
import whence
from counting import counted
from whence.errors import CaptureError, OutputExists, UnreadableRun
from whence.workflows.capture.collect_labels import gather

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def run(tmp_path):
    """A run that labels go to."""
    return tmp_path / "run"


def labels(path):
    opened = whence.open_run(str(path))
    found = {}
    for call in sorted(opened.calls, key=lambda c: c.arguments.get("at", 0)):
        record = opened.records[call.refs[0].record]
        array = opened.array(record.id) if not record.why else None
        found.setdefault((call.root, call.scope), []).append((call, record, array))
    return found


def table(path):
    with (path / "cmp_report.csv").open(newline="") as file:
        return {row["data_id"]: row for row in csv.DictReader(file)}


def pair(name, reference, target, **more):
    whence.label(name, reference, side="reference", **more)
    whence.label(name, target, side="target", **more)


def test_anything_array_like_is_taken_bit_by_bit(run):
    x = torch.randn(4, 6)
    given = {
        "torch": x,
        "view": x[1:3, ::2].T,
        "0-d": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "bf16": x.bfloat16(),
        "fp8": x.to(torch.float8_e4m3fn),
        "bool": x > 0,
        "conj": torch.complex(x, x).conj(),
        "parameter": torch.nn.Parameter(x.clone()),
        "numpy": x.numpy(),
        "fortran": np.asfortranarray(x.numpy()),
        "big endian": np.arange(3, dtype=">f4"),
        "number": 2.5,
        "list": [[1, 2], [3, 4]],
        "ml": np.ones(3, ml_dtypes.bfloat16),
        "int64": np.array([2**62 + 1]),
    }
    with whence.recording(run):
        for name, value in given.items():
            whence.label(name, value)
    found = labels(run)
    for name, value in given.items():
        _, record, array = found["", name][0]
        if isinstance(value, torch.Tensor):
            want = value.detach().resolve_conj()
            assert (record.dtype, record.shape) == (str(value.dtype)[6:], tuple(value.shape))
            kind = (
                torch.float32 if want.dtype in (torch.bfloat16, torch.float8_e4m3fn) else want.dtype
            )
            assert np.array_equal(
                array.astype(np.float32) if kind != want.dtype else array, want.to(kind).numpy()
            ), name
        else:
            assert np.array_equal(array, np.asarray(value)), name
            assert record.shape == np.asarray(value).shape


def test_what_cannot_be_read_is_a_label_with_the_reason(run):
    odd = {
        "none": None,
        "object": object(),
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "text": "abc",
    }

    class Hostile:
        def __getattr__(self, name):
            raise RuntimeError("do not look at me")

    with whence.recording(run):
        for name, value in {**odd, "hostile": Hostile()}.items():
            pair(name, value, 1.0)
        whence.label("left", 1.0, side="left")
        whence.label("", 1.0)
        whence.label("both", 1.0, file="x")
    found = labels(run)
    assert [bool(found["reference", name][0][1].why) for name in (*odd, "hostile")] == [True] * 6
    notes = [n.text for n in whence.open_run(str(run)).notes if n.kind == "label-error"]
    assert [("left" in n, "not empty" in n, "not both" in n).index(True) for n in notes] == [
        0,
        1,
        2,
    ]
    result = whence.compare_labels(run, output=run.parent / "cmp")
    assert (result.status, result.incomparable) == ("undecided", 6)
    rows = table(run.parent / "cmp")
    assert rows["none#0"]["cmp_fail_reason"] == "reference: is None: there is no tensor"
    assert {row["cmp_flag"] for row in rows.values()} == {"False"}


def test_what_a_whole_tensor_is_multiplied_by_stands_in_the_table(run):
    a = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    with whence.recording(run):
        pair("scaled", a, a * 1.05)
        pair("in half", a.half(), a.half() * 1.05)
        pair("noise", a, a + 1e-3 * torch.randn(8, 64, generator=torch.Generator().manual_seed(1)))
        pair("equal", a, a)
    result = whence.compare_labels(run, output=run.parent / "cmp")
    why = {name: row["cmp_fail_reason"] for name, row in table(run.parent / "cmp").items()}
    assert why["scaled#0"] == "target: everything is multiplied by 1.05"
    assert "everything is multiplied by 1.05; " in result.findings[0].sentence
    assert why["in half#0"].startswith("target: everything is multiplied by 1.05")
    assert (why["noise#0"], why["equal#0"]) == ("", "")


def test_a_program_is_not_changed(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(8, 8)

        def forward(self, x):
            y = torch.nn.functional.dropout(self.one(x), 0.5)
            whence.label("y", y, side="reference")
            y.mul_(2)
            whence.label("y", y, side="target")
            return y.sum()

    def train():
        torch.manual_seed(0)
        model = Model()
        x = torch.randn(3, 8, requires_grad=True)
        model(x).backward()
        return [x.grad, model.one.weight.grad, torch.rand(3)], model

    plain, model = train()
    environment = dict(os.environ)
    with whence.capture(model, tmp_path / "run"):
        before = torch.random.get_rng_state()
        x = torch.ones(1, 8)
        whence.label("x", x)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert x._version == 0
        with torch.inference_mode():
            whence.label("inferred", x * 2)
        captured, _ = train()
    assert all(torch.equal(a, b) for a, b in zip(plain, captured))
    assert dict(os.environ) == environment
    found = labels(tmp_path / "run")
    assert np.array_equal(
        found["target", "y"][0][2], 2 * found["reference", "y"][0][2]
    )  # each as it was when it was labelled


def test_programs_of_modules_do_not_hold_what_a_label_does(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, x):
            y = x.T * 2
            whence.label("y", y)
            return y + 1

    model = Model()
    with whence.capture(model, tmp_path / "one"):
        model(torch.ones(2, 3))
    programs = whence.open_run(str(tmp_path / "one")).programs.values()
    assert [[o.name.split(".")[1] for o in p.operations][-2:] for p in programs] == [["mul", "add"]]
    assert all(len(p.operations) == 3 for p in programs)


def test_compiled_code_is_not_broken_by_labels(tmp_path):
    script = """
import torch, whence
torch.set_num_threads(1)
def plain(x):
    y = torch.sin(x) * 3
    return torch.cos(y).sum(-1) * 2
def helper(y):
    whence.label("y", y, side="target")
def labelled(x):
    y = torch.sin(x) * 3
    helper(y)
    z = torch.cos(y).sum(-1)
    whence.label("z", z, id="an id")
    return z * 2
x = torch.randn(16, 16)
f = torch.compile(labelled, fullgraph=True, backend="aot_eager")
assert torch.equal(f(x), plain(x))
with whence.recording("run"):
    for _ in range(2):
        assert torch.equal(f(x), plain(x))
    g = torch.jit.trace(lambda a: (whence.label("traced", a), a + 1)[1], x)
    torch.fx.symbolic_trace(lambda a: (whence.label("symbolic", a), a + 1)[1])(x)
assert "numpy" not in str(g.graph) and len(list(g.graph.nodes())) <= 3
run = whence.open_run("run")
ys = [run.array(c.refs[0].record) for c in run.calls if c.scope == "y"]
places = {(c.scope, c.root, c.arguments.get("id"), c.source[-5:]) for c in run.calls if c.scope in "yz"}
assert places == {("y", "target", None, " code"), ("z", "", "an id", " code")}, places
assert len(ys) == 2 and all(abs(y - (torch.sin(x) * 3).numpy()).max() == 0 for y in ys)
assert [run.records[c.refs[0].record].why for c in run.calls if c.scope == "symbolic"] != [""]
"""
    done = subprocess.run(
        [warm.TORCH, "-W", "ignore", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_who_faces_whom(run):
    a = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    with whence.recording(run):
        whence.label("q", a, side="reference")
        whence.label("q", a + 1, side="reference")
        whence.label("q", a, side="target")
        whence.label("q", a + 1, side="target")
        one = whence.new_id()
        whence.label("mine", a * 2, side="reference", id=one)
        whence.label("theirs", a * 2, side="target", id=one)
        with whence.task("turn 1"):
            whence.label("q", a * 3, side="reference")
        with whence.task("turn 2"):
            whence.label("q", a * 3, side="target")
        whence.label("lone", a, side="target")
    result = whence.compare_labels(run, output=run.parent / "cmp")
    rows = table(run.parent / "cmp")
    assert [name for name, row in rows.items() if row["cmp_flag"] == "True"] == ["q#0", "q#1", one]
    assert all(
        row["relative_euclidean_distance"] == "0.0"
        for row in rows.values()
        if row["cmp_flag"] == "True"
    )
    assert (
        rows["turn 1/q#0"]["cmp_fail_reason"]
        == "the target has no label q#0 in turn 1; it has that name in no task, rank 0; task "
        "turn 2, rank 0"
    )
    assert rows["lone#0"]["cmp_fail_reason"] == "the reference has no label lone#0"
    assert (result.status, result.unmatched, result.coverage.paired) == ("undecided", 3, 3)
    assert result.headline == "3 labels have no partner"


def test_a_tensor_in_other_axes_is_compared_in_the_references(run):
    a = np.random.default_rng(0).standard_normal((2, 5, 3, 4)).astype(np.float32)
    with whence.recording(run):
        pair("first", a, a * np.float32(1 + 1e-7))
        pair("heads", a, np.ascontiguousarray(a.transpose(0, 2, 1, 3)))
        pair("flat", a, a.reshape(10, 12))
        wrong = a.copy()
        wrong[0, 1, 2] *= 2
        pair("wrong", a, wrong.reshape(2, 5, 12))
        pair("short", a, a[:1])
    result = whence.compare_labels(run)
    verdicts = {row.name: row.verdict for row in result.rows}
    assert [
        verdicts[n] in ("identical", "noise", "inherited") for n in ("first", "heads", "flat")
    ] == [True] * 3
    assert verdicts["short"] in ("incomparable", "structural")
    assert [f.name for f in result.findings][:1] == ["wrong"]


@pytest.mark.parametrize(
    ("error", "dtype", "status"),
    [
        (3e-6, np.float32, "same"),
        (1e-3, np.float32, "different"),
        (4e-3, ml_dtypes.bfloat16, "same"),
        (0.2, ml_dtypes.bfloat16, "different"),
    ],
)
def test_the_first_label_of_a_task_is_judged_by_what_rounding_before_it_may_make(
    run, error, dtype, status
):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((64, 64))
    b = a * (1 + error * rng.choice([-1, 1], a.shape))
    with whence.recording(run):
        pair("out", a.astype(dtype), b.astype(dtype))
    result = whence.compare_labels(run)
    assert (result.status, [f.name for f in result.findings]) == (
        status,
        ["out"] if status == "different" else [],
    )


def test_integers_and_nan_that_differ_are_a_difference(run):
    with whence.recording(run):
        with whence.task("ids"):
            pair("ids", np.arange(9), np.arange(9) + (np.arange(9) == 4))
        with whence.task("nan"):
            pair(
                "x",
                np.ones(9, np.float32),
                np.where(np.arange(9) == 4, np.nan, 1).astype(np.float32),
            )
    result = whence.compare_labels(run)
    assert {f.root for f in result.findings} == {"ids", "nan"}
    assert result.status == "different"


def test_files_that_are_late_torn_old_or_written_again(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a = np.arange(6, dtype=np.float32).reshape(2, 3)

    def library(name, array, mode="wb", cut=0):
        data = array.tobytes()
        head = f"$Version=1.0\n$Object.Count=1\n$Object.Length={len(data)}\nformat=2\ndtype=0\ndims=2,3\n$Object.data=0,{len(data)}\n$End=1\n"
        with open(name, mode) as file:  # noqa: PTH123
            file.write(head.encode() + data[: len(data) - cut])

    with whence.recording(run):
        for name in ("late", "torn", "gone", "text"):
            whence.label(name, a, side="reference")
            whence.label(name, file=f"{name}.bin", side="target")
        library("torn.bin", a, cut=4)
        (tmp_path / "text.bin").write_text("nothing of this kind")
        np.save("saved.npy", a)
        pair("saved", a, None)
        whence.label("npy", a, side="reference")
        whence.label("npy", file="saved.npy", side="target")
        for i in range(3):
            for name in ("again", "behind"):
                whence.label(name, a + i, side="reference")
                whence.label(name, file=f"{name}.bin", side="target")
            library("again.bin", a + i)
            library("behind.bin", a + i, "ab")
        threading.Timer(0.7, library, ("late.bin", a)).start()
    whence.compare_labels(run, output=tmp_path / "cmp")
    rows = table(tmp_path / "cmp")
    good = {name for name, row in rows.items() if row["cmp_flag"] == "True"}
    assert good == {"late#0", "npy#0", "again#2", "behind#0", "behind#1", "behind#2"}
    assert all(rows[name]["relative_euclidean_distance"] == "0.0" for name in good)
    assert "20 of 24 bytes: the file was cut short" in rows["torn#0"]["cmp_fail_reason"]
    assert "gone.bin never appeared" in rows["gone#0"]["cmp_fail_reason"]
    assert {rows["gone#0"][f"acl_{column}"] for column in ("data_path", "dtype", "shape")} == {""}
    assert "not a tensor file" in rows["text#0"]["cmp_fail_reason"]
    assert "written over" in rows["again#0"]["cmp_fail_reason"]
    assert not (run / "labels").exists()


def test_ids_are_different_at_every_call_and_the_same_in_every_run(tmp_path):
    script = """
import threading, whence
def one():
    return [whence.new_id() for _ in range(3)], whence.new_id()
with whence.recording("run%s"):
    found = [one(), one()]
    with whence.task("t"): found.append(one())
    inside = []
    threads = [threading.Thread(target=lambda: inside.extend(whence.new_id() for _ in range(500))) for _ in range(4)]
    [t.start() for t in threads]; [t.join() for t in threads]
flat = [i for ids, last in found for i in (*ids, last)]
assert len(set(flat)) == 12 and len(set(inside)) == 2000
print(flat, sorted(inside))
"""
    answers = []
    for i in range(2):
        (tmp_path / "ids.py").write_text(script % i)
        done = subprocess.run(
            [warm.TORCH, "ids.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert answers[0] == answers[1]
    assert "'ids.py:4#0'" in answers[0]
    assert "'t/ids.py:4#0'" in answers[0]


def test_tasks_of_threads_are_their_own(run):
    def work(k):
        with whence.task(f"request {k}"):
            for i in range(50):
                pair("x", np.full(4, k + i, np.float32), np.full(4, k + i, np.float32))

    with whence.recording(run):
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with whence.task() as first, whence.task() as second:
            pair("in", 1.0, 1.0)
        pair("out", 1.0, 1.0)
    result = whence.compare_labels(run, output=run.parent / "cmp")
    rows = table(run.parent / "cmp")
    assert (result.status, len(rows)) == ("same", 202)
    assert {name.partition("/")[0] for name in rows if name.startswith("request")} == {
        f"request {k}" for k in range(4)
    }
    assert {row["relative_euclidean_distance"] for row in rows.values()} == {"0.0"}
    assert (first.id, second.id, f"{second.id}/in#0" in rows, "out#0" in rows) == (
        "task0",
        "task1",
        True,
        True,
    )


def test_labels_of_children(tmp_path):
    """Forked, spawned and started processes label into the same run."""
    script = """
import multiprocessing, os, subprocess, sys
import numpy as np
import whence
def child(name, side):
    whence.label(name, np.ones(3), side=side)
if __name__ == "__main__":
    for side in ("reference", "target"):
        for how in ("fork", "spawn"):
            one = multiprocessing.get_context(how).Process(target=child, args=(how, side)); one.start(); one.join()
        whence.label("own", np.ones(3), side=side)
        one = multiprocessing.get_context("fork").Process(target=child, args=("later", side)); one.start(); one.join()
        pid = os.fork()
        if not pid:
            child("bare", side); sys.exit(0)
        os.waitpid(pid, 0)
        subprocess.run([sys.executable, "-c", f"import whence; whence.label('started', [1.0], side='{side}')"], check=True)
"""
    (tmp_path / "many.py").write_text(script)
    line = [
        warm.TORCH,
        "-m",
        "whence",
        "run",
        "--compare",
        "-o",
        "cmp",
        "--",
        warm.TORCH,
        "-W",
        "ignore",
        "many.py",
    ]
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(table(tmp_path / "cmp")) == {
        f"{n}#0" for n in ("fork", "spawn", "own", "later", "bare", "started")
    }


def test_runs_with_modules_and_labels(tmp_path):
    """`whence compare` judges modules where they are, and says who compares the labels."""
    torch.manual_seed(0)
    inner = torch.nn.Linear(6, 6)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            y = self.inner(x)
            whence.label("y", y * 1.5 if self.wrong else y)
            return torch.relu(y)

    model = Model().eval()
    for name, wrong in (("ref", False), ("tgt", True)):
        model.wrong = wrong
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(torch.ones(2, 6))
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert result.status == "same"
    assert any("whence labels" in note for note in result.notes)
    labelled = whence.compare_labels(tmp_path / "ref", tmp_path / "tgt")
    assert (labelled.status, labelled.findings[0].name) == ("different", "y")


def test_errors_before_anything_is_compared(run, tmp_path):
    whence.record(run, {"x": np.ones(3)})
    model = torch.nn.Linear(2, 2)
    with whence.capture(model, tmp_path / "none"):
        model(torch.ones(1, 2))
    with pytest.raises(CaptureError, match="no label was recorded"):
        whence.compare_labels(tmp_path / "none")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(OutputExists):
        whence.compare_labels(run, output=tmp_path / "full")
    with pytest.raises(UnreadableRun):
        whence.compare_labels(tmp_path / "nowhere")


def test_ten_thousand_labels_cost_the_same_each(run):
    """No label looks at those before it: the last tenth takes the calls that the first does.
    Without a run a label does nearly nothing.
    """
    x = torch.randn(32)
    whence.label("warm", x)

    def calls(count):
        with counted() as work:
            for i in range(count):
                whence.label("x", x, side="reference" if i % 2 else "target")
        return work.calls / count

    assert calls(1000) < 10  # without a run
    with whence.recording(run):
        costs = [calls(1000) for _ in range(10)]
    assert costs[-1] < 1.2 * costs[0]
    assert max(costs) < 1000
    result = whence.compare_labels(run)
    assert (result.status, result.coverage.paired) == ("same", 5000)


def test_faults_in_several_turns_are_told_as_they_happened(tmp_path):
    """The later one is much the larger."""
    draw = np.random.default_rng(0)
    with whence.recording(tmp_path / "run"):
        for turn in range(4):
            with whence.task(f"turn {turn}"):
                for name, when, by in (
                    ("projection", 1, 1.01),
                    ("activation", 2, 40.0),
                    ("head", 3, 1.5),
                ):
                    value = draw.normal(size=(4, 8)).astype(np.float32)
                    whence.label(name, value, side="reference")
                    whence.label(name, value * np.float32(by if turn == when else 1), side="target")
    found = whence.compare_labels(tmp_path / "run").findings
    assert [(f.name, f.step) for f in found] == [("projection", 1), ("activation", 2), ("head", 3)]


def test_a_folder_of_labels_that_another_rank_removes_meanwhile_holds_none(run, monkeypatch):
    place, listed = run / "labels", Path.iterdir
    place.mkdir(parents=True)

    def removed(path):
        if path == place and path.is_dir():
            path.rmdir()
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", removed)
    assert gather(str(run), ended_only=True) == 0


@pytest.mark.parametrize("equal", [True, False])
def test_a_tensor_that_is_missing_is_the_headline_and_no_shape(run, tmp_path, equal):
    a = np.ones((1, 4, 8), np.float32)
    with whence.recording(run):
        if equal:
            pair("there", a, a)
        whence.label("gone", a, side="reference")
        whence.label("gone", file="gone.bin", side="target")
    result = whence.compare_labels(run, output=tmp_path / "cmp")
    assert result.status == "undecided"
    assert "gone.bin never appeared" in result.headline


@pytest.mark.parametrize("task", ["", "turn 0", "turn 2"])
def test_a_task_that_stands_out_from_the_others_is_named(run, task):
    """The first label of a task in 16 bits has room for rounding that nobody sees; the same label
    in other tasks shows how much of it there is.
    """
    torch.manual_seed(0)
    with whence.recording(run):
        for turn in ("turn 0", "turn 1", "turn 2"):
            with whence.task(turn):
                for _ in range(3):
                    exact = torch.randn(6, 16)
                    off = torch.randn(6, 16) * (0.01 if turn == task else 0.0005)
                    pair("hidden", exact.half(), (exact + off).half())
    result = whence.compare_labels(run)
    assert [(f.root, f.occurrence) for f in result.findings] == ([(task, 0)] if task else [])
    assert result.status == ("different" if task else "same")
