"""A loss that is scaled otherwise is not a fault where its scale is taken out before the optimiser, and
one where it is not.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import whence
from whence.replay import validation
from whence.report import answer

pytestmark = pytest.mark.torch


def by_half(training):
    (training.loss() / 2).backward()


def started_with_half(training):
    training.loss().backward(torch.tensor(0.5))


def not_halved(training):
    training.loss().backward()


def scaled_by_hand(training):
    (training.loss() * 64).backward()


class Training:
    """Two steps of two micro-batches. scale: of a loss scaler, None without one; unscales: does it
    take its scale out before gradients are clipped to `limit` (None: they are not)? fused: the step
    is. precision: of autocast.
    """

    def __init__(
        self,
        backward=by_half,
        scale=None,
        *,
        unscales=True,
        limit=0.5,
        fused=False,
        precision=None,
    ):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=fused)
        self.precision = precision
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
        self.backward, self.unscales, self.limit = backward, unscales, limit
        self.batches = torch.randn(4, 8, 16), torch.randn(4, 8, 4)
        self.batch = 0

    def loss(self):
        x, y = (part[self.batch] for part in self.batches)
        with torch.autocast("cpu", self.precision, enabled=self.precision is not None):
            outputs = self.model(x)
        return self.scaler.scale(F.mse_loss(outputs.float(), y))

    def run(self, path=None):
        if path is None:
            self.steps()
        else:
            with whence.capture(self.model, path):
                self.steps()
        return [p.detach().clone() for p in self.model.parameters()]

    def steps(self):
        for self.batch in range(4):
            self.backward(self)
            if self.batch % 2:
                if self.unscales:
                    self.scaler.unscale_(self.optimizer)
                if self.limit is not None:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()


def compared(tmp_path, reference, target):
    reference.run(tmp_path / "reference")
    target.run(tmp_path / "target")
    return whence.compare(tmp_path / "reference", tmp_path / "target")


def fused(scale, precision=None):
    """The scale is left to the step."""
    return Training(scale=scale, unscales=False, limit=None, fused=True, precision=precision)


SAME = {
    "never clipped": (Training(limit=None), Training(scale=1024.0, limit=None)),
    "left to the step": (Training(limit=None), fused(1024.0)),
    "left to the step or not": (Training(scale=512.0, limit=None), fused(1024.0)),
    "float16": (Training(), Training(scale=1024.0, precision=torch.float16)),
    "a gradient of a half": (Training(), Training(started_with_half)),
    "scales": (Training(scale=4096.0), Training(scale=512.0)),
    "a scaler": (Training(), Training(scale=1024.0)),
    "no scaler": (Training(scale=1024.0), Training()),
}


@pytest.mark.parametrize("case", SAME)
def test_a_scale_that_is_taken_out_is_a_note(tmp_path, case):
    result = compared(tmp_path, *SAME[case])
    assert result.status == "same", answer.answer(result)
    assert "the scale does not reach the optimiser" in "\n".join(result.notes)


# Clipped, gradients of any scale are the same to the optimiser.
DIFFERENT = {
    "not halved": (Training(), Training(not_halved)),
    "not halved, never clipped": (Training(limit=1e9), Training(not_halved, limit=1e9)),
    "not halved, scaled": (Training(scale=64.0), Training(not_halved, scale=64.0)),
    "not halved, float16": (
        Training(),
        Training(not_halved, scale=64.0, precision=torch.float16),
    ),
    "never taken out": (Training(limit=None), Training(scaled_by_hand, limit=None)),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_scale_that_is_not_taken_out_is_a_fault_of_the_loss(tmp_path, case):
    result = compared(tmp_path, *DIFFERENT[case])
    assert result.status == "different"
    assert result.findings[0].op_type == "loss", answer.answer(result)


def test_another_limit_is_a_fault_beside_a_scaler(tmp_path):
    result = compared(tmp_path, Training(), Training(scale=1024.0, limit=0.45))
    assert result.findings[0].op_type == "gradients", answer.answer(result)


@pytest.mark.parametrize(("scale", "skips"), [(1024.0, False), (2.0**40, True)])
def test_a_scale_that_is_left_to_the_step_is_replayed_and_not_changed(tmp_path, scale, skips):
    """Also where gradients overflow in float16, and the step does nothing."""
    sides = [fused(scale, torch.float16) for _ in range(2)]
    before = [p.detach().clone() for p in sides[0].model.parameters()]
    alone, captured = sides[0].run(), sides[1].run(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(before, alone, strict=True)) == skips
    assert all(torch.equal(a, b) for a, b in zip(alone, captured, strict=True))
    run = whence.open_run(tmp_path / "run")
    steps = [c for c in run.calls if c.phase == "optimizer" and c.kind == "module"]
    assert steps and all(c.program for c in steps)
    for call in steps:
        program = run.programs[call.program]
        bound = {ref.slot: run.array(ref.record) for ref in call.refs}
        results = validation.load(program).run({slot: bound[slot] for slot in program.inputs}, {})
        for slot, array in results.items():
            assert np.allclose(array, bound[slot], rtol=1e-5, atol=1e-9, equal_nan=True), (
                call.op,
                slot,
            )


class OverflowsOnce(Training):
    """float16, and a scale at which gradients overflow in the first step alone."""

    def __init__(self):
        super().__init__(scale=2.0**22, limit=None, precision=torch.float16)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, backoff_factor=2.0**-16)


def test_a_step_that_a_loss_scaler_leaves_out_is_told_and_ends_its_step(tmp_path):
    alone = OverflowsOnce().run()
    target = OverflowsOnce()
    result = compared(tmp_path, Training(limit=None), target)
    assert all(torch.equal(a, p) for a, p in zip(alone, target.model.parameters(), strict=True))
    assert {c.step for c in whence.open_run(tmp_path / "target").calls} == {0, 1}
    assert result.status == "undecided", answer.answer(result)
    assert "the loss scaler of the target left out step 0" in "\n".join(result.notes)
    steps = [c for c in whence.open_run(tmp_path / "target").calls if c.op == "weight"]
    assert {c.step for c in steps} == {1}


def test_clipping_before_the_scale_is_out_is_a_fault_of_the_gradients(tmp_path):
    result = compared(tmp_path, Training(scale=4096.0), Training(scale=4096.0, unscales=False))
    assert result.status == "different"
    assert result.findings[0].op_type == "gradients", answer.answer(result)


def test_a_loss_scaler_is_replayed_and_not_changed(tmp_path):
    alone, captured = Training(scale=4096.0).run(), Training(scale=4096.0).run(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(alone, captured, strict=True))
    run = whence.open_run(tmp_path / "run")
    gradients = [c for c in run.calls if c.op_type == "gradients"]
    assert [c.phase for c in gradients] == ["backward", "optimizer"] * 2
    assert all(c.program for c in gradients)
    (scale,) = {
        float(run.array(r.record)) for c in gradients for r in c.refs if "inverse" in r.slot
    }
    assert scale == 1 / 4096


def of_each_element(training):
    x, y = (part[training.batch] for part in training.batches)
    losses = F.mse_loss(training.model(x), y, reduction="none")
    losses.backward(torch.full_like(losses, 1 / losses.numel()))


def test_losses_of_other_shapes_are_compared(tmp_path):
    result = compared(tmp_path, Training(not_halved), Training(of_each_element))
    assert result.status != "same"
    assert not any(f.op_type == "gradients" for f in result.findings), answer.answer(result)


def test_a_scale_that_is_no_power_of_two_is_taken_out_behind_the_backward_pass(tmp_path):
    class Later(Training):
        def steps(self):
            for self.batch in range(4):
                self.loss().backward()
                if self.batch % 2:
                    for p in self.model.parameters():
                        p.grad.div_(self.divisor)
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    class Before(Later):
        def loss(self):
            return super().loss() / 3

    before, later = Before(), Later()
    before.divisor, later.divisor = 1, 3
    before.run(tmp_path / "reference")
    later.run(tmp_path / "target")
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status == "same", [f.sentence for f in result.findings]
    assert any("3 times the reference's" in note for note in result.notes)
