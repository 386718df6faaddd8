"""What a program does to parameters after an optimiser's step is named there, although nobody saw
it, where rounding cannot be the reason.
"""

import pytest
import torch
from torch import nn

import whence
from split_layers import run_in_parts
from whence.errors import ReplayRefused

pytestmark = pytest.mark.torch


class Weights:
    """The parameters of a training, and averages of them."""

    def __init__(self, model):
        self.own = list(model.parameters())
        self.averages = [p.detach().clone() for p in self.own]

    def averaged(self, decay):
        for average, p in zip(self.averages, self.own, strict=True):
            average.mul_(decay).add_(p, alpha=1 - decay)


def nothing(weights, model):
    pass


def taken_over(decay):
    def change(weights, model):
        weights.averaged(decay)
        for average, p in zip(weights.averages, weights.own, strict=True):
            p.copy_(average)

    return change


def evaluated(decay):
    """The averages take the place of the parameters while the model is evaluated."""

    def change(weights, model):
        weights.averaged(decay)
        kept = [p.clone() for p in weights.own]
        for average, p in zip(weights.averages, weights.own, strict=True):
            p.copy_(average)
        model.eval()(torch.ones(2, 16))
        model.train()
        for before, p in zip(kept, weights.own, strict=True):
            p.copy_(before)

    return change


def clipped(limit):
    def change(weights, model):
        for p in weights.own:
            p.clamp_(-limit, limit)

    return change


def one_clipped(weights, model):
    weights.own[4].clamp_(-0.05, 0.05)


def train(change, path, parts=False, **options):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
    if parts:
        run_in_parts(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    weights, draw = Weights(model), torch.Generator().manual_seed(3)
    with whence.capture(model, path, **options):
        for _ in range(3):
            x, y = torch.randn(64, 16, generator=draw), torch.randn(64, 8, generator=draw)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                change(weights, model)


def compared(tmp_path, reference, target, **options):
    train(reference, tmp_path / "reference", **options)
    train(target, tmp_path / "target", **options)
    return whence.compare(tmp_path / "reference", tmp_path / "target")


@pytest.mark.parametrize("keep", ("full", "stats"))
@pytest.mark.parametrize(
    ("reference", "target", "side", "other"),
    (
        (nothing, taken_over(0.9), "target", "reference"),
        (taken_over(0.9), nothing, "reference", "target"),
        (nothing, clipped(0.1), "target", "reference"),
    ),
    ids=("average taken", "average not taken", "clipped"),
)
def test_what_one_run_does_after_a_step_is_named(reference, target, side, other, keep, tmp_path):
    result = compared(tmp_path, reference, target, keep=keep)
    first = result.findings[0]
    assert (first.name, first.phase, first.step) == ("0/weight", "optimizer", 0)
    assert first.confidence == "certain"
    words = f"weight is changed after the step in the {side}, not in the {other}"
    assert first.sentence.startswith(words)
    assert len(result.findings) == 1
    with pytest.raises(ReplayRefused, match="after its step was not captured"):
        whence.repro(result, tmp_path / "repro")
    assert not any("--level op" in step.command for step in result.next)


def test_one_parameter_is_named_alone(tmp_path):
    result = compared(tmp_path, nothing, one_clipped)
    assert [(f.name, f.also) for f in result.findings] == [("3/weight", ())]


def test_it_is_named_beside_rounding(tmp_path):
    train(nothing, tmp_path / "reference")
    train(taken_over(0.9), tmp_path / "target", parts=True)
    first = whence.compare(tmp_path / "reference", tmp_path / "target").findings[0]
    assert (first.name, first.confidence) == ("1/weight", "certain")


@pytest.mark.parametrize(
    ("reference", "target"),
    (
        (taken_over(0.9), taken_over(0.8)),
        (evaluated(0.9), evaluated(0.8)),
        (clipped(0.1), clipped(0.09)),
    ),
    ids=("taken", "evaluated", "clipped"),
)
def test_what_both_runs_do_differently_is_named_where_all_before_is_equal(
    reference, target, tmp_path
):
    first = compared(tmp_path, reference, target).findings[0]
    assert (first.name, first.phase, first.step) == ("0/weight", "optimizer", 0)
    assert (first.confidence, first.cause) == ("likely", "semantic")
    assert first.sentence.startswith(
        "weight is changed after the step in both runs, and differently"
    )


@pytest.mark.parametrize(
    ("reference", "target"),
    (
        (taken_over(0.9), taken_over(0.9)),
        (evaluated(0.9), evaluated(0.9)),
        (clipped(0.1), clipped(0.1)),
        (nothing, clipped(100.0)),
    ),
    ids=("taken", "evaluated", "clipped", "clipped by nothing"),
)
def test_the_same_after_a_step_is_silent(reference, target, tmp_path):
    train(reference, tmp_path / "reference")
    train(target, tmp_path / "target", parts=True)
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert not result.findings
    assert result.status in ("same", "undecided")
    train(reference, tmp_path / "again")
    assert whence.compare(tmp_path / "reference", tmp_path / "again").status == "same"


def test_what_both_runs_do_differently_is_undecided_beside_rounding(tmp_path):
    train(taken_over(0.9), tmp_path / "reference")
    train(taken_over(0.8), tmp_path / "target", parts=True)
    assert whence.compare(tmp_path / "reference", tmp_path / "target").status == "undecided"
