"""A loss that one run computes inside the model and the other behind it is one computation."""

import pytest

pytest.importorskip("torch")
import torch
from loss_trainings import (
    TOKENS,
    Net,
    behind,
    by_hand,
    half_detached,
    inside,
    smoothed,
    trained,
    without_auxiliary,
)
from torch import nn

import whence
from whence.report import answer

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Runs with the loss inside, and behind the model, by kind."""
    folder = tmp_path_factory.mktemp("losses")
    kinds = ("plain", "capped", "auxiliary", "module", "reads")
    return {
        (kind, place.__name__): trained(folder / f"{kind}-{place.__name__}", kind, place)
        for kind in kinds
        for place in (inside, behind)
    }


KINDS = ("plain", "capped", "auxiliary", "module")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["inside", "behind"])
def test_the_same_loss_in_another_place_is_the_same(kind, first, references):
    second = "behind" if first == "inside" else "inside"
    result = whence.compare(references[kind, first], references[kind, second])
    assert result.status == "same", answer.answer(result)
    assert not result.findings
    assert not result.plan.unmatched_reference
    assert not result.plan.unmatched_target
    words = (
        f"the loss is computed inside Net in the {'reference' if first == 'inside' else 'target'}"
    )
    assert any(note.startswith(words) for note in result.plan.notes)


def test_what_is_written_differently_too_is_the_same(references, tmp_path):
    for kind in ("plain", "auxiliary"):
        target = trained(tmp_path / kind, kind, by_hand)
        result = whence.compare(references[kind, "inside"], target)
        assert result.status == "same", answer.answer(result)


@pytest.mark.parametrize(
    ("kind", "loss", "phase", "name"),
    [
        ("plain", smoothed, "forward", "Net/loss"),
        ("capped", smoothed, "forward", "Net/loss"),
        ("module", smoothed, "forward", "Net/loss"),
        ("auxiliary", without_auxiliary, "forward", "Net/loss"),
        ("plain", half_detached, "backward", "Net"),
    ],
)
def test_another_loss_is_named(kind, loss, phase, name, references, tmp_path):
    target = trained(tmp_path / "t", kind, loss)
    result = whence.compare(references[kind, "inside"], target)
    first = result.findings[0]
    assert (first.name, first.phase or "forward", first.step) == (name, phase, 0)
    assert first.confidence == "certain"
    result = whence.compare(target, references[kind, "inside"])
    assert result.findings[0].name == name


def test_a_fault_elsewhere_is_named_elsewhere(references, tmp_path):
    def change(net):
        net.layer[1] = nn.GELU(approximate="tanh")

    target = trained(tmp_path / "t", "capped", behind, change=change)
    result = whence.compare(references["capped", "inside"], target)
    assert result.findings[0].name == "layer.1"
    assert not any("loss" in finding.name for finding in result.findings)


def test_a_scale_behind_the_model_belongs_to_the_loss(references, tmp_path):
    runs = [trained(tmp_path / p.__name__, "plain", p, divided=2) for p in (inside, behind)]
    assert whence.compare(*runs).status == "same"
    result = whence.compare(runs[0], references["plain", "behind"])
    assert result.findings[0].name == "Net/loss"


def test_further_runs_are_brought_to_the_same_form(references, tmp_path):
    again = trained(tmp_path / "again", "capped", inside)
    target = trained(tmp_path / "t", "capped", smoothed)
    result = whence.compare(references["capped", "inside"], target, again=[again])
    assert result.findings[0].name == "Net/loss"


def test_a_gradient_that_is_not_of_the_loss_alone_is_said(references):
    result = whence.compare(references["reads", "inside"], references["reads", "behind"])
    assert result.status == "undecided", answer.answer(result)
    assert "is not of the loss alone" in answer.answer(result)


def test_statistics_tell_the_place_of_the_loss_too(tmp_path):
    runs = [trained(tmp_path / p.__name__, "plain", p, keep="stats") for p in (inside, behind)]
    assert not whence.compare(*runs).findings


def test_two_losses_that_a_model_returns_are_said(tmp_path):
    def two(net, ids, labels):
        out = net(ids, labels)
        return out["loss"], out["beside"]

    def change(net):
        forward = net.forward
        net.forward = lambda ids, labels=None: (
            forward(ids)
            if labels is None
            else (out := forward(ids, labels)) | {"beside": out["hidden"].mean()}
        )

    torch.manual_seed(0)
    net, draw = Net("plain"), torch.Generator().manual_seed(1)
    change(net)
    ids, labels = torch.randint(0, TOKENS, (2, 3, 6), generator=draw)
    with whence.capture(net, tmp_path / "two"):
        torch.autograd.backward(two(net, ids, labels))
    with whence.capture(net, tmp_path / "one"):
        behind(net, ids, labels).backward()
    result = whence.compare(tmp_path / "two", tmp_path / "one")
    assert result.status != "same"
    assert "begin at output.beside and output.loss" in answer.answer(result)
