"""Heads, experts and channels in another order: which of them are not like the others."""

import pytest
import torch
from torch import nn

import whence
from whence.results import Held
from whence.testing import assert_equivariant

pytestmark = pytest.mark.torch

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """Four heads. change: of what they give, [rows, length, heads, 4]."""

    def __init__(self, change=lambda x: x):
        super().__init__()
        self.num_heads, self.change = 4, change
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.v_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (4, 4)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
        return self.o_proj(self.change(out.transpose(1, 2)).flatten(2))


class Mlp(nn.Module):
    """change: of what lies between both layers."""

    def __init__(self, change=lambda x: x):
        super().__init__()
        self.up, self.down, self.change = nn.Linear(16, 24), nn.Linear(24, 16), change

    def forward(self, x):
        return self.down(self.change(torch.relu(self.up(x))))


class Experts(nn.Module):
    """Five experts of which each position takes two. change: of the numbers of those chosen."""

    def __init__(self, change=lambda x: x):
        super().__init__()
        self.gate = nn.Linear(16, 5, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(5))
        self.change = change

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        every = torch.stack([expert(x) for expert in self.experts], -1)
        taken = every.gather(-1, self.change(chosen)[..., None, :].expand(*x.shape, 2))
        return (taken * weights[..., None, :]).sum(-1)


def asked(layer, x=X, **how):
    torch.manual_seed(0)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    net = nn.Sequential(nn.Linear(x.shape[-1], x.shape[-1]), layer).eval()
    return whence.probe(net, x, properties=["equivariance"], **how)["equivariance"]


def scaled(place, axis=-1):
    def change(x):
        out = x.clone()
        out.select(axis, place).mul_(1.01)
        return out

    return change


@pytest.mark.parametrize("layer", [Attention, Mlp, Experts])
def test_units_that_are_alike_hold(layer):
    answer = asked(layer())
    assert answer.held in (Held.EXACT, Held.ROUNDING)
    assert "may move moved by" in answer.power


@pytest.mark.parametrize("head", [0, 3])
def test_a_head_that_is_not_like_the_others_is_named(head):
    answer = asked(Attention(scaled(head, 2)))
    assert answer.held == Held.VIOLATED
    assert f"attention heads {head} of 4 (from 0)" in answer.cause
    assert answer.variants[0].first.scope == "1"


def test_channels_that_are_not_like_the_others_are_named():
    answer = asked(Mlp(lambda x: torch.cat([x[..., :-2], 0 * x[..., -2:]], -1)))
    assert answer.held == Held.VIOLATED
    assert "hidden channels 22, 23 of 24" in answer.cause


def test_channels_that_read_their_neighbours_are_a_fault():
    answer = asked(Mlp(lambda x: x + 0.1 * x.roll(1, -1)))
    assert answer.held == Held.VIOLATED
    assert "read their neighbours" in answer.cause


def test_an_expert_that_is_never_taken_is_named():
    answer = asked(Experts(lambda chosen: chosen.clamp(max=3)))
    assert answer.held == Held.VIOLATED
    assert "experts 3, 4 of 5" in answer.cause


def test_code_for_each_head_or_channel_is_a_design():
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None]
    assert asked(Attention(lambda x: x * slopes)).held == Held.OBSERVED
    assert asked(Mlp(lambda x: x * torch.arange(24))).held == Held.OBSERVED
    halves = torch.tensor([1.0, 1.0, 0.5, 0.5])[:, None]  # two kinds of heads, as many of each
    assert asked(Attention(lambda x: x * halves)).held == Held.OBSERVED


def test_equal_scores_of_experts_are_left_out():
    layer = Experts()
    with torch.no_grad():
        asked(layer)
        layer.gate.weight[1] = layer.gate.weight[0]
    net = nn.Sequential(layer).eval()
    answer = whence.probe(net, X, properties=["equivariance"])["equivariance"]
    assert "rows of gate.weight are equal" in " ".join(answer.notes)


def test_a_vector_with_an_element_a_head_goes_with_the_heads():
    class Scaled(Attention):
        def __init__(self):
            super().__init__()
            self.scales = nn.Parameter(torch.arange(1.0, 5.0))

        def forward(self, x):
            self.change = lambda x: x * self.scales[:, None]
            return super().forward(x)

    assert asked(Scaled()).held in (Held.EXACT, Held.ROUNDING)


def test_a_vector_behind_the_heads_stays_where_it_is():
    class Biased(Attention):
        def __init__(self):
            super().__init__()
            self.late = nn.Parameter(torch.arange(16.0))

        def forward(self, x):
            return super().forward(x) + self.late

    class Late(Attention):
        """Of one class, the second has a vector more."""

        def __init__(self, late):
            super().__init__()
            self.late = nn.Parameter(torch.arange(16.0)) if late else None

        def forward(self, x):
            return super().forward(x) + (0 if self.late is None else self.late)

    assert asked(Biased()).held in (Held.EXACT, Held.ROUNDING)
    answer = asked(nn.Sequential(Late(False), Late(True)))
    assert answer.held in (Held.EXACT, Held.ROUNDING)


def test_heads_of_torch_and_of_a_convolution_with_its_norm():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        answer = asked(layer)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert answer.held in (Held.EXACT, Held.ROUNDING)
    assert any("attention heads" in v.name for v in answer.variants)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        net[1].running_mean.normal_()
    assert_equivariant(net.eval(), torch.randn(1, 3, 8, 8))


def test_weights_stay_where_and_as_they_are():
    layer = Attention(scaled(1, 2))
    before = {n: (p.data_ptr(), p.clone()) for n, p in layer.named_parameters()}
    torch.manual_seed(0)
    whence.probe(nn.Sequential(layer).eval(), X, properties=["equivariance"])
    for name, parameter in layer.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_images_are_turned_where_that_is_declared():
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    blind = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    sees = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    how = {"properties": ["equivariance"], "declare": ["flip"]}
    assert whence.probe(blind, images, **how)["equivariance"].held in (Held.EXACT, Held.ROUNDING)
    answer = whence.probe(sees, images, **how)["equivariance"]
    assert answer.held == Held.VIOLATED
    assert answer.variants[0].first.operator == "aten.convolution"
    assert (
        whence.probe(sees, images, properties=["equivariance"])["equivariance"].held
        == "does not apply"
    )


def test_the_assertion_names_the_head():
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match="attention heads 2 of 4"):
        assert_equivariant(nn.Sequential(Attention(scaled(2, 2))).eval(), X)
