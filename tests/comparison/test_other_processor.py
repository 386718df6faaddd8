"""Weights of one seed that two processors drew differ by rounding everywhere: one remark, and the
operators are judged all the same.
"""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import whence  # noqa: E402

pytestmark = pytest.mark.torch


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 8)]
    made = nn.Sequential(*layers).eval()
    for layer in (made[0], made[3], made[4]):
        nn.init.zeros_(layer.bias)
    return made


def digits_moved(weights, generator):
    """Elements here and there a last digit up."""
    upwards = torch.nextafter(weights, torch.full_like(weights, torch.inf))
    return torch.where(torch.rand(weights.shape, generator=generator) < 0.4, upwards, weights)


def drawn_elsewhere(weights, generator):
    """What torch.randn of another instruction set gives: up to some 30 roundings of the whole."""
    if weights.dim() < 2:
        return weights
    moved = torch.rand(weights.shape, generator=generator) * 2 - 1
    return weights + moved * 30 * 2.0**-24 * weights.pow(2).mean().sqrt()


def compared(change, tmp_path, spoil=lambda model: None):
    reference = model()
    target, generator = copy.deepcopy(reference), torch.Generator().manual_seed(3)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for weights in target.parameters():
            weights.copy_(change(weights, generator))
        spoil(target)
        for name, made in (("reference", reference), ("target", target)):
            with whence.capture(made, str(tmp_path / name)):
                made(x)
    return whence.compare(str(tmp_path / "reference"), str(tmp_path / "target"))


CHANGES = pytest.mark.parametrize("change", [digits_moved, drawn_elsewhere])


@CHANGES
def test_parameters_made_on_another_processor_are_one_remark(change, tmp_path):
    result = compared(change, tmp_path)
    assert result.status == "same", (result.headline, result.findings)
    (note,) = [note for note in result.notes if "another processor" in note]
    assert " parameters, " in note


@CHANGES
def test_operators_behind_them_are_judged(change, tmp_path):
    result = compared(change, tmp_path, lambda target: setattr(target[1], "eps", 1e-2))
    assert [f.name for f in result.findings] == ["1"]
    assert result.findings[0].verdict == "introduced"


@CHANGES
def test_a_wrong_parameter_among_them_is_found(change, tmp_path):
    result = compared(change, tmp_path, lambda target: target[3].weight[5].mul_(1.001))
    assert [(f.name, f.verdict) for f in result.findings] == [("3", "param-diff")]


def test_checkpoints_of_two_processors_are_the_same(tmp_path):
    generator = torch.Generator().manual_seed(3)
    state = model().state_dict()
    torch.save(state, tmp_path / "reference.pt")
    torch.save({k: drawn_elsewhere(v, generator) for k, v in state.items()}, tmp_path / "target.pt")
    result = whence.compare(str(tmp_path / "reference.pt"), str(tmp_path / "target.pt"))
    assert result.status == "same", (result.headline, result.findings)
