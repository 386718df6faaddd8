"""`whence.watch` and `whence compare --watch`: runs that are compared while a program still writes
them.
"""

import os
import subprocess
import sys
import textwrap
import time

import pytest

import warm
import whence
from whence.errors import OutputExists

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

# Makes a step whenever it reads a line, so that the test says when a run grows.
PROGRAM = """
import sys, torch, whence
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)).eval()
x = torch.linspace(-1, 1, 24).reshape(3, 8)
with whence.capture(model, sys.argv[1]), torch.no_grad():
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        if number >= int(sys.argv[2]):
            model[1].approximate = "tanh"
        model(x)
        print("stepped", flush=True)
"""


class Writing:
    """A program that writes a run, a step at a time. faulty: from which step on."""

    def __init__(self, folder, faulty=1000, python=None):
        words = [python or warm.TORCH, "-c", textwrap.dedent(PROGRAM), str(folder), str(faulty)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout.readline() == "ready\n"

    def step(self, times=1):
        for _ in range(times):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline() == "stepped\n"

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self.process.stdout.close()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stdin.close()


@pytest.fixture
def writing():
    begun = []

    def begin(*arguments, **more):
        begun.append(Writing(*arguments, **more))
        return begun[-1]

    yield begin
    for one in begun:
        one.kill()


def written(folder, steps):
    """What the program writes when it has ended."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)
    ).eval()
    with whence.capture(model, folder), torch.no_grad():
        for _ in range(steps):
            model(torch.linspace(-1, 1, 24).reshape(3, 8))


def test_as_steps_arrive_then_once_more_when_all_is_there(writing, tmp_path):
    written(tmp_path / "ref", 3)
    target = writing(tmp_path / "tgt")
    target.step()
    looks = whence.watch(tmp_path / "ref", tmp_path / "tgt", every=0.05, output=tmp_path / "cmp")
    first = next(looks)
    assert (first.status, first.coverage.calls, first.unmatched) == ("same", 4, 0)
    assert [(one.side, one.kind, one.accepted) for one in first.missing] == [
        ("target", "running", True)
    ]
    assert whence.load_comparison(tmp_path / "cmp").coverage.calls == 4
    target.step(2)
    assert next(looks).coverage.calls == 12
    target.end()
    last = list(looks)
    assert [(one.status, one.coverage.calls, one.missing) for one in last] == [("same", 12, ())]
    assert whence.load_comparison(tmp_path / "cmp").missing == ()
    with pytest.raises(OutputExists):
        next(whence.watch(tmp_path / "ref", tmp_path / "tgt", output=tmp_path / "cmp"))


def test_it_stops_at_the_first_certain_fault_while_both_are_written(writing, tmp_path):
    reference, target = writing(tmp_path / "ref"), writing(tmp_path / "tgt", 2)
    reference.step(3)
    target.step(1)
    looks = whence.watch(tmp_path / "ref", tmp_path / "tgt", every=0.05)
    assert next(looks).status == "same"
    target.step(3)  # the reference has not come to the fourth
    (last,) = looks
    assert (last.status, [(f.name, f.step, f.confidence) for f in last.findings]) == (
        "different",
        [("1", 2, "certain")],
    )
    assert last.coverage.calls == 12
    assert target.process.poll() is None


def test_what_is_missing_at_the_end_is_not_the_same(writing, tmp_path):
    written(tmp_path / "ref", 4)
    target = writing(tmp_path / "tgt", python=sys.executable)  # for a kill is not passed on
    target.step(2)
    target.kill()
    (last,) = whence.watch(tmp_path / "ref", tmp_path / "tgt", every=0.05)
    assert (last.status, last.coverage.calls, last.coverage.paired) == ("undecided", 16, 8)


def test_the_command_waits_for_a_run_that_is_not_there_yet(tmp_path):
    written(tmp_path / "ref", 2)
    words = [warm.TORCH, "-m", "whence", "compare", "ref", "tgt", "--watch", "-o", "cmp"]
    watching = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(1)
    written(tmp_path / "tgt", 2)
    out, err = watching.communicate(timeout=120)
    assert (watching.returncode, out.splitlines()[0]) == (
        0,
        "SAME               bitwise identical",
    ), err
    assert "unexpected" not in err


def test_the_command_ends_cleanly_when_interrupted(writing, tmp_path):
    written(tmp_path / "ref", 2)
    target = writing(tmp_path / "tgt")
    target.step()
    words = [warm.TORCH, "-m", "whence", "compare", "ref", "tgt", "--watch", "-o", "cmp"]
    watching = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(600):
        if (tmp_path / "cmp" / "report.json").exists():
            break
        time.sleep(0.1)
    time.sleep(0.5)
    watching.send_signal(2)
    out, err = watching.communicate(timeout=300)
    assert (watching.returncode, out, err.splitlines()[-1]) == (130, "", "whence: interrupted")
    assert whence.load_comparison(tmp_path / "cmp").status == "same"
