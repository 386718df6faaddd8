"""`whence.capture` and what `whence run` attaches: options, seeds, processes that fork and spawn,
and kill -9.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import warm
import whence
from whence import api
from whence.errors import CaptureError, OutputExists, StoreFailed, UnreadableRun, UsageError
from whence.store import open_run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
torch.set_num_threads(1)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).eval()


def run_python(tmp_path, text, *words, **more):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [*words, warm.TORCH, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        **more,
    )


def under_whence(tmp_path, text, *options, name="run"):
    return run_python(tmp_path, text, warm.TORCH, "-m", "whence", "run", "-o", name, *options, "--")


# ---- options and refusals


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keeep": "full"}, "did you mean keep"),
        ({"steps": "x"}, "START:STOP"),
        ({"include": "re:("}, "include"),
        ({"ids": "x"}, "tree number"),
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(given, words, tmp_path):
    with pytest.raises(UsageError, match=words), whence.capture(model(), tmp_path / "run", **given):
        pytest.fail("entered")
    assert not (tmp_path / "run").exists()


def test_what_is_no_module(tmp_path):
    with (
        pytest.raises(
            CaptureError, match=r"cannot capture a dict: .*torch\.nn\.Module.*whence run"
        ),
        whence.capture({}, tmp_path / "run"),
    ):
        pytest.fail("entered")
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_kept_without_force(tmp_path):
    with whence.capture(model(), tmp_path / "run"):
        pass
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    original = torch.nn.Module.__call__
    with pytest.raises(OutputExists, match="force"), whence.capture(model(), tmp_path / "run"):
        pytest.fail("entered")
    assert torch.nn.Module.__call__ is original
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    net = model()
    with whence.capture(net, tmp_path / "run", force=True):
        net(torch.ones(1, 4))
    assert len(open_run(tmp_path / "run").calls) == 4


def test_a_file_as_parent_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(StoreFailed, match="file"),
        whence.capture(model(), tmp_path / "file" / "run"),
    ):
        pytest.fail("entered")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_run_says_what_it_is(tmp_path):
    net = model()
    with whence.capture(net, tmp_path / "run", steps="0:2", seed=3):
        net(torch.ones(1, 4))
    info = open_run(tmp_path / "run").info
    assert info.options == {"steps": [[0, 2, 1]], "seed": 3}
    assert info.seed == 3
    assert info.versions["torch"] == torch.__version__


def test_seed_and_deterministic(tmp_path):
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    try:
        drawn = []
        for name in "ab":
            with whence.capture(model(), tmp_path / name, seed=5, deterministic=True):
                drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
                assert torch.are_deterministic_algorithms_enabled()
        assert drawn[0] == drawn[1]
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.deterministic = before[1]


def test_a_rank_that_is_not_wanted(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    net = model()
    with whence.capture(net, tmp_path / "run", ranks="0,1"):
        net(torch.ones(1, 4))
    with (
        pytest.raises(RuntimeError, match="shapes"),
        whence.capture(net, tmp_path / "raised", ranks="0,1"),
    ):
        net(torch.ones(1, 5))
    for name in ("run", "raised"):
        with pytest.raises(UnreadableRun, match="empty run: 0 process folder"):
            open_run(tmp_path / name)


def test_an_error_in_the_block_is_the_programs(tmp_path):
    net = model()
    original = torch.nn.Module.__call__
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        whence.capture(net, tmp_path / "run"),
    ):
        net(torch.ones(1, 4))
        net(torch.ones(1, 5))
    assert torch.nn.Module.__call__ is original
    run = open_run(tmp_path / "run")
    assert run.ended == ""
    assert [bool(c.error) for c in run.calls if c.parent == -1] == [False, True]
    (note,) = [n.text for n in run.notes if n.kind == "ended"]
    assert note.startswith("the block was left by RuntimeError: mat1 and mat2 shapes")


def test_an_interrupt_in_the_block_is_told_by_the_run(tmp_path):
    net = model()
    with pytest.raises(KeyboardInterrupt), whence.capture(net, tmp_path / "run"):
        net(torch.ones(1, 4))
        raise KeyboardInterrupt
    assert [n.text for n in open_run(tmp_path / "run").notes if n.kind == "ended"] == [
        "the block was left by KeyboardInterrupt"
    ]


# ---- processes


PROGRAM = """
    import multiprocessing, os, sys, torch
    torch.set_num_threads(1)
    def work(n):
        with torch.no_grad():
            return torch.nn.Linear(3, 3).eval()(torch.full((n + 1, 3), float(n))).shape[0]
    if __name__ == "__main__":
        how = {how!r}
        work(0)
        if how == "os.fork":
            pid = os.fork()
            if pid == 0:
                work(1)
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        else:
            context = multiprocessing.get_context(how)
            children = [context.Process(target=work, args=(n,)) for n in (1, 2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
            assert [child.exitcode for child in children] == [0, 0]
        work(3)
        print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["os.fork", "fork", "spawn"])
def test_children_of_a_captured_process(how, tmp_path):
    done = under_whence(tmp_path, PROGRAM.format(how=how))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    run = open_run(tmp_path / "run")
    assert run.ended == "", run.ended
    heights = sorted(
        run.records[next(r.record for r in c.refs if r.slot == "input.0")].shape[0]
        for c in run.calls
    )
    assert heights == ([1, 2, 4] if how == "os.fork" else [1, 2, 3, 4])
    folders = [p for p in (tmp_path / "run").iterdir() if p.is_dir()]
    assert len(folders) == (2 if how == "os.fork" else 3)
    assert "capture stopped" not in done.stderr


def test_a_child_forked_inside_the_block(tmp_path):
    done = run_python(
        tmp_path,
        """
        import os, threading, torch, whence
        net = torch.nn.Linear(3, 3).eval()
        with whence.capture(net, "run"):
            net(torch.ones(1, 3))
            pid = os.fork()
            net(torch.ones(2, 3))
            if pid == 0:
                print("child", flush=True)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        print("parent")
        """,
    )
    assert (done.returncode, done.stdout) == (0, "child\nparent\n"), done.stderr
    assert "stopped" not in done.stderr
    run = open_run(tmp_path / "run")
    assert run.ended == ""
    assert [
        run.records[next(r.record for r in c.refs if r.slot == "input.0")].shape[0]
        for c in run.calls
    ] == [1, 2]


# ---- kill -9


TRAINS = """
    import os, sys, tempfile, torch, whence
    torch.set_num_threads(1)
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(6))
        def forward(self, x):
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x
    def train(path):
        net = Net()
        opt = torch.optim.SGD(net.parameters(), 0.01)
        with whence.capture(net, path, max_bytes=10**9):
            for step in range(100_000):
                net(torch.full((8, 32), float(step))).square().mean().backward()
                opt.step()
                os.write(1, b"%d\\n" % step)
    with tempfile.TemporaryDirectory() as folder, whence.capture(Net(), folder + "/warm"):
        pass  # loads what a capture needs, before the forks
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            train(line.strip())
        os.write(1, b"pid %d\\n" % pid)
        status = os.waitpid(pid, 0)[1]
        os.write(1, b"ended %d\\n" % status)
"""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A process that imported torch and trains once, in a child, for every path it is given."""
    script = tmp_path_factory.mktemp("trainer") / "trains.py"
    script.write_text(textwrap.dedent(TRAINS))
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([warm.TORCH, str(script)], text=True, **streams) as process:
        yield process
        process.stdin.close()


def killed(trainer, path, steps, after_s):
    """The run of a capture killed `after_s` after its `steps`-th step, and the last step it told
    of.
    """
    trainer.stdin.write(f"{path}\n")
    trainer.stdin.flush()
    pid, last, sent = 0, -1, False
    for line in trainer.stdout:
        word, _, number = line.strip().partition(" ")
        if word == "ended":
            assert int(number) == signal.SIGKILL
            return path, last
        if word == "pid":
            pid = int(number)
        else:
            last = max(last, int(word))
        if pid and last >= steps and not sent:
            time.sleep(after_s)
            os.kill(pid, signal.SIGKILL)
            sent = True
    raise AssertionError("the trainer died")


def check_killed(path, last):
    import xxhash
    from safetensors import safe_open

    from whence import store

    run = open_run(path)
    assert "uncleanly" in run.ended
    assert max(s.step for s in run.steps) >= last
    kept = {}
    for record in run.records:
        if record.elements is not None:
            data = run.array(record.id).tobytes()
            assert xxhash.xxh3_128_hexdigest(data) == record.hash
            kept[record.id] = data
    for call in run.calls:
        assert all(0 <= r.record < len(run.records) for r in call.refs)
    inputs = [
        next(r for r in c.refs if r.slot == "input.0")
        for c in run.calls
        if c.scope == "layers.0" and c.phase == "forward"
    ]
    for step, ref in enumerate(inputs[: last + 1]):
        assert np.array_equal(run.array(ref.record), np.full((8, 32), float(step), np.float32))
    store.recover(path)
    found = 0
    for shard in path.rglob("shard-*.safetensors"):
        with safe_open(shard, "numpy") as official:
            for name in official.keys():  # noqa: SIM118
                if name.startswith("record."):
                    assert official.get_tensor(name).tobytes() == kept[int(name.split(".")[1])]
                    found += 1
    assert found > 10


def test_kill_9_of_a_real_capture(trainer, tmp_path):
    check_killed(*killed(trainer, tmp_path / "run", 3, 0.05))


@pytest.mark.slow
def test_kill_9_at_many_moments_of_a_real_capture(trainer, tmp_path):
    draw = random.Random(7)
    for trial in range(8):
        check_killed(
            *killed(trainer, tmp_path / f"run{trial}", draw.randint(1, 12), draw.random() * 0.15)
        )


def test_parameters_are_never_kept_by_reference_into_another_run(tmp_path):
    """A comparison maps the shards of its runs; a capture after it in the same process must not
    lean on them.
    """
    model = torch.nn.Linear(256, 256).eval()
    for name in ("ref", "tgt"):
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(torch.zeros(1, 256))
        run = whence.open_run(str(tmp_path / name))
        kept = [run.array(record.id) for record in run.records]  # maps the shards
        assert {type(record.elements).__name__ for record in run.records} == {"Kept"}, kept


def test_weights_that_cannot_be_read_are_told_and_parameters_copied(tmp_path):
    model = torch.nn.Linear(256, 256).eval()
    (tmp_path / "w.safetensors").write_bytes(b"nonsense")
    with (
        torch.no_grad(),
        whence.capture(model, tmp_path / "run", weights=[str(tmp_path / "w.safetensors")]),
    ):
        model(torch.zeros(1, 256))
    run = whence.open_run(str(tmp_path / "run"))
    assert any(note.kind == "weights" and "w.safetensors" in note.text for note in run.notes)
    assert all(type(record.elements).__name__ == "Kept" for record in run.records)


def test_a_limit_that_the_disk_cannot_hold_is_warned_of_before_the_command_runs(
    tmp_path, monkeypatch
):
    from whence.workflows.capture import setup

    usage = shutil.disk_usage(tmp_path)._replace(free=3_000_000)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda place: usage)
    said = []
    command = [sys.executable, "-c", "pass"]
    for limit in ("4MB", "2MB", None):
        api.run_command(command, str(tmp_path / "run"), tell=said.append, max_bytes=limit)
    warnings = [line for line in said if "--max-bytes" in line]
    assert len(warnings) == 1
    assert "3 MB left, which fills before --max-bytes 4 MB is reached" in warnings[0]
    assert said[0] == warnings[0]
