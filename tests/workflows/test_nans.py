"""The first operator of one run that makes NaN or overflows."""

import json

import pytest
import torch
from torch import nn

import whence
from whence.cli import execute
from whence.report.nans import nans_text

pytestmark = pytest.mark.torch


class Net(nn.Module):
    """A layer that may overflow, code of its own that may make NaN, and two layers behind."""

    def __init__(self, scale=1.0, *, root_of_negative=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.scale, self.root_of_negative = scale, root_of_negative

    def forward(self, x):
        x = self.first(x) * self.scale
        x = x.sqrt() if self.root_of_negative else x
        hidden = self.second(x)
        mask = torch.full((4, 4), float("-inf")).triu(3)[0].to(x.dtype)
        return self.last(hidden + torch.softmax(hidden + mask, -1))


def captured(path, net, x, **options):
    with whence.capture(net, path, force=True, **options):
        net(x)
    return whence.nans(path)


def test_a_run_that_is_finite_is(tmp_path):
    result = captured(tmp_path / "run", Net(), torch.ones(2, 4))
    assert result.first is None
    assert result.overflowed == ()
    assert result.unmeasured == 0


@pytest.mark.parametrize("keep", ["full", "stats"])
def test_nan_that_a_models_own_code_makes_is_named_before_the_module_that_gets_it(keep, tmp_path):
    net = Net(root_of_negative=True)
    result = captured(tmp_path / "run", net, torch.randn(2, 4) * 3, keep=keep)
    first = result.first
    assert (first.scope, first.op_type, first.slot) == ("", "Net", "1:input.0")
    assert 0 < first.nan < first.count == 8
    assert result.after == 2  # the two layers behind it
    assert first.operator == ("sqrt" if keep == "full" else "")


def test_an_overflow_is_named_before_the_nan_that_it_becomes(tmp_path):
    net = Net().half()
    nn.init.ones_(net.first.weight)
    result = captured(tmp_path / "run", net, torch.full((2, 4), 3e4, dtype=torch.float16))
    first, then = result.first, result.then
    assert (first.scope, first.slot, first.nan, first.infinite) == ("first", "output.0", 0, 8)
    assert (first.dtype, first.largest) == ("float16", 65504)
    assert next(r.high for r in first.read if r.slot == "input.0") == 3e4
    assert then.nan > 0
    assert then.order > first.order
    assert result.overflowed[0].order == first.order
    assert first.operator == "addmm"


def test_a_backward_pass_that_makes_nan_is_named(tmp_path):
    class Length(nn.Module):
        def forward(self, x):
            return x.square().sum(-1).sqrt()

    net = nn.Sequential(nn.Linear(4, 4, bias=False), Length())
    with whence.capture(net, tmp_path / "run"):
        net(torch.zeros(2, 4)).sum().backward()
    first = whence.nans(tmp_path / "run").first
    assert (first.scope, first.phase, first.slot) == ("1", "backward", "output.grad.input.0")


def test_an_operator_inside_a_module_is_named(tmp_path):
    class Masked(nn.Module):
        def forward(self, x):
            return (x + torch.full((4,), float("-inf")).exp()).neg().log() + 1

    result = captured(tmp_path / "run", nn.Sequential(nn.ReLU(), Masked()), torch.ones(2, 4))
    assert (result.first.scope, result.first.operator) == ("1", "log")
    assert ", by log" in nans_text(result)


def test_the_command_says_it_and_exits_with_one(tmp_path, capsys):
    captured(tmp_path / "run", Net(root_of_negative=True), torch.randn(2, 4) * 3)
    assert execute(["nans", str(tmp_path / "run")]) == 1
    text = capsys.readouterr().out
    assert text.startswith("NOT FINITE         Net   Net   1:input.0   step 0, rank 0")
    assert "NaN of 8 elements, float32" in text
    assert execute(["nans", str(tmp_path / "run"), "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"]["slot"] == "1:input.0"
    captured(tmp_path / "run", Net(), torch.ones(2, 4), keep="none")
    assert execute(["nans", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().out.startswith("CANNOT TELL")
