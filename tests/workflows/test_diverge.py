"""When and where two trainings part."""

import json

import pytest
import torch
from torch import nn

import whence
from whence.cli import execute
from whence.results import PartKind

pytestmark = pytest.mark.torch
STEPS = 16


def train(path, *, k=10**9, fault="", halves=False, steps=STEPS, **options):
    """A training; from step k on it has a fault. halves: other sums, which round otherwise."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    first = net[0]
    if halves:
        weight = first.weight
        first.forward = lambda x: (
            x[:, :3] @ weight[:, :3].T + x[:, 3:] @ weight[:, 3:].T + first.bias
        )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with whence.capture(net, path, keep="stats", force=True, **options):
        for step in range(steps):
            made = torch.Generator().manual_seed(step - (fault == "batch" and step >= k))
            x, y = torch.randn(6, 8, generator=made), torch.randn(6, 4, generator=made)
            if step == k:
                _break(fault, net, optimizer)
            out = net(x)
            loss = nn.functional.mse_loss(
                out, y.roll(1, 0) if fault == "labels" and step >= k else y
            )
            loss.backward()
            if fault == "gradient" and step == k:
                net[2].weight.grad.mul_(1.02)
            optimizer.step()
            optimizer.zero_grad()
    return str(path)


def _break(fault, net, optimizer):
    if fault == "rate":
        optimizer.param_groups[0]["lr"] = 1.01e-2
    if fault == "state":
        optimizer.state[net[2].weight]["exp_avg"].zero_()
    if fault == "weight":
        with torch.no_grad():
            net[2].weight[1].zero_()
    if fault == "module":
        forward = net[0].forward
        net[0].forward = lambda x: forward(x).bfloat16().float()
    if fault == "nan":
        forward = net[2].forward
        net[2].forward = lambda x: forward(x) * float("nan")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return train(tmp_path_factory.mktemp("diverge") / "reference")


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(
    ("fault", "kind", "place"),
    [
        ("batch", PartKind.BATCH, "Sequential input.0"),
        ("rate", PartKind.SETTING, "0/weight "),
        ("state", PartKind.STATE, "2/weight input.exp_avg"),
        ("weight", PartKind.PARAMETER, "2 param.weight"),
        ("module", PartKind.FORWARD, "0 output.0"),
        ("nan", PartKind.FORWARD, "2 output.0"),
        ("labels", PartKind.LOSS, "Sequential/loss output.0"),
        ("gradient", PartKind.GRADIENTS, "Sequential/gradients output.2.weight"),
    ],
)
def test_a_fault_is_named_with_its_step_and_place(fault, kind, place, halves, reference, tmp_path):
    result = whence.diverge(reference, train(tmp_path / "run", k=9, fault=fault, halves=halves))
    part = result.part
    assert result.status == "different"
    assert (part.step, part.kind, f"{part.name} {part.slot}") == (9, kind, place)
    assert ("whence compare" in result.next[-1]) and any("--steps" in line for line in result.next)


def test_the_loss_of_a_step_is_what_the_loss_returns_and_not_what_it_is_given(tmp_path):
    def trained(name, rate):
        torch.manual_seed(0)
        net = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        losses = []
        with whence.capture(net, tmp_path / name, keep="stats"):
            for step in range(3):
                draw = torch.Generator().manual_seed(step)
                x, y = torch.randn(6, 8, generator=draw), torch.randn(6, 4, generator=draw)
                loss = (net(x) - y).square().mean()
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        return losses

    losses = [trained("one", 0.1), trained("two", 0.2)]
    drift = whence.diverge(tmp_path / "one", tmp_path / "two").drift
    for step, expected in zip(drift, zip(*losses)):
        assert (step.reference, step.target) == pytest.approx(expected)


def test_equal_trainings_and_other_rounding_are_the_same(reference, tmp_path):
    again, halves = train(tmp_path / "again"), train(tmp_path / "halves", halves=True)
    equal = whence.diverge(reference, again)
    assert (equal.status, equal.first) == ("same", None)
    rounded = whence.diverge(reference, halves)
    assert (rounded.status, rounded.part) == ("same", None)
    assert rounded.first.name == "0" and rounded.first.error < 1e-5
    # what a repetition differs by is noise, whatever it looks like
    faulty = train(tmp_path / "faulty", k=9, fault="module")
    assert whence.diverge(reference, faulty, repeat=[faulty]).status == "same"


def test_a_first_difference_as_small_as_rounding_is_not_decided(reference, tmp_path):
    def tiny(fault, net, optimizer):
        with torch.no_grad():
            net[2].weight[0, 0] *= 1 + 3e-7

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}._break", tiny)
        late = whence.diverge(reference, train(tmp_path / "late", k=12, fault="tiny"))
    assert (late.status, late.part.step, late.part.slot) == ("undecided", 12, "param.weight")
    assert "--repeat" in late.why[0]


def test_steps_that_both_have_are_compared(reference, tmp_path):
    some = train(tmp_path / "some", k=9, fault="rate", every=3)
    result = whence.diverge(reference, some)
    assert result.steps == (0, 3, 6, 9, 12, 15)
    assert (result.part.step, result.part.kind) == (9, PartKind.SETTING)
    assert any("6 steps are in both" in note for note in result.notes)


def test_the_command_answers_and_refuses(reference, tmp_path, capsys):
    target = train(tmp_path / "run", k=9, fault="rate")
    assert execute(["diverge", reference, target]) == 1
    said = capsys.readouterr().out
    assert said.startswith("PART ") and "lr is 0.01 in the reference, 0.0101 in the target" in said
    assert execute(["diverge", reference, target, "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["part"]["kind"] == "setting"
    assert execute(["diverge", reference, reference]) == 0
    capsys.readouterr()
    assert execute(["diverge", reference, str(tmp_path / "nothing")]) == 3
    assert "nothing" in capsys.readouterr().err


def test_runs_of_different_length_are_compared_as_far_as_both_go(reference, tmp_path):
    result = whence.diverge(reference, train(tmp_path / "cut", steps=7))
    assert result.status == "same" and result.steps == tuple(range(7))
    assert any("7 steps are in both" in note for note in result.notes)
