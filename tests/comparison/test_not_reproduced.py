"""A finding that its own reproduction does not show is none: a call that was given 16 bits and
returns 32 computes the same function, and rounds as it was asked to.
"""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import whence  # noqa: E402

pytestmark = pytest.mark.torch


class Norm(nn.Module):
    """As Llama's: float32 inside, back to the dtype of its input, times float32 weights."""

    def __init__(self, epsilon=1e-6, low=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.epsilon, self.low = epsilon, low

    def forward(self, x):
        wide = x.bfloat16() if self.low else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class Gate(nn.Module):
    """Half of its input scales the other half, and a float32 buffer widens the result."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, 32))

    def forward(self, x):
        left, right = x.chunk(2, -1)
        return (torch.tanh(left.float()) * right.float()).to(x.dtype) * self.scale


def model(inner):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 64), inner, nn.Linear(32 if type(inner) is Gate else 64, 8))
    return made.eval()


def compared(reference, target, tmp_path, *, autocast=True):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        with whence.capture(reference, str(tmp_path / "reference")):
            reference(x)
        with (
            whence.capture(target, str(tmp_path / "target")),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            target(x)
    return whence.compare(str(tmp_path / "reference"), str(tmp_path / "target"))


@pytest.mark.parametrize("inner", [Norm, Gate])
def test_code_that_rounds_to_the_dtype_of_its_input_is_a_loss_of_precision(inner, tmp_path):
    result = compared(model(inner()), model(inner()), tmp_path)
    assert result.status == "same", (result.headline, result.findings)
    (lost,) = [v for v in result.verdicts if v.verdict == "precision"]
    assert "not reproduced: in float64 both programs are one function" in lost.sentence


@pytest.mark.parametrize("epsilon", [0.1, 1e-2])
def test_another_function_under_autocast_stays_a_fault(epsilon, tmp_path):
    result = compared(model(Norm()), model(Norm(epsilon)), tmp_path)
    assert [(f.name, f.verdict) for f in result.findings] == [("1", "introduced")]


def test_a_cast_in_the_code_of_one_side_stays_a_fault(tmp_path):
    result = compared(model(Norm()), model(Norm(low=True)), tmp_path, autocast=False)
    assert [(f.name, f.verdict) for f in result.findings] == [("1", "introduced")]


def test_a_cast_to_the_dtype_that_the_reference_was_given_is_a_loss_of_precision(tmp_path):
    """Under autocast a layer casts what the reference is given in 16 bits already."""
    inner, narrow = nn.LayerNorm(64), model(nn.LayerNorm(64)).bfloat16()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        with whence.capture(narrow, str(tmp_path / "reference")):
            narrow(x.bfloat16())
        target = model(inner)
        with (
            whence.capture(target, str(tmp_path / "target")),
            torch.autocast("cpu", torch.bfloat16),
        ):
            target(x)
    result = whence.compare(str(tmp_path / "reference"), str(tmp_path / "target"))
    assert result.status == "same", result.findings
