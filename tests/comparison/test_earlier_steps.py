"""Parameters of a training whose capture begins in the middle: what changed them before is unseen."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import whence
from whence.errors import UsageError
from whence.results import Status

pytestmark = pytest.mark.torch

STEPS = 4


class Net(nn.Module):
    """A container with a parameter of its own, and a layer that counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16)
        self.scale = nn.Parameter(torch.ones(16))
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))) * self.scale)


def trained(run, steps, *, rate_of_step=None, frozen=(), edit=None, fused=False, **settings):
    """A run of which only some steps are recorded. rate_of_step: learning rates other than 0.01.
    frozen: modules that are not trained. edit: called with the model before it is trained.
    """
    torch.manual_seed(0)
    net = Net()
    for name in frozen:
        net.get_submodule(name).requires_grad_(False)
    if edit is not None:
        with torch.no_grad():
            edit(net)
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01, fused=fused, **settings)
    with whence.capture(net, run, steps=steps):
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(step)
            optimizer.param_groups[0]["lr"] = (rate_of_step or {}).get(step, 0.01)
            x, y = (torch.randn(6, n, generator=draw) for n in (8, 4))
            F.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


def compared(tmp_path, steps, **target):
    reference = trained(tmp_path / "reference", steps, frozen=target.get("frozen", ()))
    return whence.compare(reference, trained(tmp_path / "target", steps, **target))


@pytest.mark.parametrize("steps", ["0:4", "2:4", "3"])
def test_another_form_of_the_optimiser_is_rounding_wherever_the_capture_begins(steps, tmp_path):
    assert compared(tmp_path, steps, fused=True).status == Status.SAME


def test_what_steps_before_made_of_the_parameters_is_no_finding(tmp_path):
    result = compared(tmp_path, "3", rate_of_step={1: 0.02})
    assert (result.status, result.findings) == (Status.UNDECIDED, ())
    # of a layer, and of a container of its own, which no leaf reads
    undetermined = {(row.name, row.verdict) for row in result.rows if row.verdict == "undetermined"}
    assert ("first", "undetermined") in undetermined
    assert "scale differs (rel_l2 0.0" in result.headline
    assert "at step 3, the first that was recorded; what steps 0 to 2 made of it" in result.headline
    assert "whence diverge" in result.next[0].command


def test_a_wrong_step_is_named_at_parameters_that_parted_before(tmp_path):
    result = compared(tmp_path, "2:4", weight_decay=0.5)
    first = result.findings[0]
    assert (result.status, first.op_type, first.step) == (Status.DIFFERENT, "AdamW", 2)
    assert "weight_decay" in first.sentence


def test_what_no_step_can_change_is_compared_exactly(tmp_path):
    def edit(net):
        net.first.weight[3, 3] += 0.1

    result = compared(tmp_path, "3", frozen=["first"], edit=edit)
    first = result.findings[0]
    assert (first.name, first.slot, first.verdict) == ("first", "param.weight", "param-diff")
    assert first.confidence == "certain"


def test_in_the_first_step_every_parameter_is_compared_exactly(tmp_path):
    def edit(net):
        net.scale[2] += 0.1

    result = compared(tmp_path, "0:2", edit=edit)
    assert (result.findings[0].slot, result.findings[0].verdict) == ("param.scale", "param-diff")


def test_a_part_of_a_training_step_is_not_located_in_the_forward_pass(tmp_path):
    """What a module returns cannot take the place of a step of an optimiser."""
    result = compared(tmp_path, "0:2", weight_decay=0.5)
    assert result.findings[0].op_type == "AdamW"
    assert not any("locate" in step.command for step in result.next)
    with pytest.raises(UsageError, match="part of a training step"):
        whence.locate(result, command=["python", "train.py"])
