"""A change of parameters that computes the same, but for a parameter that it left out."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import whence
from whence.report import answer

pytestmark = pytest.mark.torch


def captured(path, change):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 24), nn.Linear(24, 5))
    with torch.no_grad():
        model[1].bias.normal_()
        change(model, torch.rand(24) + 0.5)
        with whence.capture(model, path):
            model(torch.randn(9, 12))


def folded(model, factor):
    model[1].weight.div_(factor)
    model[2].weight.mul_(factor)


def smoothed(model, factor):
    model[2].weight.mul_(factor[:, None])
    model[3].weight.div_(factor)


def compared(path, change):
    captured(path / "reference", lambda *_: None)
    captured(path / "target", change)
    return whence.compare(path / "reference", path / "target")


@pytest.mark.parametrize(("change", "module", "behind"), [(folded, 1, 2), (smoothed, 2, 3)])
def test_the_parameter_that_was_left_out_is_the_fault(tmp_path, change, module, behind):
    result = compared(tmp_path, change)
    assert [(f.name, f.slot) for f in result.findings] == [(str(module), "param.bias")]
    assert "bias is not multiplied with it" in result.findings[0].sentence
    assert f"OTHER FORM         {behind} " in answer.answer(result)


@pytest.mark.filterwarnings("error")
def test_a_bias_that_was_not_loaded_is_no_folded_factor(tmp_path):
    def renewed(model, _):
        for layer in model:
            layer.reset_parameters()

    finding = compared(tmp_path, renewed).findings[0]
    assert (finding.name, finding.slot) == ("0", "param.weight")


def test_a_change_that_leaves_nothing_out_is_another_form(tmp_path):
    def whole(model, factor):
        folded(model, factor)
        model[1].bias.div_(factor)

    assert compared(tmp_path, whole).status == "same"


def test_a_wrong_factor_behind_it_acquits_nothing(tmp_path):
    def wrong(model, factor):
        folded(model, factor)
        model[2].weight[3] *= 1.01

    assert "2" in {finding.name for finding in compared(tmp_path, wrong).findings}


def test_the_other_half_of_a_folding_is_the_fault_where_it_differs_besides(tmp_path):
    def rounded(model, factor):
        smoothed(model, factor)
        model[2].bias.mul_(factor)
        model[3].weight.copy_((model[3].weight * 32).round() / 32)

    result = compared(tmp_path, rounded)
    assert [(f.name, f.slot) for f in result.findings] == [("3", "param.weight")]
    assert "differs besides" in result.findings[0].sentence
    assert "OTHER FORM         2 " in answer.answer(result)


class Readers(nn.Module):
    """Three linears read what a scale leaves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.LayerNorm(24, bias=False)
        self.first, self.second, self.third = (nn.Linear(24, 8) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return (self.first(x) * self.second(x)).tanh() @ self.third(x).mT


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = Readers(), nn.Linear(9, 9)

    def forward(self, x):
        return self.out(self.inner(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_a_fold_forgot_is_the_fault(tmp_path, dtype):
    for name in ("reference", "target"):
        model = Whole().eval()
        with torch.no_grad():
            factor = torch.linspace(0.5, 2, 24)
            model.inner.norm.weight.copy_(factor)
            if name == "target":
                model.inner.norm.weight.fill_(1.0)
                for linear in (model.inner.first, model.inner.second):
                    linear.weight.mul_(factor)
            with whence.capture(model.to(dtype), tmp_path / name):
                model(torch.linspace(-2, 3, 216).reshape(9, 24).sin().to(dtype))
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert [(f.name, f.slot) for f in result.findings] == [("inner.third", "param.weight")]
    assert "not multiplied channel by channel" in result.findings[0].sentence


class Normed(nn.Module):
    """Attention whose heads are normed: a scale of one projection has no effect behind the norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.query, self.key, self.value = (nn.Linear(24, 24, bias=False) for _ in range(3))
        self.query_norm, self.key_norm, self.after = (nn.RMSNorm(24) for _ in range(3))

    def forward(self, x):
        query, key = self.query_norm(self.query(x)), self.key_norm(self.key(x))
        return self.after((query @ key.mT).softmax(-1) @ self.value(x))


def test_unchanged_weights_are_no_fault_where_the_changed_one_has_no_effect(tmp_path):
    for name in ("reference", "target"):
        model = nn.Sequential(Normed(), nn.Linear(24, 3)).eval()
        with torch.no_grad():
            if name == "target":
                model[0].key.weight.mul_(1.02)
            with whence.capture(model, tmp_path / name):
                model(torch.linspace(-2, 3, 216).reshape(9, 24).sin())
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert {f.name for f in result.findings} <= {"0.key"}
