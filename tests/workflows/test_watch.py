"""`whence.watch` and `whence compare --watch`: runs that are compared while a program still writes
them.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import msgspec
import pytest

import warm
import whence
from whence.errors import OutputExists
from whence.store.folder import load_process, process_folders, this_process
from whence.store.status import CLEAN, Ended, read_status, write_status
from whence.workflows.watch import stop_writers

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


def test_stop_ends_both_programs_and_their_runs_are_whole(writing, tmp_path):
    reference, target = writing(tmp_path / "ref"), writing(tmp_path / "tgt", 1)
    bystander = writing(tmp_path / "other")
    reference.step(2)
    target.step(2)
    words = [warm.TORCH, "-m", "whence", "compare", "ref", "tgt", "--watch", "--stop"]
    watched = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert watched.returncode == 1, watched.stderr
    assert sorted(re.sub(r"pid \d+", "pid N", line) for line in watched.stderr.splitlines()) == [
        "whence: ended: rank 0 of ref (pid N), by SIGINT",
        "whence: ended: rank 0 of tgt (pid N), by SIGINT",
    ]
    assert reference.process.wait(60) != 0
    assert target.process.wait(60) != 0
    assert bystander.process.poll() is None
    (process,) = process_folders(tmp_path / "tgt")
    assert read_status(process).ended == CLEAN
    again = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert [(f.name, f.step, f.confidence) for f in again.findings] == [("1", 1, "certain")]


def test_nobody_is_ended_where_the_runs_agree_or_nobody_asked(writing, tmp_path):
    written(tmp_path / "ref", 1)
    target = writing(tmp_path / "tgt")
    target.step()
    looks = whence.watch(tmp_path / "ref", tmp_path / "tgt", every=0.05, stop=True)
    assert next(looks).status == "same"
    assert target.process.poll() is None


HOLDER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[1] == "ignores" else signal.SIG_DFL)
if sys.argv[1] == "catches":
    signal.signal(signal.SIGINT, lambda *_: None)
from whence.records import RunInfo
from whence.store import create
from whence.store.folder import make_process_folder, this_process
run = create(pathlib.Path(sys.argv[2]), RunInfo())
folder = make_process_folder(run, 0, this_process(0, "", 0))
journal = open(folder / "journal.jsonl", "w")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the journal of the run `held` open, and how it takes SIGINT."""
    begun = []

    def begin(how):
        words = [sys.executable, "-c", HOLDER, how, str(tmp_path / "held")]
        begun.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert begun[-1].stdout.readline() == "ready\n"
        (folder,) = process_folders(tmp_path / "held")
        return begun[-1], folder

    yield begin
    for process in begun:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("how", ["ignores", "catches"])
def test_who_does_not_end_by_sigint_ends_by_sigterm(holder, tmp_path, how):
    process, _ = holder(how)
    said = []
    stop_writers([tmp_path / "held"], said.append, grace_s=0.2)
    assert said == [f"ended: rank 0 of {tmp_path / 'held'} (pid {process.pid}), by SIGTERM"]
    assert process.wait(10) == -signal.SIGTERM


def _changed(folder, **fields):
    info = msgspec.structs.replace(load_process(folder), **fields)
    (folder / "process.json").write_bytes(msgspec.json.encode(info))


def test_only_the_process_that_writes_is_ended(holder, tmp_path):
    process, folder = holder("ignores")
    info = load_process(folder)
    said = []

    def stopped():
        said.clear()
        stop_writers([tmp_path / "held", tmp_path / "none"], said.append, grace_s=0.2)
        assert process.poll() is None
        return said

    _changed(folder, pid_started=info.pid_started + 1)  # the pid is another program's by now
    assert stopped() == []
    _changed(folder, pid=os.getpid(), pid_started=this_process(0, "", 0).pid_started)
    assert "is the process that watches" in stopped()[0]
    _changed(folder, host="elsewhere", pid=info.pid)
    assert stopped()[0].endswith(f"runs on elsewhere; on that machine: kill -INT {info.pid}")
    _changed(folder, host=info.host, pid_started=info.pid_started)
    (folder / "journal.jsonl").rename(folder / "old")
    (folder / "journal.jsonl").touch()
    assert "has closed the journal" in stopped()[0]
    write_status(folder, Ended(CLEAN))
    assert stopped() == []


def test_stop_needs_watch(tmp_path):
    done = subprocess.run(
        [warm.TORCH, "-m", "whence", "compare", "a", "b", "--stop"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "add --watch" in done.stderr
