"""A training that runs for long: only some steps are recorded, the last ones wait in a ring, and the
program computes what it computes without a capture.
"""

import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import whence
from inside import whence as command
from whence.errors import UnreadableRun, UsageError
from whence.store import open_run

pytestmark = pytest.mark.torch


class Net(nn.Module):
    """A frozen layer, one that makes NaN where its input is large, and dropout."""

    def __init__(self):
        super().__init__()
        self.frozen, self.inner, self.out = nn.Linear(4, 6), Roots(), nn.Linear(6, 2)
        self.frozen.requires_grad_(False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.out(self.drop(self.inner(self.frozen(x))))


class Roots(nn.Module):
    def forward(self, x):
        return torch.sqrt(100 - x * x)


def net():
    torch.manual_seed(0)
    return Net().train()


def train(model, steps, *, bad=(), micro=1, after=lambda step: None, clip=True):
    """Losses of a training. bad: steps whose input is large. after: called behind each step."""
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        for _ in range(micro):
            x = torch.randn(3, 4, generator=draw)
            if step in bad:
                x = x + 100
            loss = nn.functional.mse_loss(model(x), torch.zeros(3, 2))
            losses.append(loss.item())
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return losses


def captured(path, count, training=None, **options):
    """The run of a training."""
    model = net()
    with whence.capture(model, str(path), force=True, **options):
        train(model, count, **(training or {}))
    return open_run(path)


def steps_of(run):
    return sorted({call.step for call in run.calls})


def said(run):
    return [note.text for note in run.notes if note.kind == "trigger"]


def test_a_recorded_step_is_whole(tmp_path):
    run = captured(tmp_path / "run", 14, {"micro": 2}, steps="3-4,13:", every=7)
    calls = {}
    for call in run.calls:
        calls.setdefault(call.step, []).append((call.phase, call.micro, call.scope, call.op))
    assert sorted(calls) == [0, 3, 4, 7, 13]
    assert all(sorted(calls[step]) == sorted(calls[3]) for step in calls)
    assert {phase for phase, *_ in calls[3]} == {"forward", "backward", "optimizer"}
    assert {micro for _, micro, *_ in calls[3]} == {0, 1}
    assert all(c.refs for c in run.calls if c.kind == "module")


def test_evaluation_inside_a_step_leaves_the_step_whole(tmp_path):
    """The model is called for evaluation between the forward pass and the optimiser's step."""
    model, draw = net(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    other = nn.Linear(4, 4)
    with whence.capture(model, str(tmp_path / "run"), every=4):
        for _ in range(9):
            loss = model(torch.randn(3, 4, generator=draw)).sum()
            with torch.no_grad():
                other(torch.ones(1, 4))
                model.out(torch.ones(1, 6))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    run = open_run(tmp_path / "run")
    whole = {c.step for c in run.calls if c.phase == "optimizer"}
    assert whole == {c.step for c in run.calls if c.phase == "backward"} == {0, 4, 8}


def parameters_after(count, tmp_path=None, **options):
    model = net()
    if tmp_path is None:
        losses = train(model, count, bad={9})
    else:
        with whence.capture(model, str(tmp_path / "run"), force=True, **options):
            losses = train(model, count, bad={9})
    return losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize(
    "options",
    [
        {"every": 5},
        {"steps": "1000:"},
        {"ring": 3, "keep": "stats"},
        {"ring": 2, "when": ["nan", "spike", "norm > 0.1"]},
    ],
)
def test_the_program_computes_what_it_computes(tmp_path, options):
    losses, parameters, state = parameters_after(14)
    backward, norm = torch.autograd.backward, nn.utils.clip_grad._get_total_norm
    losses_now, parameters_now, state_now = parameters_after(14, tmp_path, **options)
    torch.testing.assert_close(losses_now, losses, rtol=0, atol=0, equal_nan=True)
    for a, b in zip(parameters_now, parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(state, state_now)
    assert torch.autograd.backward is backward
    assert nn.utils.clip_grad._get_total_norm is norm


def test_nothing_is_looked_at_outside_of_the_windows(tmp_path):
    model = net()
    with whence.capture(model, str(tmp_path / "run"), steps="2") as session:
        seen = []
        record = session.record
        session.record = lambda *a, **k: (seen.append(1), record(*a, **k))[1]
        counts = []
        train(model, 6, after=lambda step: counts.append(len(seen)))
    assert counts[:2] == [0, 0] and counts[2] > 0 and set(counts[2:]) == {counts[2]}


@pytest.mark.parametrize("keep", ["full", "stats"])
def test_the_ring_has_the_step_that_made_nan(tmp_path, keep):
    run = captured(tmp_path / "run", 30, {"bad": {17}}, ring=3, keep=keep, for_steps=1)
    assert steps_of(run) == [15, 16, 17, 18]
    assert said(run) == ["loss is nan: recording the next 1 step; written: 3 steps before"]
    found = whence.nans(str(tmp_path / "run")).first
    assert (found.scope, found.op_type, found.step) == ("inner", "Roots", 17)
    # a parameter that no step changes was seen first in a step that the ring has forgotten
    frozen = [r for c in run.calls if c.scope == "frozen" for r in c.refs if "param" in r.slot]
    assert frozen and all(run.records[r.record].statistics is not None for r in frozen)


def test_a_ring_in_a_sound_training_writes_nothing(tmp_path):
    with pytest.raises(UnreadableRun, match="no call and no record") as told:
        captured(tmp_path / "run", 40, ring=3)
    assert "trigger" not in str(told.value)


def test_a_step_of_a_ring_is_the_step_of_a_whole_capture(tmp_path):
    whole = captured(tmp_path / "whole", 20, {"bad": {17}})
    ring = captured(tmp_path / "ring", 20, {"bad": {17}}, ring=2)

    def step(run, number):
        return [
            (c.phase, c.scope, c.op, r.slot, run.records[r.record].hash)
            for c in sorted(run.calls, key=lambda c: c.order)
            if c.step == number
            for r in c.refs
        ]

    assert step(ring, 17) == step(whole, 17)
    assert len(step(ring, 17)) > 20
    report = whence.compare(str(tmp_path / "whole"), str(tmp_path / "ring"))
    assert not report.findings


def test_the_norm_is_that_before_clipping(tmp_path):
    for clip in (True, False):
        run = captured(
            tmp_path / "run", 20, {"clip": clip, "bad": {9}}, when="norm nan", for_steps=1
        )
        assert steps_of(run) == [10] and said(run) == ["norm is nan: recording the next 1 step"]
    usual = captured(tmp_path / "run", 8, {"clip": True}, when="norm > 1.0", for_steps=1)
    assert steps_of(usual) == [1]


def test_an_exception_has_the_ring_written(tmp_path):
    model = net()

    def fails(step):
        if step == 7:
            raise ValueError("boom")

    with (
        pytest.raises(ValueError, match="boom"),
        whence.capture(model, str(tmp_path / "run"), ring=2, keep="stats"),
    ):
        train(model, 20, after=fails)
    run = open_run(tmp_path / "run")
    assert steps_of(run) == [6, 7] and run.ended == ""
    assert said(run) == ["ValueError: boom; written: 2 steps before"]


def test_a_running_capture_is_asked(tmp_path):
    path = tmp_path / "run"

    def asks(step):
        if step == 4:
            command(tmp_path, "trigger", path, "--steps", 2).check_returncode()
        if step == 12:
            command(tmp_path, "trigger", path, "--off").check_returncode()
        time.sleep(0.11)  # so often it looks at the file

    run = captured(path, 18, {"after": asks}, when="asked", every=10)
    assert steps_of(run) == [0, 5, 6, 10] or steps_of(run) == [0, 6, 7, 10]
    assert not (path / "trigger.json").exists()
    with pytest.raises(UsageError, match="nobody to ask"):
        whence.api.trigger(path)


def test_who_does_not_listen_cannot_be_asked(tmp_path):
    captured(tmp_path / "run", 1)
    done = command(tmp_path, "trigger", "run")
    assert done.returncode == 3 and "--when asked" in done.stderr
    assert command(tmp_path, "trigger", "nowhere").returncode == 3
    assert command(tmp_path, "trigger", "run", "--on", "--off").returncode == 3


SCRIPT = """
import os, signal, sys, torch
from torch import nn
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    if step == 12 and sys.argv[1] == "raise":
        raise ValueError("boom")
    if step == 12 and sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


def ran(folder, *words):
    """`whence run` of the script: how a process ends is what is tested, so it is one of its own."""
    (folder / "train.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "whence", "run", "-o", "run", *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("raise", 1, "ValueError: boom"), ("stop", 143, "SIGTERM came")],
)
def test_what_ends_a_command_has_the_ring_written(tmp_path, how, code, words):
    done = ran(tmp_path, "--ring", "3", "--", sys.executable, "train.py", how)
    assert done.returncode == code, done.stderr
    run = open_run(tmp_path / "run")
    assert steps_of(run) == [9, 10, 11]
    assert said(run) == [f"{words}; written: 3 steps before"]


def test_a_command_in_which_nothing_happened_is_no_failure(tmp_path):
    done = ran(tmp_path, "--when", "nan", "--", sys.executable, "train.py", "on")
    assert done.returncode == 0 and "nothing that was waited for happened" in done.stderr
    assert not (tmp_path / "run").exists()
