"""Inputs that only one side's call is given, and parameters that only one side's module has."""

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


# ---- parameters that only one side has


class Scaled(nn.Module):
    """A scale and a shift. names: of their parameters, the scale first; None for one it lacks."""

    def __init__(self, *names, factor=1.0):
        super().__init__()
        self.names, self.factor = names, factor
        for name in filter(None, names):
            self.register_parameter(name, nn.Parameter(torch.linspace(-1, 2, 8)))

    def forward(self, x):
        scale, shift = (getattr(self, name) if name else None for name in self.names)
        x = x if scale is None else x * scale
        return (x if shift is None else x + shift) * self.factor


@pytest.fixture
def findings(tmp_path):
    """The findings of two models that differ in the module in their middle alone."""

    def run(name, module, dtype):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8))
        net[1] = module
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        with torch.no_grad(), whence.capture(net := net.eval().to(dtype), tmp_path / name):
            net(x.to(dtype))
        return tmp_path / name

    def compare(reference, target, dtype=torch.float32):
        left, right = run("ref", reference, torch.float32), run("tgt", target, dtype)
        return whence.compare(left, right).findings

    return compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", ["reference", "target"])
def test_a_parameter_of_one_side_only_is_the_cause(findings, side, dtype):
    full, lacking = Scaled("weight", "bias"), Scaled("weight", None)
    pair = (full, lacking) if side == "reference" else (lacking, full)
    (finding,) = findings(*pair, dtype=dtype)
    assert (finding.name, finding.verdict, finding.cause) == ("1", "structural", "structural")
    assert finding.sentence.startswith(f"`bias` is a parameter of the {side} only; ")


def test_several_parameters_of_one_side_are_named_together(findings):
    (finding,) = findings(Scaled("weight", "bias"), Scaled(None, None))
    assert finding.sentence.startswith("`weight` and `bias` are parameters of the reference only; ")


def test_a_parameter_under_two_names_is_no_missing_one(findings):
    (finding,) = findings(Scaled("weight", None), Scaled("gain", None, factor=1.5))
    assert "parameter of the" not in finding.sentence


@pytest.mark.parametrize("side", ["reference", "target"])
def test_a_parameter_that_changes_nothing_is_no_fault(findings, side):
    full, lacking = nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)
    assert not findings(*((full, lacking) if side == "reference" else (lacking, full)))


def test_a_kernel_of_several_operators_is_not_blamed_for_how_it_numbers_what_it_reads():
    """In a dump without programs; one input that is gone is still told."""
    import numpy as np

    from whence.readers.assembly.builder import Building

    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)

    def dump(names, change):
        run = Building("dump", "ge")
        run.call("a", outputs=[run.array(x)])
        inputs = {name: run.array(x[:, int(name) :]) for name in names}
        run.call("norm", inputs=inputs, outputs=[run.array(np.tanh(x) * change)])
        return run.run()

    (fused,) = whence.compare(dump("01", 1), dump("234", 1.1)).findings
    assert (str(fused.verdict), str(fused.cause)) == ("introduced", "")
    (lost,) = whence.compare(dump("01", 1), dump("1", 1.1)).findings
    assert "`0` is not passed in the target" in lost.sentence
