"""Why a flagged operator is at fault: its parameters, its code, or its kernel."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import whence
from whence.report.answer import answer

pytestmark = pytest.mark.torch


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.3), nn.Linear(48, 24)).eval()


class BrokenKernel(TorchDispatchMode):
    """A device whose gelu is 1 % too large."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 1.01 if func is torch.ops.aten.gelu.default else out


def finding(tmp_path, change=None, around=None):
    torch.set_num_threads(1)
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(1))
    target = model()
    with torch.no_grad():
        reference = model()
        with whence.capture(reference, tmp_path / "ref"):
            reference(x)
        if change is not None:
            change(target)
        with around or contextlib.nullcontext(), whence.capture(target, tmp_path / "tgt"):
            target(x)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert result.status == "different"
    first = result.findings[0]
    return first.name, first.cause, first.sentence


def test_a_parameter(tmp_path):
    name, cause, sentence = finding(tmp_path, lambda m: m[3].bias.zero_())
    assert (name, cause) == ("3", "parameter")
    assert "bias: all zero" in sentence


def test_a_norm_left_in_training(tmp_path):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()

    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name in ("eval", "train"):
            model = net()
            model[1].train(name == "train")
            with whence.capture(model, tmp_path / name):
                model(x)
    first = whence.compare(tmp_path / "eval", tmp_path / "train").findings[0]
    assert (first.name, first.cause) == ("1", "semantic")
    assert "training is False in the reference, True in the target" in first.sentence
    assert "add_" not in first.sentence


def test_the_code(tmp_path):
    def change(m):
        m[1].approximate = "tanh"

    name, cause, sentence = finding(tmp_path, change)
    assert (name, cause) == ("1", "semantic")
    assert "gelu: approximate is none in the reference, tanh in the target" in sentence


def test_code_that_draws_random_numbers(tmp_path):
    name, cause, sentence = finding(tmp_path, lambda m: m[2].train())
    assert (name, cause) == ("2", "semantic")
    assert "only the target draws random numbers" in sentence


def test_the_kernel(tmp_path):
    name, cause, sentence = finding(tmp_path, around=BrokenKernel())
    assert (name, cause) == ("1", "kernel")
    assert "run again on its own inputs" in sentence


def test_a_container_that_spoils_what_its_child_made_is_named_not_those_who_hand_it_on(tmp_path):
    class Wrap(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.factor = inner, 1.0

        def forward(self, x):
            x = self.inner(x)
            return x if self.factor == 1.0 else x * self.factor

    torch.manual_seed(0)
    spoiler = Wrap(nn.LayerNorm(16))
    model = nn.Sequential(Wrap(Wrap(spoiler)), nn.Linear(16, 16)).eval()
    given = torch.randn(4, 16)
    with torch.no_grad():
        with whence.capture(model, tmp_path / "ref"):
            model(given)
        spoiler.factor = 1.01
        with whence.capture(model, tmp_path / "tgt"):
            model(given)
    assert [f.name for f in whence.compare(tmp_path / "ref", tmp_path / "tgt").findings] == [
        "0.inner.inner"
    ]


class Blocks(nn.Module):
    """Code of its own before the first block."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.factor, self.blocks = factor, nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        if self.factor != 1:
            x = x * self.factor
        for block in self.blocks:
            x = block(x)
        return x


def test_code_of_the_model_itself_is_named_with_its_operator(tmp_path):
    """What only the target computes cannot be run again as the reference did: no repro is named."""
    with torch.no_grad():
        for name, factor in (("ref", 1), ("tgt", 1.01)):
            net = Blocks(factor).eval()
            with whence.capture(net, tmp_path / name):
                net(torch.ones(2, 8))
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    text = answer(result)
    assert text.startswith("FAULT              Blocks   its own code (mul)   step 0, rank 0\n")
    assert "before blocks.0: mul.Tensor runs only in the target; introduced here" in text
    assert not any(step.command.startswith("whence repro") for step in result.next)
