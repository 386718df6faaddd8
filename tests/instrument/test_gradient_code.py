"""What code does to gradients between a backward pass and a step is recorded as a program, and stays
what it is.
"""

import numpy as np
import pytest
import torch
from torch import nn

import whence
from whence.replay import validation

pytestmark = pytest.mark.torch


def by_number(parameters):
    for p in parameters:
        p.grad.div_(3)


def through_data(parameters):
    for p in parameters:
        half = p.grad.mul_(1) / 2
        p.grad.data.sub_(half + p.grad, alpha=0.5)


def into_buffers(parameters):
    for p in parameters:
        whole = torch.empty_like(p.grad)
        torch.div(p.grad, 3, out=whole)
        p.grad.copy_(whole)


def anew(parameters):
    for p in parameters:
        p.grad = p.grad / 3


def on_lists(parameters):
    torch._foreach_div_([p.grad for p in parameters], 3)


def onto_new_lists(parameters):
    for p, half in zip(parameters, torch._foreach_mul([p.grad for p in parameters], 0.5)):
        p.grad = half
    torch._foreach_add_([p.grad for p in parameters], [p.detach() for p in parameters], alpha=0.1)


def decayed(parameters):
    for p in parameters:
        p.grad.add_(p.detach(), alpha=0.1)


def clipped_by_hand(parameters):
    norm = torch.stack([p.grad.pow(2).sum() for p in parameters]).sum().sqrt()
    factor = torch.clamp(0.1 / (norm + 1e-6), max=1.0)
    for p in parameters:
        p.grad.mul_(factor)


def logged(parameters):
    assert sum(p.grad.norm().item() for p in parameters) > 0


def swapped(parameters):
    first, second = parameters[0], parameters[2]
    first.grad, second.grad = second.grad.clone(), first.grad.clone()


def with_noise(parameters):
    for p in parameters:
        p.grad.add_(torch.randn_like(p), alpha=1e-3)


def train(change, path=None, steps=2, clip=True):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    parameters = list(net.parameters())

    def run():
        for _ in range(steps):
            net(torch.randn(4, 8)).square().mean().backward()
            change(parameters)
            if clip:
                nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
            optimizer.zero_grad()

    if path is None:
        run()
    else:
        with whence.capture(net, path):
            run()
    return [p.detach().clone() for p in parameters]


CHANGES = (
    by_number,
    through_data,
    into_buffers,
    anew,
    on_lists,
    onto_new_lists,
    decayed,
    clipped_by_hand,
    logged,
    swapped,
)


@pytest.mark.parametrize("change", (*CHANGES, with_noise), ids=lambda c: c.__name__)
def test_gradients_stay_bitwise_what_they_are(change, tmp_path):
    seen, bare = train(change, tmp_path / "run"), train(change)
    assert all(torch.equal(a, b) for a, b in zip(seen, bare, strict=True))


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_what_code_does_to_gradients_can_be_replayed(change, tmp_path):
    train(change, tmp_path / "run")
    run = whence.open_run(tmp_path / "run")
    calls = [call for call in run.calls if call.op == "gradients"]
    assert [bool(call.program) for call in calls] == [True, True], calls[0].no_program
    operations = run.programs[calls[0].program].operations
    assert not any("out" in operation.kwargs for operation in operations)
    train(change, tmp_path / "again")
    assert whence.compare(tmp_path / "run", tmp_path / "again").status == "same"


def test_code_that_draws_numbers_has_no_program(tmp_path):
    train(with_noise, tmp_path / "run")
    run = whence.open_run(tmp_path / "run")
    assert {c.no_program for c in run.calls if c.op == "gradients"} == {
        "code that is not recorded changed the gradients"
    }


def test_a_number_out_of_a_tensor_is_no_constant(tmp_path):
    def by_its_own_norm(parameters):
        share = 0.1 / nn.utils.clip_grad_norm_(parameters, 1e9).item()
        for p in parameters:
            p.grad.mul_(share)

    train(by_its_own_norm, tmp_path / "run", clip=False)
    run = whence.open_run(tmp_path / "run")
    assert not any(call.program for call in run.calls if call.op == "gradients")


def test_another_number_is_named_with_its_parameter(tmp_path):
    def one_doubled(parameters):
        by_number(parameters)
        parameters[2].grad.mul_(2)

    train(by_number, tmp_path / "reference", clip=False)
    train(one_doubled, tmp_path / "target", clip=False)
    first = whence.compare(tmp_path / "reference", tmp_path / "target").findings[0]
    assert (first.name, first.phase, first.slot) == (
        "Sequential/gradients",
        "optimizer",
        "output.2.weight",
    )
    assert "mul" in first.sentence


def by_norm(parameters):
    nn.utils.clip_grad_norm_(parameters, 0.1)


def by_largest_one_at_a_time(parameters):
    nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=float("inf"), foreach=False)


def by_value(parameters):
    nn.utils.clip_grad_value_(parameters, 0.01)


def by_groups_that_are_logged(parameters):
    for p in parameters:
        nn.utils.clip_grad_norm_([p], 0.1).item()


@pytest.mark.parametrize(
    ("clip", "settings"),
    (
        (by_norm, {"clip_grad_norm_.max_norm": 0.1, "clip_grad_norm_.norm_type": 2.0}),
        (
            by_largest_one_at_a_time,
            {"clip_grad_norm_.max_norm": 0.1, "clip_grad_norm_.norm_type": "inf"},
        ),
        (by_value, {"clip_grad_value_.clip_value": 0.01}),
        (
            by_groups_that_are_logged,
            {"clip_grad_norm_.max_norm": 0.1, "clip_grad_norm_.norm_type": 2.0},
        ),
    ),
)
def test_clipping_is_recorded_as_it_runs_with_its_settings(clip, settings, tmp_path):
    def logged_and_clipped(parameters):
        torch.tensor(0.3).item()
        clip(parameters)

    seen = train(logged_and_clipped, tmp_path / "run", clip=False)
    bare = train(logged_and_clipped, clip=False)
    assert all(torch.equal(a, b) for a, b in zip(seen, bare, strict=True))
    run = whence.open_run(tmp_path / "run")
    calls = [call for call in run.calls if call.op == "gradients"]
    assert [call.arguments for call in calls] == [settings] * 2
    for call in calls:
        program = run.programs[call.program]
        assert all(operation.guard is None for operation in program.operations)
        bound = {ref.slot: run.array(ref.record) for ref in call.refs}
        made = validation.load(program).run({slot: bound[slot] for slot in program.inputs}, {})
        assert all(np.allclose(array, bound[slot], rtol=1e-5) for slot, array in made.items())


class Text(nn.Module):
    """Returns an object that a capture does not look into."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, ids):
        class Result:
            logits = self.head(self.embed(ids))

        return Result


@pytest.mark.parametrize("frozen", ("embed.weight", "head.bias"))
def test_a_frozen_parameter_is_named_below_a_model_that_returns_an_object(frozen, tmp_path):
    for name in ("reference", "target"):
        torch.manual_seed(0)
        model = Text()
        if name == "target":
            model.get_parameter(frozen).requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        with whence.capture(model, tmp_path / name):
            model(torch.arange(9)).logits.square().mean().backward()
            optimizer.step()
    first = whence.compare(tmp_path / "reference", tmp_path / "target").findings[0]
    assert first.name == frozen.split(".")[0]
    assert "frozen in the target" in first.sentence


@pytest.mark.parametrize("several", (False, True))
def test_each_loss_of_several_micro_batches_is_a_call_of_its_own(several, tmp_path):
    """As the schedules of pipelines do: all forward passes and losses, then all backward passes."""

    def run(model):
        if several:
            losses = [model(torch.full((2, 4), k + 1.0)).square().mean() for k in range(3)]
            for loss in losses:
                loss.backward()
        else:
            for k in range(3):
                model(torch.full((2, 4), k + 1.0)).square().mean().backward()

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with whence.capture(model, tmp_path / "run"):
        run(model)
        optimizer.step()
    calls = [c for c in whence.open_run(tmp_path / "run").calls if c.op == "loss" and not c.error]
    forward = [c for c in calls if c.phase == "forward"]
    assert [c.micro for c in forward] == [0, 1, 2]
    assert all(c.program for c in calls)
    assert len({c.program for c in forward}) == 1
    assert sum(c.phase == "backward" for c in calls) == 3
