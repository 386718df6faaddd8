"""Rows of a weight in another order are a layout only where what shares their axis moves too."""

import copy

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import whence

pytestmark = pytest.mark.torch


class Shuffle(nn.Module):
    def forward(self, x):
        return x.unflatten(1, (4, -1)).transpose(1, 2).flatten(1, 2)


class Diluted(nn.Module):
    """`conv`, what reads it, and a far larger tensor beside it, which keeps all behind it alike."""

    def __init__(self, conv, reader=None, after=None):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 32, 3, 2, 1), conv
        self.reader = Shuffle() if reader is None else reader
        self.after = nn.Conv2d(32, 8, 1) if after is None else after
        self.end = nn.Conv2d(40, 8, 1)

    def forward(self, x):
        stem = self.stem(x)
        narrow = self.after(self.reader(F.relu(self.conv(stem))))
        return self.end(torch.cat([narrow, 20 * stem], 1))


class InCode(Diluted):
    """The same with the shuffle among the code between modules left out."""

    def forward(self, x):
        stem = self.stem(x)
        narrow = self.after(F.silu(self.conv(stem)))
        return self.end(torch.cat([narrow, 20 * stem], 1))


def compared(reference, change, example):
    target = copy.deepcopy(reference)
    with torch.no_grad():
        change(target)
    return whence.auto_diff(reference.eval(), target.eval(), example)


def regrouped(weight):
    return weight.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def images():
    return torch.randn(2, 3, 16, 16)


@pytest.mark.parametrize(
    "conv, model",
    [
        (lambda: nn.Conv2d(32, 32, 3, 1, 1, groups=4), Diluted),
        (lambda: nn.Conv2d(32, 32, 3, 1, 1, groups=4, bias=False), Diluted),
        (lambda: nn.Conv2d(32, 32, 3, 1, 1, groups=32), Diluted),
        (lambda: nn.Conv2d(32, 32, 3, 1, 1, groups=32, bias=False), Diluted),
        (lambda: nn.Conv2d(32, 32, 3, 1, 1), Diluted),
        (lambda: nn.Conv2d(32, 32, 3, 1, 1), InCode),
        (lambda: nn.Conv2d(32, 32, 3, 1, 1, bias=False), InCode),
    ],
    ids=["grouped", "no bias", "depthwise", "depthwise no bias", "plain", "code", "code no bias"],
)
def test_a_weight_that_moved_alone_is_the_fault(conv, model):
    torch.manual_seed(0)

    def change(target):
        target.conv.weight.copy_(regrouped(target.conv.weight))

    result = compared(model(conv()), change, images())
    assert [(f.name, f.slot) for f in result.findings] == [("conv", "param.weight")]
    assert "rows in another order (30 of 32 moved)" in result.findings[0].sentence


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda n: nn.GroupNorm(4, n)])
def test_a_norm_that_reads_the_rows_and_did_not_move_refutes_them(norm):
    torch.manual_seed(1)
    reader = norm(32)
    nn.init.normal_(reader.weight)
    model = Diluted(nn.Conv2d(32, 32, 1, bias=False), reader)

    def change(target):
        target.conv.weight.copy_(regrouped(target.conv.weight))

    result = compared(model, change, images())
    assert [(f.name, f.slot) for f in result.findings] == [("conv", "param.weight")]


@pytest.mark.parametrize("bias", ["moved", "none", "constant"])
@pytest.mark.parametrize("between", [nn.Identity, nn.SiLU])
def test_an_order_that_the_next_layer_undoes_is_a_layout(bias, between):
    torch.manual_seed(2)
    first = nn.Linear(12, 32, bias=bias != "none")
    if bias == "constant":
        nn.init.constant_(first.bias, 0.5)
    reference = nn.Sequential(first, between(), nn.Linear(32, 6))

    def change(target):
        for parameter in target[0].parameters():
            parameter.copy_(regrouped(parameter))
        target[2].weight.copy_(regrouped(target[2].weight.T).T)

    result = compared(reference, change, torch.randn(5, 12))
    assert result.status == "same"


def test_channels_that_move_all_the_way_are_a_layout():
    torch.manual_seed(3)
    reference = nn.Sequential(
        nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 3, groups=32), nn.ReLU(), nn.Conv2d(32, 8, 1)
    )

    def change(target):
        for n in (0, 1):
            for parameter in target[n].parameters():
                parameter.copy_(regrouped(parameter))
        target[3].weight.copy_(regrouped(target[3].weight.transpose(0, 1)).transpose(0, 1))

    result = compared(reference, change, images())
    assert result.status == "same"
