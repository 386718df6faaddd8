"""Inputs that only one side's call is given."""

import msgspec
import pytest
import torch
from torch import nn

import whence
from whence.report.answer import answer
from whence.results import Remark

pytestmark = pytest.mark.torch


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x, position_bias=None):
        y = self.proj(x)
        return y if position_bias is None else y + position_bias


class Net(nn.Module):
    """hands_on: whether the bias is passed on to the attention."""

    def __init__(self, hands_on):
        super().__init__()
        torch.manual_seed(0)
        self.attn, self.bias, self.hands_on = Attention(), nn.Embedding(4, 8), hands_on

    def forward(self, x):
        bias = self.bias(torch.arange(4))
        return self.attn(x, position_bias=bias) if self.hands_on else self.attn(x)


@pytest.fixture
def compared(tmp_path):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for name, hands_on in (("ref", True), ("tgt", False)):
        net = Net(hands_on)
        with torch.no_grad(), whence.capture(net, tmp_path / name):
            net(x)

    def compare(reference, target):
        return whence.compare(tmp_path / reference, tmp_path / target, replay=False)

    return compare


def test_an_argument_that_is_not_passed_is_the_sentence(compared):
    result = compared("ref", "tgt")
    first = next(f for f in result.findings if f.name == "attn")
    assert first.cause == "input"
    assert "`position_bias` is not passed in the target" in first.sentence
    assert "inputs bitwise equal" not in first.sentence


def test_remarks_have_rows_of_their_own(compared):
    result = msgspec.structs.replace(
        compared("ref", "ref"),
        remarks=(
            Remark("precision", "attn.proj", "Linear", 0, 0, "replay", "rounded to 8 bits"),
            Remark(
                "suspect", "attn", "Attention", 0, 0, "replay", "0.9 of the limit", also=("attn2",)
            ),
        ),
    )
    lines = answer(result).splitlines()
    assert result.status == "same"
    rows = [line for line in lines if "attn" in line and "step 0, rank 0" in line]
    assert [row.split()[0] for row in rows] == ["PRECISION", "SUSPECT"]
    assert any("rounded to 8 bits" in line for line in lines)
    assert any("for --strict" in line for line in lines)
    assert any("also in" in line and "attn2" in line for line in lines)
