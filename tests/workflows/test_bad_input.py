"""Bad input and bad luck from outside: full, read-only and vanished media, interrupts, damaged
runs. A clear message, the right exit code, and what was already captured still readable; the
captured program always ends as it would have."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import inside
import warm
import whence
from whence.errors import StoreFailed
from whence.store import open_run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
torch.set_num_threads(1)

MODEL = """
    import sys, torch
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).eval()
"""
PROGRAM = (
    MODEL
    + """
    total = 0.0
    with torch.no_grad():
        for step in range({steps}):
            total += net(torch.full((64, 64), float(step))).double().sum().item()
    print(total)
"""
)


def program(tmp_path, text):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(text))
    return script


def python(tmp_path, script):
    return subprocess.run(
        [warm.TORCH, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout


def run(tmp_path, script, *options, output="run"):
    return inside.or_outside(tmp_path, "run", "-o", output, *options, "--", warm.TORCH, script)


def all_readable(path):
    opened = open_run(path)
    for record in opened.records:
        if record.elements is not None:
            assert opened.array(record.id).shape == record.shape
    return opened


@contextlib.contextmanager
def mounted(folder, options):
    """A tmpfs of the test's own; skips where mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"mount is not permitted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- the output folder


def test_an_existing_folder(tmp_path):
    script = program(tmp_path, PROGRAM.format(steps=1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    for options in ((), ("--force",)):
        done = run(tmp_path, script, *options)
        assert (done.returncode, done.stdout) == (3, "")
        assert "run" in done.stderr
        assert (tmp_path / "run" / "mine.txt").read_text() == "mine"


def test_an_existing_run_needs_force(tmp_path):
    script = program(tmp_path, PROGRAM.format(steps=1))
    assert run(tmp_path, script).returncode == 0
    again = run(tmp_path, script)
    assert (again.returncode, again.stdout) == (3, "")
    assert "--force" in again.stderr
    assert len(all_readable(tmp_path / "run").calls) == 4
    assert run(tmp_path, script, "--force").returncode == 0


@pytest.mark.parametrize("where", ["file/run", "/dev/full", "/dev/null/run"])
def test_a_place_that_cannot_be_a_folder(where, tmp_path):
    (tmp_path / "file").write_text("mine")
    done = run(tmp_path, program(tmp_path, PROGRAM.format(steps=1)), output=where)
    assert (done.returncode, done.stdout) == (3, "")
    assert where.partition("/run")[0] in done.stderr
    assert "bug in whence" not in done.stderr


def test_a_medium_that_fills_up_in_the_middle(tmp_path):
    script = program(tmp_path, PROGRAM.format(steps=200))
    expected = python(tmp_path, script)
    with mounted(tmp_path / "small", "size=2m") as small:
        done = run(tmp_path, script, "--max-bytes", "1GB", output=small / "run")
        assert done.stdout == expected
        assert done.returncode == 0
        assert "capture stopped, the program goes on" in done.stderr
        assert "No space left" in done.stderr
        opened = all_readable(small / "run")
        assert "No space left" in opened.ended
        assert len(opened.records) > 10
        compared = inside.or_outside(tmp_path, "compare", small / "run", small / "run")
        assert "neither run is whole: " in compared.stdout.splitlines()[0]
        assert "No space left" in compared.stdout
        shown = inside.or_outside(tmp_path, "show", small / "run")
        assert shown.returncode == 0
        assert "No space left" in shown.stdout + shown.stderr


def test_a_medium_that_is_full_from_the_start(tmp_path):
    script = program(tmp_path, PROGRAM.format(steps=3))
    expected = python(tmp_path, script)
    with mounted(tmp_path / "small", "size=64k") as small:
        done = run(tmp_path, script, output=small / "run")
    assert done.stdout in ("", expected)
    assert "No space left" in done.stderr
    assert done.returncode == 3


def test_a_medium_that_is_read_only(tmp_path):
    with mounted(tmp_path / "fixed", "size=1m,ro") as fixed:
        done = run(tmp_path, program(tmp_path, PROGRAM.format(steps=1)), output=fixed / "run")
        assert (done.returncode, done.stdout) == (3, "")
        assert "Read-only" in done.stderr
        with (
            pytest.raises(StoreFailed, match="Read-only"),
            whence.capture(torch.nn.ReLU(), fixed / "run"),
        ):
            pytest.fail("entered")


def test_a_medium_that_becomes_read_only(tmp_path):
    net = torch.nn.Linear(64, 64).eval()
    with mounted(tmp_path / "turns", "size=20m") as turns, torch.no_grad():
        with whence.capture(net, turns / "run") as session:
            for step in range(4):
                out = net(torch.full((64, 64), float(step)))
                if step == 1:
                    subprocess.run(
                        ["mount", "-o", "remount,ro,force", str(turns)], capture_output=True
                    )
            assert out.shape == (64, 64)
        del session
        opened = all_readable(turns / "run")
        assert len(opened.calls) >= 1


def test_a_folder_that_is_deleted_under_the_capture(tmp_path):
    text = PROGRAM.format(steps=40).replace(
        "total +=", "step == 5 and __import__('shutil').rmtree('run')\n            total +="
    )
    script = program(tmp_path, text)
    (tmp_path / "run").mkdir()
    expected = python(tmp_path, script)
    done = run(tmp_path, script)
    assert done.stdout == expected
    assert "bug in whence" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 3


# ---- interrupts


def interrupted(tmp_path, words, ready):
    """Start a command of ours in a group of its own, wait for `ready` on its stdout, press Ctrl-C,
    and return (code, stderr).
    """
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        words, cwd=tmp_path, text=True, start_new_session=True, **streams
    ) as process:
        for line in process.stdout:
            if line.startswith(ready):
                break
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=120)
        return process.returncode, told


def test_ctrl_c_during_a_capture(tmp_path):
    script = program(
        tmp_path,
        MODEL
        + """
    with torch.no_grad():
        for step in range(100_000):
            net(torch.full((64, 64), float(step)))
            print("step", step, flush=True)
    """,
    )
    whence_run = [sys.executable, "-m", "whence", "run", "-o", "run", "--max-bytes", "50MB"]
    words = [*whence_run, "--", sys.executable, str(script)]
    code, told = interrupted(tmp_path, words, "step 7")
    assert code == 130, told
    assert "bug in whence" not in told
    opened = all_readable(tmp_path / "run")
    assert opened.ended == ""  # python unwound, so the capture ended in order
    assert max(s.step for s in opened.steps) >= 7


def test_ctrl_c_while_whence_itself_looks(tmp_path):
    """The interrupt falls into our own code: the program gets it, later calls hang at the right
    place.
    """
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    raised = []

    def on_record(op_type, name, value):
        if op_type == "ReLU" and not raised:
            raised.append(name)
            raise KeyboardInterrupt
        return

    with torch.no_grad(), whence.capture(net, tmp_path / "run", on_record=on_record):
        with pytest.raises(KeyboardInterrupt):
            net(torch.ones(1, 4))
        net(torch.ones(2, 4))
    opened = all_readable(tmp_path / "run")
    assert opened.ended == ""
    roots = [c for c in opened.calls if c.parent == -1]
    assert [c.error for c in roots] == ["KeyboardInterrupt", ""]
    assert [c.scope for c in opened.calls if c.parent == roots[1].id] == ["0", "1"]


def captured(tmp_path, name, change=None, keep="full"):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]).eval()
    if change is not None:
        change(net)
    with torch.no_grad(), whence.capture(net, tmp_path / name, keep=keep):
        for step in range(3):
            net(torch.full((64, 64), step / 7))
    return tmp_path / name


def test_ctrl_c_during_a_comparison(tmp_path):
    captured(tmp_path, "a"), captured(tmp_path, "b", lambda net: net[1].weight.data.mul_(1.1))
    code = """
        import signal, sys
        sys.argv = ["whence"]
        from whence.comparison.paired_runs import PairedRuns
        def told(self):
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not interrupted")
        PairedRuns.measure = told
        from whence import cli
        cli.main(["compare", "a", "b", "-o", "cmp"])
    """
    done = subprocess.run(
        [warm.TORCH, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip() == "whence: interrupted"
    assert inside.or_outside(tmp_path, "compare", "a", "b", "-o", "cmp", "--force").returncode == 1


# ---- a model that raises


def test_a_model_that_raises_in_the_middle_of_a_step(tmp_path):
    script = program(
        tmp_path,
        MODEL
        + """
    with torch.no_grad():
        for step in range(5):
            net(torch.ones(2, 64 if step < 3 else 63))
    """,
    )
    done = run(tmp_path, script)
    assert done.returncode == 1
    assert "mat1 and mat2 shapes cannot be multiplied" in done.stderr
    opened = all_readable(tmp_path / "run")
    assert opened.ended == ""
    roots = [c for c in opened.calls if c.parent == -1]
    assert [c.step for c in roots] == [0, 1, 2, 3]
    assert roots[-1].error.startswith("RuntimeError: mat1 and mat2")
    good = captured(tmp_path, "good")
    assert inside.or_outside(tmp_path, "compare", good, tmp_path / "run").returncode in (1, 2)


# ---- runs given to `whence compare`


def only_folder(run_path):
    return next(p for p in Path(run_path).iterdir() if p.is_dir())


def test_a_run_that_is_not_there(tmp_path):
    good = captured(tmp_path, "good")
    done = inside.or_outside(tmp_path, "compare", good, "missing")
    assert (done.returncode, done.stdout) == (3, "")
    assert "missing" in done.stderr
    assert not (tmp_path / "whence-cmp").exists()


def test_a_folder_that_is_no_run(tmp_path):
    good = captured(tmp_path, "good")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").write_text("x")
    done = inside.or_outside(tmp_path, "compare", "other", good)
    assert done.returncode == 3
    assert "other" in done.stderr


def test_a_run_of_a_later_version(tmp_path):
    good, later = captured(tmp_path, "good"), captured(tmp_path, "later")
    info = json.loads((later / "run.json").read_text())
    (later / "run.json").write_text(json.dumps({**info, "format": 99}))
    done = inside.or_outside(tmp_path, "compare", good, later)
    assert done.returncode == 3
    assert "99" in done.stderr
    assert "later" in done.stderr


def test_a_truncated_shard(tmp_path):
    good, cut = (
        captured(tmp_path, "good"),
        captured(tmp_path, "cut", lambda net: net[2].weight.data.add_(1e-3)),
    )
    (shard,) = only_folder(cut).glob("shard-*.safetensors")
    os.truncate(shard, shard.stat().st_size // 2)
    done = inside.or_outside(tmp_path, "compare", good, cut)
    assert done.returncode in (1, 2), done.stderr
    assert "weight: hashes differ" in done.stdout
    assert "bug in whence" not in done.stderr
    assert inside.or_outside(tmp_path, "show", cut).returncode == 0


def test_tensors_that_cannot_be_read_are_named_with_the_reason(tmp_path):
    good, cut = tmp_path / "good", tmp_path / "cut"
    for folder in (good, cut):
        folder.mkdir()
        for name in ("embed", "norm", "up", "down"):
            np.save(folder / f"{name}.npy", np.arange(500, dtype=np.float32))
    for name in ("norm", "up"):
        os.truncate(cut / f"{name}.npy", 1000)
    done = inside.or_outside(tmp_path, "compare", good, cut)
    assert done.returncode == 2, done.stdout + done.stderr
    notes = [line for line in done.stdout.splitlines() if "not measured" in line]
    assert notes == [
        f"note: 1 pair of tensors not measured, {name} output.0: {cut}/{name}.npy: float32 (500,) "
        "needs 2000 bytes, 872 are there"
        for name in ("norm", "up")
    ]


def test_a_half_written_run(tmp_path):
    good, half = captured(tmp_path, "good"), captured(tmp_path, "half")
    folder = only_folder(half)
    (folder / "index.safetensors").unlink()
    journal = (folder / "journal.jsonl").read_bytes()
    (folder / "journal.jsonl").write_bytes(journal[: len(journal) * 2 // 3])
    (folder / "status.json").write_text('{"ended": "running", "error": ""}')
    done = inside.or_outside(tmp_path, "compare", good, half)
    assert done.returncode in (0, 1, 2), done.stderr
    assert (
        "uncleanly" in done.stdout
        or "unclean" in done.stderr
        or "still being written" in done.stdout
    )
    assert "unmatched" in done.stdout


def test_nothing_in_common(tmp_path):
    good = captured(tmp_path, "good")

    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv1d(1, 1, 1)

        def forward(self, x):
            return self.conv(x)

    other = Other().eval()
    with torch.no_grad(), whence.capture(other, tmp_path / "other"):
        other(torch.ones(1, 1, 5))
    done = inside.or_outside(tmp_path, "compare", good, tmp_path / "other")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "unmatched" in done.stdout


def test_an_empty_run(tmp_path):
    good = captured(tmp_path, "good")
    with whence.capture(torch.nn.ReLU(), tmp_path / "empty"):
        pass
    done = inside.or_outside(tmp_path, "compare", good, tmp_path / "empty")
    assert done.returncode in (2, 3)
    assert "empty" in done.stderr
