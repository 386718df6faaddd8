"""Random numbers that modules draw are inputs of their programs: replays take them as they are."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import whence
from whence.records.slots import is_drawn
from whence.report import answer

pytestmark = pytest.mark.torch


class Noisy(nn.Module):
    """Dropout of its own and as a module, stochastic depth, noise added; `rate` and `scale` are
    for faults.
    """

    def __init__(self, rate=0.1, scale=1.0, width=1.0):
        super().__init__()
        self.lift, self.drop, self.lower = nn.Linear(16, 16), nn.Dropout(rate), nn.Linear(16, 16)
        self.scale, self.width = scale, width

    def forward(self, x):
        scores = torch.softmax(x @ x.transpose(-1, -2) / 4, -1)
        scores = F.dropout(scores, 0.2, self.training) * self.scale
        x = self.drop(torch.tanh(scores @ self.lift(x)))
        if self.training:
            x = x * (torch.rand(x.shape[0], 1, 1) > 0.1) / 0.9
            x = x + torch.empty_like(x).normal_(0.0, self.width) * 0.01
        return self.lower(x)


def trained(path=None, seed=1, block=Noisy, device_dropout=False, **faults):
    """Three steps of training; parameters, gradients and the generator afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(block(), block(**faults), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(4, 8, 16), torch.randn(4, 8, 4)
    torch.manual_seed(seed)

    def steps():
        for _ in range(3):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    if path is None:
        steps()
    else:
        with whence.capture(model, path):
            steps()
    return [*model.parameters(), *(p.grad for p in model.parameters()), torch.get_rng_state()]


def compared(tmp_path, *, reference=None, **target):
    trained(tmp_path / "reference", **(reference or {}))
    trained(tmp_path / "target", **target)
    return whence.compare(tmp_path / "reference", tmp_path / "target")


def test_listening_changes_nothing(tmp_path):
    alone, captured = trained(), trained(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(alone, captured, strict=True))


def test_every_call_has_a_program_with_what_it_drew(tmp_path):
    trained(tmp_path / "run")
    run = whence.open_run(tmp_path / "run")
    forward = [c for c in run.calls if c.kind == "module" and c.phase == "forward"]
    assert forward and all(c.program for c in forward), [c.no_program for c in forward]
    for call in forward:
        slots = [r.slot for r in call.refs if is_drawn(r.slot)]
        assert set(slots) == {d.slot for d in run.programs[call.program].draws}
    drops = [c for c in forward if c.scope == "0.drop"]
    masks = [run.array(next(r.record for r in c.refs if is_drawn(r.slot))) for c in drops]
    assert len(masks) == 3 and not np.array_equal(masks[0], masks[1])
    assert all(set(np.unique(mask)) <= {0.0, 1.0} for mask in masks)
    (drawn,) = run.programs[drops[0].program].draws
    assert drawn.operator == "aten.bernoulli_.float" and drawn.settings == {"p": 0.9}


def test_runs_of_other_seeds_are_the_same(tmp_path):
    result = compared(tmp_path, seed=2)
    assert result.status == "same", answer.answer(result)
    assert result.random_numbers.name == "0" and result.random_numbers.calls == 4 * 3
    said = answer.answer(result)
    assert "or follows from other random numbers" in said
    assert "differ in 12 calls, first in 0 (Noisy), step 0" in said


def test_runs_of_one_seed_say_nothing_of_it(tmp_path):
    result = compared(tmp_path)
    assert result.random_numbers is None and "bitwise identical" in answer.answer(result)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "fault, place, words",
    [
        ({"rate": 0.2}, "1.drop", "div_.Scalar: other is 0.9 in the reference, 0.8 in the target"),
        ({"scale": 1.01}, "1", "1.01 in the target"),
        ({"width": 2.0}, "1", "normal_: std is 1.0 in the reference, 2.0 in the target"),
        ({"rate": 0.0}, "1.drop", "only the reference draws random numbers"),
    ],
)
def test_a_fault_is_named_whatever_was_drawn(tmp_path, seed, fault, place, words):
    result = compared(tmp_path, seed=seed, **fault)
    assert result.status == "different"
    assert result.findings[0].name == place, answer.answer(result)
    assert words in answer.answer(result)


class Biased(TorchDispatchMode):
    """A kernel that keeps half of what dropout is to keep."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bernoulli_.float:
            args = args[0], args[1] / 2
        return func(*args, **(kwargs or {}))


def test_numbers_that_are_not_spread_as_asked_are_a_fault(tmp_path):
    trained(tmp_path / "reference")
    with Biased():
        trained(tmp_path / "target")
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status == "different" and result.findings[0].name == "0"
    assert "bernoulli_.float draws 0.8" in answer.answer(result)


class Repeating(Noisy):
    """Sets the generator back at every call."""

    def forward(self, x):
        torch.manual_seed(7)
        return super().forward(x)


def test_the_same_numbers_at_every_step_are_a_fault(tmp_path):
    result = compared(tmp_path, block=Repeating)
    assert result.status == "different"
    said = answer.answer(result)
    assert "draws the same 256 random numbers as 0 in step 0; the reference others" in said
    both = tmp_path / "both"
    assert compared(both, reference={"block": Repeating}, block=Repeating).status == "same"


class Fused(nn.Module):
    """The operator that dropout is on a GPU."""

    def __init__(self, rate=0.25):
        super().__init__()
        self.rate, self.lower = rate, nn.Linear(16, 16)

    def forward(self, x):
        return self.lower(torch.native_dropout(torch.sin(x), self.rate, self.training)[0])


def test_fused_dropout_is_replayed_on_its_mask(tmp_path):
    result = compared(tmp_path, reference={"block": Fused}, block=Fused, seed=2)
    assert result.status == "same" and result.random_numbers is not None
    forward = [p for p in whence.open_run(tmp_path / "target").programs.values() if p.draws]
    assert forward and any(
        o.name == "aten.native_dropout_backward.default" for p in forward for o in p.operations
    )


def test_a_wrong_rate_of_fused_dropout_is_named(tmp_path):
    result = compared(tmp_path, reference={"block": Fused}, block=Fused, seed=2, rate=0.5)
    assert result.status == "different" and result.findings[0].name == "1"


class Sampled(nn.Module):
    """Draws by chances that it computes: no replay can tell what it should have drawn."""

    def __init__(self):
        super().__init__()
        self.lower = nn.Linear(16, 16)

    def forward(self, x):
        return self.lower(x * torch.bernoulli(torch.sigmoid(x)))


def test_what_is_drawn_by_computed_chances_is_no_fault_and_no_pass(tmp_path):
    result = compared(tmp_path, reference={"block": Sampled}, block=Sampled, seed=2)
    assert result.status == "undecided", answer.answer(result)
    assert "draws random numbers (aten.bernoulli.default)" in answer.answer(result)


def test_a_checkpoint_that_draws_anew_is_a_fault_of_the_backward_pass(tmp_path):
    class Again(Noisy):
        keep = True

        def forward(self, x):
            if not torch.is_grad_enabled():
                return super().forward(x)
            return torch.utils.checkpoint.checkpoint(
                self.drop, super().forward(x), use_reentrant=False, preserve_rng_state=self.keep
            )

    class Forgetful(Again):
        keep = False

    result = compared(tmp_path, reference={"block": Again}, block=Forgetful)
    assert result.status == "different"
    assert result.findings[0].op_type == "Dropout", answer.answer(result)
