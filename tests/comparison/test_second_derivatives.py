"""Trainings whose loss is made of derivatives: penalties on gradients, differential equations,
forces as the derivative of an energy.
"""

import pytest
import torch
from torch import nn

import whence
from split_layers import run_in_parts

pytestmark = pytest.mark.torch


def mlp(inputs):
    return nn.Sequential(
        nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)
    )


def derivative(of, by):
    return torch.autograd.grad(of.sum(), by, create_graph=True)[0]


def penalty(model, draw, weight):
    """On the norm of the derivative by the input, as critics of adversarial trainings have it."""
    x = torch.randn(64, 4, generator=draw).requires_grad_()
    scores = model(x)
    return scores.mean() + weight * (derivative(scores, x).norm(dim=1) - 1).square().mean()


def equation(model, draw, weight):
    """The residual of a differential equation of second order."""
    x = torch.rand(64, 4, generator=draw).requires_grad_()
    u = model(x)
    first = derivative(u, x)
    second = derivative(first[:, 0], x)[:, 0]
    return (first[:, 1] - weight * second).square().mean() + u.square().mean()


class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = mlp(4)

    def forward(self, positions):
        positions = positions.detach().requires_grad_()
        energy = self.energy(positions)
        return energy, -derivative(energy, positions)


def forces(model, draw, weight):
    energy, force = model(torch.randn(64, 4, generator=draw))
    return energy.square().mean() + weight * (force - 1).square().mean()


LOSSES = {penalty: lambda: mlp(4), equation: lambda: mlp(4), forces: Forces}


def train(loss, path=None, weight=1.0, parts=False):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LOSSES[loss]()
    if parts:
        run_in_parts(model)
    optimizer, draw = torch.optim.AdamW(model.parameters(), 1e-3), torch.Generator().manual_seed(3)

    def run():
        for _ in range(2):
            optimizer.zero_grad()
            loss(model, draw, weight).backward()
            optimizer.step()

    if path is None:
        run()
    else:
        with whence.capture(model, path):
            run()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_other_rounding_is_silent(loss, tmp_path):
    bare, seen = train(loss), train(loss, tmp_path / "reference")
    assert all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))
    train(loss, tmp_path / "target", parts=True)
    assert whence.compare(tmp_path / "reference", tmp_path / "target").status == "same"


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_another_weight_is_named_at_the_loss(loss, tmp_path):
    train(loss, tmp_path / "reference")
    train(loss, tmp_path / "target", weight=1.1)
    first = whence.compare(tmp_path / "reference", tmp_path / "target").findings[0]
    assert (first.op_type, first.phase) == ("loss", "")
    assert "is 1.0 in the reference, 1.1 in the target" in first.sentence


@pytest.mark.parametrize("loss", (penalty, equation), ids=lambda loss: loss.__name__)
def test_a_loss_that_differentiates_says_that_its_gradients_are_not_replayed(loss, tmp_path):
    train(loss, tmp_path / "run")
    calls = whence.open_run(tmp_path / "run").calls
    losses = [c for c in calls if c.op_type == "loss" and c.kind == "module"]
    assert {(c.phase, c.no_program) for c in losses} == {
        ("forward", ""),
        ("backward", "its forward pass runs a backward pass itself"),
    }
