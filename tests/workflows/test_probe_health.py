"""Operators that lose numbers are named where the outputs show it, and nothing else is."""

import math

import pytest
import torch
from torch import nn

import whence
from whence.report.probe import probed_text
from whence.results import Held, Status, Symptom

pytestmark = pytest.mark.torch


class Net(nn.Module):
    """Linear, `change`, linear."""

    def __init__(self, change, dtype=torch.float32, shift=0.0, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.extra, self.last = nn.Linear(8, 16), Extra(change), nn.Linear(16, 4)
        self.shift, self.scale = shift, scale
        self.to(dtype)

    def forward(self, x):
        return self.last(self.extra(self.first(x) * self.scale + self.shift))


class Extra(nn.Module):
    """A function as a module."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x)


def asked(change, dtype=torch.float32, **options):
    net = Net(change, dtype, **options).eval()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    result = whence.probe(net, x, properties=["health"])
    return result, result["health"]


def moments(x):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x * x).mean(-1, keepdim=True) - mean * mean).abs().add(1e-6).sqrt()


def two_passes(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred * centred).mean(-1, keepdim=True).add(1e-6).sqrt()


def test_a_cancellation_is_measured_and_named_with_what_the_outputs_see():
    result, answer = asked(moments, shift=300.0)
    worst = answer.findings[0]
    assert answer.held == Held.UNHEALTHY
    assert result.status == Status.SAME  # an observation
    assert (worst.symptom, worst.first.operator) == (Symptom.CANCELLATION, "aten.sub.Tensor")
    assert worst.first.scope == "extra"
    assert worst.first.line.startswith(__file__)
    # E[x^2] is about 9e4 times the variance, which the squares of the mean cancel to
    assert 3e4 < worst.amplification < 3e6
    assert worst.effect > 1e-3
    text = probed_text(result)
    assert "of 24 bits" in text
    assert "and in" not in text


@pytest.mark.parametrize("change", [two_passes, lambda x: (x @ x.T / 8).softmax(-1) @ x])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_well_conditioned_is_healthy(change, dtype):
    result, answer = asked(change, dtype)
    assert (answer.held, answer.findings) == (Held.HEALTHY, ())
    assert "no operator overflows" in probed_text(result)
    assert "largest amplification" in answer.power


def test_a_cancellation_that_no_output_sees_is_not_reported():
    _, answer = asked(lambda x: x + 1e-9 * ((x + 1e4) - 1e4))
    assert answer.held == Held.HEALTHY


def test_an_overflow_of_finite_inputs_is_a_violation():
    result, answer = asked(lambda x: (x @ x.T).softmax(-1) @ x, torch.float16, scale=400.0)
    assert (answer.held, result.status) == (Held.VIOLATED, Status.DIFFERENT)
    assert answer.findings[0].symptom == Symptom.NONFINITE
    assert answer.findings[0].first.operator == "aten.mm"


def test_an_infinity_that_only_masks_is_no_violation():
    def masked(x):
        scores = x @ x.T / 8 + torch.ones(len(x), len(x)).tril().log()
        return scores.softmax(-1) @ x

    _, answer = asked(masked)
    assert answer.held == Held.HEALTHY
    assert "aten.log" in answer.notes[0]


def test_what_comes_near_the_end_of_float16_is_told_before_it_overflows():
    _, answer = asked(lambda x: (x * 150) * 150 * 1e-4, torch.float16)
    worst = answer.findings[0]
    assert worst.symptom == Symptom.RANGE
    assert 65504 / 4 <= worst.largest <= 65504


def test_an_underflow_counts_where_it_is_scaled_up_again():
    _, lost = asked(lambda x: (x * 1e-5) * (x * 1e-4) * 1e9, torch.float16)
    assert {f.symptom for f in lost.findings} == {Symptom.UNDERFLOW}
    _, harmless = asked(lambda x: x + (x * 1e-5) * (x * 1e-4), torch.float16)
    assert harmless.held == Held.HEALTHY


@pytest.mark.parametrize("fused", [True, False])
def test_a_saturated_softmax_is_named_and_a_masked_row_is_none(fused):
    def attention(factor):
        def change(x):
            q = (x * factor)[None, None]
            k = v = x[None, None]
            if fused:
                return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]
            seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
            return ((q @ k.mT / 4).masked_fill(~seen, -torch.inf).softmax(-1) @ v)[0, 0]

        return change

    _, answer = asked(attention(1e3))
    assert [f.symptom for f in answer.findings] == [Symptom.SATURATION]
    assert asked(attention(1.0))[1].held == Held.HEALTHY


def test_all_lines_of_layers_are_one_finding():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(8, 16)
            self.a, self.b = Extra(moments), Extra(moments)
            self.last = nn.Linear(16, 4)

        def forward(self, x):
            return self.last(self.a(self.b(self.first(x) + 300.0) + 300.0))

    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    answer = whence.probe(Two().eval(), x, properties=["health"])["health"]
    assert {answer.findings[0].first.scope, *answer.findings[0].also} == {"a", "b"}


def test_a_dtype_that_cannot_be_looked_at_is_a_note():
    def through_fp8(x):
        small = x.to(torch.float8_e4m3fn)
        return small.to(x.dtype) + torch.ones_like(x)

    _, answer = asked(through_fp8)
    assert answer.held == Held.HEALTHY
    assert any("_to_copy" in note for note in answer.notes)


def test_health_is_asked_by_default_and_precision_is_not():
    result = whence.probe(Net(two_passes).eval(), torch.ones(5, 8))
    names = [answer.property for answer in result.answers]
    assert "health" in names
    assert "precision" not in names
    assert "--only precision" in result["health"].next


def test_the_amplification_of_a_difference_is_what_theory_says():
    """|a| + |b| over |a - b|, in root mean squares."""
    net = Net(lambda x: (x + 1e3) - (x * 1.001 + 1e3)).eval()
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))
    answer = whence.probe(net, x, properties=["health"])["health"]
    worst = max(answer.findings, key=lambda f: f.amplification)
    y = net.first(x).detach().double()
    a, b = y + 1e3, y * 1.001 + 1e3
    expected = math.sqrt(float((a**2 + b**2).mean() / ((a - b) ** 2).mean()))
    assert worst.amplification == pytest.approx(expected, rel=0.2)
