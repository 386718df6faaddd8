"""Does everything that a model is given, and each adapter and expert in it, reach an output?"""

import pytest
import torch
from torch import nn

import whence
from whence.report.probe import probed_text
from whence.results import Held, Status

pytestmark = pytest.mark.torch

IDS = torch.tensor([[5, 9, 3, 7, 11, 2]])


class Net(nn.Module):
    """Ids and a condition to logits. sees: what is read of them."""

    def __init__(self, sees=("condition", "mask"), dropped=None, **parts):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.sound, self.head = nn.Embedding(16, 8), nn.Linear(4, 8), nn.Linear(8, 16)
        self.sees, self.dropped = sees, dropped
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, input_ids, condition=None, mask=None, _unused=None):
        h = self.embed(input_ids)
        if self.dropped is not None:
            h = torch.cat([h[:, : self.dropped], h[:, self.dropped + 1 :]], 1)
        if condition is not None:
            c = self.sound(condition)
            h = h + c[:, None] * ("condition" in self.sees)
        if mask is not None and "mask" in self.sees:
            h = h * mask[..., None]
        h = h + h.mean(1, keepdim=True)
        for name in ("experts", "adapted"):
            h = getattr(self, name, nn.Identity())(h)
        return self.head(h)


class Experts(nn.Module):
    """Two of three experts are chosen. dead: none counts."""

    def __init__(self, dead=False):
        super().__init__()
        self.experts, self.dead = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), dead

    def forward(self, h):
        made = self.experts[0](h) + self.experts[2](h)
        return h + made * (not self.dead)


class Lora(nn.Module):
    """A linear layer with an adapter whose second weight is zero, as they begin."""

    active_adapters = ("default",)

    def __init__(self, used=True):
        super().__init__()
        self.base, self.used = nn.Linear(8, 8), used
        for letter, shape in (("A", (8, 2)), ("B", (2, 8))):
            parts = {name: nn.Linear(*shape, bias=False) for name in ("default", "other")}
            setattr(self, f"lora_{letter}", nn.ModuleDict(parts))
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, h):
        low = self.lora_B["default"](self.lora_A["default"](h))
        return self.base(h) + (low if self.used else 0)


def asked(model, **inputs):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    result = whence.probe(
        model.eval(), {"input_ids": IDS, **inputs}, properties=["sensitivity"], causal=False
    )
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    return result


def test_everything_that_is_read_is_reached():
    result = asked(Net(), condition=torch.randn(1, 4), mask=torch.ones(1, 6, dtype=torch.long))
    answer = result["sensitivity"]
    assert (result.status, answer.held) == (Status.SAME, Held.REACHED)
    assert "3 tensor arguments, 6 positions" in answer.power
    assert "1 of 1 properties tested" in probed_text(result)


def test_a_condition_that_is_dropped_is_named_with_the_module_at_which_it_ends():
    result = asked(Net(sees=()), condition=torch.randn(1, 4))
    assert result.status == Status.DIFFERENT
    (dead,) = (v for v in result["sensitivity"].variants if v.held == Held.VIOLATED)
    assert (dead.name, dead.first.scope, dead.first.op_type) == ("condition", "sound", "Linear")
    assert "condition reaches no output" in probed_text(result)


def test_a_mask_that_no_module_is_given():
    answer = asked(Net(sees=()), mask=torch.ones(1, 6, dtype=torch.long))["sensitivity"]
    assert answer.cause == "mask reaches no output: no module inside is given it"


def test_a_position_that_is_cut_away():
    answer = asked(Net(dropped=3))["sensitivity"]
    assert answer.cause.startswith("input_ids at position 3 reaches no output")


def test_what_the_signature_declares_unused_is_no_fault():
    result = asked(Net(), _unused=torch.ones(3))
    assert result.status == Status.SAME
    assert any("_unused" in note for note in result["sensitivity"].notes)


@pytest.mark.parametrize("dead", [False, True])
def test_experts(dead):
    """One that no token chose is not tested; a block of which none counts is dead."""
    answer = asked(Net(experts=Experts(dead)))["sensitivity"]
    assert answer.held == (Held.VIOLATED if dead else Held.REACHED)
    assert any("experts.experts.1" in note for note in answer.notes) == (not dead)
    assert "expert" in answer.power


@pytest.mark.parametrize("used", [False, True])
def test_adapters(used):
    answer = asked(Net(adapted=Lora(used)))["sensitivity"]
    assert answer.held == (Held.REACHED if used else Held.VIOLATED)
    assert ("adapter default of adapted reaches no output" in answer.cause) == (not used)
    assert any("1 adapters that are not active" in note for note in answer.notes)


def test_a_call_that_does_not_repeat_tells_nothing():
    class Drawn(Net):
        calls = 0

        def forward(self, input_ids):
            Drawn.calls += 1
            return super().forward(input_ids) + Drawn.calls

    assert asked(Drawn())["sensitivity"].held == Held.UNKNOWN


def test_nothing_tested_is_no_pass():
    result = whence.probe(Net().eval(), {"input_ids": IDS}, properties=["packing", "chunking"])
    assert result.status == Status.UNDECIDED
    assert "nothing was tested" in probed_text(result)
