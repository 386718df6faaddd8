"""Gradients that one training makes of a batch at once, and the other of its parts or otherwise."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import whence
from whence.align.batches.align import align_batches

pytestmark = pytest.mark.torch


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x).tanh())


def trained(path, parts):
    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 4)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with whence.capture(model, path):
        for _ in range(2):
            optimiser.zero_grad()
            for part in x.chunk(parts):
                (model(part).square().mean() / parts).backward()
            optimiser.step()
    return whence.open_run(path)


def test_backward_passes_stay_with_the_calls_that_their_forward_calls_went_to(tmp_path):
    runs = trained(tmp_path / "whole", 1), trained(tmp_path / "parts", 2)
    aligned = align_batches(*runs)
    target = aligned.target.calls
    by_order = {call.order: call for call in target}
    backward = [c for c in target if c.phase == "backward" and c.op_type == "Linear"]
    assert len(backward) == 8
    for call in backward:
        forward = by_order[call.forward]
        assert (forward.scope, forward.phase, forward.step) == (call.scope, "forward", call.step)
    assert whence.compare(tmp_path / "whole", tmp_path / "parts").status == "same"


@pytest.mark.parametrize(("factor", "is_same"), [(1.0, True), (2.0, False)])
def test_gradients_without_a_backward_pass_are_held_to_the_step(tmp_path, factor, is_same):
    for name in ("backward", "grad"):
        torch.manual_seed(0)
        model, x = Two(), torch.randn(4, 4)
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        with whence.capture(model, tmp_path / name):
            for _ in range(2):
                optimiser.zero_grad()
                loss = model(x).square().mean()
                if name == "backward":
                    loss.backward()
                else:
                    parameters = list(model.parameters())
                    gradients = torch.autograd.grad(loss, parameters)
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient
                    model.b.weight.grad *= factor
                optimiser.step()
    result = whence.compare(tmp_path / "backward", tmp_path / "grad")
    assert (result.status == "same") == is_same
