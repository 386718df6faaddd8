"""`whence.watch` of runs in windows of steps: each is compared once, and deleted where asked for."""

import csv
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import warm
import whence
from whence import api, store
from whence.errors import UnreadableRun, UsageError
from whence.records import RunInfo
from whence.results import Status
from whence.store.folder import windows_of
from whence.store.windows import delete_window

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

# Trains a step whenever it reads a line. The layer "rare" is only called in every fifth step.
PROGRAM = """
import sys, torch, whence
torch.set_num_threads(1)
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16)
        self.rare = torch.nn.Linear(16, 16)
        self.frozen = torch.nn.Linear(16, 2).requires_grad_(False)
    def forward(self, x, step):
        x = self.norm(torch.tanh(self.first(x)))
        return self.frozen(self.rare(x) if step % 5 == 0 else x)
net = Net()
faulty = int(sys.argv[2])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=sys.argv[3] == "foreach")
with whence.capture(net, sys.argv[1], window=2):
    print("ready", flush=True)
    for step, line in enumerate(sys.stdin):
        if step == faulty:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        draw = torch.Generator().manual_seed(step)
        net(torch.randn(4, 8, generator=draw), step).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(net.first.weight.sum().item().hex(), flush=True)
"""
NEVER = 1000


class Training:
    """A program that trains and is captured, a step at a time. faulty: from which step on."""

    def __init__(self, folder, faulty, form):
        words = [warm.TORCH, "-c", textwrap.dedent(PROGRAM), str(folder), str(faulty), form]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.said = []
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout.readline() == "ready\n"

    def step(self, times=1):
        for _ in range(times):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            self.said.append(self.process.stdout.readline())

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(60) == 0

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stdin.close()


@pytest.fixture
def train(tmp_path):
    begun = []

    def begin(name, faulty=NEVER, form="foreach"):
        begun.append(Training(tmp_path / name, faulty, form))
        return begun[-1]

    yield begin
    for training in begun:
        training.kill()


def windows(*runs):
    return [[path.name for path in windows_of(run)] for run in runs]


def test_what_is_the_same_is_deleted_while_both_go_on(train, tmp_path):
    runs = tmp_path / "ref", tmp_path / "tgt"
    reference, target = train("ref"), train("tgt", form="loop")
    looks = whence.watch(*runs, every=0.02, discard=True, output=tmp_path / "cmp")
    for number in range(5):
        reference.step(2)
        target.step(2)
        result = next(looks)
        assert (result.status, len(result.windows)) == (Status.SAME, number + 1)
        last = result.windows[-1]
        assert (last.first_step, last.last_step, last.kept) == (2 * number, 2 * number + 1, False)
        # the window that is being written, and two before it
        assert all(len(names) <= 3 for names in windows(*runs))
    reference.end()
    target.end()
    result = list(looks)[-1]
    assert result.status == Status.SAME
    assert windows(*runs) == [[], []]
    assert json.loads((runs[0] / "deleted.json").read_text())["windows"] >= 5
    with pytest.raises(UnreadableRun, match="were compared and deleted"):
        store.open_run(runs[0])
    with (tmp_path / "cmp" / "windows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["same"] * 5
    assert sum(int(row["calls"]) for row in rows) == result.coverage.calls
    assert result.coverage.measured == result.coverage.calls


def test_windows_that_an_earlier_watch_deleted_are_told(train, tmp_path):
    runs = tmp_path / "ref", tmp_path / "tgt"
    for training in (train("ref"), train("tgt", form="loop")):
        training.step(6)
        training.end()
    for run in runs:
        delete_window(windows_of(run)[0])
    result = list(whence.watch(*runs, every=0.02))[-1]
    assert any("deleted before this watch began: 1" in note for note in result.notes)


def test_a_fault_ends_it_and_stays(train, tmp_path):
    runs = tmp_path / "ref", tmp_path / "tgt"
    sides = train("ref"), train("tgt", faulty=5)
    for side in sides:
        side.step(8)
    results = list(whence.watch(*runs, every=0.02, discard=True, output=tmp_path / "cmp"))
    result = results[-1]
    first = result.findings[0]
    assert [look.status for look in results] == ["same", "same", "different"]
    assert (first.op_type, first.step, first.confidence) == ("AdamW", 5, "certain")
    assert "weight_decay" in first.sentence
    assert result.windows[-1].kept
    assert "w0000002" in windows(*runs)[0]
    # the comparison is of that window alone, and what reads its tensors finds them
    assert result.reference.endswith("w0000002")
    loaded = whence.load_comparison(tmp_path / "cmp")
    assert loaded.findings == result.findings
    whence.report_html(str(tmp_path / "cmp"), tmp_path / "page.html")


def test_each_window_holds_all_that_its_calls_refer_to(train, tmp_path):
    training = train("run")
    training.step(12)
    training.end()
    whole = store.open_run(tmp_path / "run")
    paths = windows_of(tmp_path / "run")
    steps = [{call.step for call in store.open_run(path).calls} for path in paths[:6]]
    assert steps == [{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}]
    parts = [store.open_run(path) for path in paths[:6]]
    assert sum(len(part.calls) for part in parts) == len(whole.calls)
    for part in parts:
        for call in part.calls:
            assert call.program in part.programs or not call.program
            for ref in call.refs:
                record = part.records[ref.record]
                assert record.elements is not None, (call.name, ref.slot, record.why)
                part.array(ref.record)
    # a layer that rested for two windows and a half is written anew, as one that was not
    frozen = [
        part.array(next(r.record for r in call.refs if r.slot == "param.weight"))
        for part in parts
        for call in part.calls
        if call.scope == "frozen" and call.phase == "forward"
    ]
    assert len(frozen) == 12
    assert all(np.array_equal(frozen[0], weight) for weight in frozen)


def test_the_program_computes_the_same_bits(train, tmp_path):
    captured = train("run")
    captured.step(6)
    bare = PROGRAM.replace("with whence.capture(net, sys.argv[1], window=2):", "if True:")
    done = subprocess.run(
        [sys.executable, "-c", bare, "", str(NEVER), "foreach"],
        input="\n" * 6, capture_output=True, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines()[1:] == [line.strip() for line in captured.said]


def test_windows_that_only_one_run_has_are_no_pass(train, tmp_path):
    runs = tmp_path / "ref", tmp_path / "tgt"
    reference, target = train("ref"), train("tgt", form="loop")
    reference.step(6)
    reference.end()
    target.step(2)
    target.kill()
    result = list(whence.watch(*runs, every=0.02, discard=True))[-1]
    assert result.status == Status.UNDECIDED
    assert "is not in the target" in result.headline
    assert len(result.windows) == 1


def test_other_runs_are_refused(train, tmp_path):
    train("windowed").step(1)
    model = torch.nn.Linear(2, 2)
    with whence.capture(model, tmp_path / "plain"):
        model(torch.ones(1, 2))
    with pytest.raises(UsageError, match="same whence run --window N"):
        next(whence.watch(tmp_path / "windowed", tmp_path / "plain", every=0.02))
    with pytest.raises(UsageError, match="is not captured in windows"):
        next(whence.watch(tmp_path / "plain", tmp_path / "plain", every=0.02, discard=True))
    with pytest.raises(UsageError, match="--watch"):
        whence.compare(tmp_path / "windowed", tmp_path / "windowed")


def test_commands_that_take_one_run_take_its_windows_one_by_one(train, tmp_path):
    training = train("run")
    training.step(4)
    training.end()
    assert len(store.recover(tmp_path / "run")) == len(windows_of(tmp_path / "run")[:2])
    assert {call.step for call in store.open_run(tmp_path / "run").calls} == {0, 1, 2, 3}
    for command in (
        lambda: store.scrub(tmp_path / "run", info=True),
        lambda: whence.pack(tmp_path / "run", tmp_path / "packed"),
        lambda: api.upload(tmp_path / "run", "memory://bucket/run"),
    ):
        with pytest.raises(UsageError, match="w0000000"):
            command()
    store.scrub(windows_of(tmp_path / "run")[0], info=True)
    store.create(tmp_path / "run", RunInfo(), force=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


def test_a_disk_that_fills_is_freed_by_what_is_deleted(tmp_path):
    """Elements are left out where the windows that are there fill the budget, and kept again."""
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)  # 4 KB of weights, 256 bytes a step
    run = tmp_path / "run"
    with whence.capture(model, run, window=1, max_bytes=10_000), torch.no_grad():
        for step in range(8):
            model(torch.ones(1, 32) * step)
            if step == 4:
                for window in windows_of(run)[:3]:
                    delete_window(window)
    kept = {
        path.name: all(r.elements is not None for r in store.open_run(path).records)
        for path in windows_of(run)
        if any(path.glob("rank*"))
    }
    assert kept["w0000006"] and kept["w0000007"]
    assert not all(kept.values())
