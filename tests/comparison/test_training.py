"""Training runs: what goes wrong between a loss and the optimiser's step is named there, and what
is only written in another way is not.
"""

import pytest
import torch
from torch import nn

import whence

pytestmark = pytest.mark.torch


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.BatchNorm1d(32),
        nn.GELU(),
        nn.Linear(32, 32),
        nn.LayerNorm(32),
        nn.Linear(32, 4),
    )


_clip_imported_before = nn.utils.clip_grad_norm_


def train(net, path, rate=1e-2, zero=True, change=lambda _: None, lower=False, **options):
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(net.train().parameters(), lr=rate)
    draw = torch.Generator().manual_seed(3)
    with whence.capture(net, path, force=True, **options):
        for _ in range(3):
            for _ in range(2):
                x, y = torch.randn(8, 16, generator=draw), torch.randint(0, 4, (8,), generator=draw)
                with torch.autocast("cpu", torch.bfloat16, enabled=lower):
                    loss = nn.functional.cross_entropy(net(x), y)
                loss.backward()
            change(list(net.parameters()))
            optimizer.step()
            if zero:
                optimizer.zero_grad()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("training") / "ref"
    train(model(), path)
    return path


def test_the_same_training_is_the_same(reference, tmp_path):
    train(model(), tmp_path / "tgt")
    assert whence.compare(reference, tmp_path / "tgt").status == "same"


def test_a_fault_in_the_forward_is_named_once_and_its_consequences_are_not(reference, tmp_path):
    broken = model()
    broken[4].eps = 1e-2
    train(broken, tmp_path / "tgt")
    result = whence.compare(reference, tmp_path / "tgt")
    assert [(f.name, f.step, f.cause) for f in result.findings] == [("4", 0, "semantic")]


def test_a_hyper_parameter_is_named_at_the_step_of_the_optimiser(reference, tmp_path):
    train(model(), tmp_path / "tgt", rate=2e-2)
    first = whence.compare(reference, tmp_path / "tgt").findings[0]
    assert (first.name, first.phase, first.step) == ("0/weight", "optimizer", 0)
    assert "lr is 0.01 in the reference, 0.02 in the target" in first.sentence


def clip(parameters):
    nn.utils.clip_grad_norm_(parameters, 0.1)


def clip_by_hand(parameters):
    norm = torch.stack([p.grad.pow(2).sum() for p in parameters]).sum().sqrt()
    for p in parameters:
        p.grad.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0))


def clip_in_two_calls(parameters):
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)


@pytest.fixture(scope="module")
def clipped(tmp_path_factory):
    path = tmp_path_factory.mktemp("clipped") / "ref"
    train(model(), path, change=clip)
    return path


@pytest.mark.parametrize(
    "other",
    [clip_by_hand, clip_in_two_calls, lambda parameters: _clip_imported_before(parameters, 0.1)],
)
def test_clipping_written_otherwise_is_the_same(clipped, tmp_path, other):
    train(model(), tmp_path / "tgt", change=other)
    assert whence.compare(clipped, tmp_path / "tgt").status == "same"


@pytest.mark.parametrize(
    "other", [lambda parameters: None, lambda parameters: _clip_imported_before(parameters, 0.09)]
)
def test_clipping_that_is_missing_or_other_is_named(clipped, tmp_path, other):
    train(model(), tmp_path / "tgt", change=other)
    first = whence.compare(clipped, tmp_path / "tgt").findings[0]
    assert (first.name, first.phase, first.step) == ("Sequential/gradients", "optimizer", 0)


def test_a_gradient_that_code_overwrites_is_named(reference, tmp_path):
    train(model(), tmp_path / "tgt", change=lambda parameters: parameters[4].grad.mul_(1.1))
    first = whence.compare(reference, tmp_path / "tgt").findings[0]
    assert (first.name, first.slot) == ("Sequential/gradients", "output.3.weight")


def test_gradients_that_are_never_zeroed_are_named_where_they_are_added(reference, tmp_path):
    train(model(), tmp_path / "tgt", zero=False)
    first = whence.compare(reference, tmp_path / "tgt").findings[0]
    assert first.name.endswith(".grad")
    assert (first.phase, first.step) == ("backward", 1)


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach())


def test_a_layer_that_detaches_its_input_is_named(reference, tmp_path):
    broken = model()
    broken[3].__class__ = Detached
    train(broken, tmp_path / "tgt")
    first = whence.compare(reference, tmp_path / "tgt").findings[0]
    assert (first.name, first.phase) == ("3", "")
    assert "detaches it inside" in first.sentence


def test_what_an_optimiser_parted_unseen_is_undecided_with_the_reason(tmp_path):
    train(model(), tmp_path / "ref", gradients=False)
    train(model(), tmp_path / "tgt", rate=2e-2, gradients=False)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert result.status == "undecided"
    assert result.findings == ()
    assert "diverged between steps" in result.headline
    assert "optimiser" in result.headline


def test_autocast_is_rounding_in_its_precision(reference, tmp_path):
    train(model(), tmp_path / "tgt", lower=True)
    result = whence.compare(reference, tmp_path / "tgt")
    assert result.findings == ()
    assert result.status == "same"


def test_weights_that_autocast_keeps_over_a_step_are_named(reference, tmp_path):
    with torch.autocast("cpu", torch.bfloat16):  # casts a weight once, and keeps the copy
        train(model(), tmp_path / "tgt", lower=True)
    first = whence.compare(reference, tmp_path / "tgt").findings[0]
    assert (first.name, first.step, first.cause) == ("0", 1, "kernel")


class Lowered(nn.Linear):
    def forward(self, x):
        out = nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())
        return out.float()


def test_one_layer_in_lower_precision_among_others_is_not_rounding(reference, tmp_path):
    lower = model()
    lower[3].__class__ = Lowered
    train(lower, tmp_path / "tgt")
    result = whence.compare(reference, tmp_path / "tgt")
    calls = {result.plan.pairs[v.pair].reference: v.verdict for v in result.verdicts}
    run = whence.open_run(reference)
    told = {run.calls[c].scope for c, v in calls.items() if v in ("precision", "introduced")}
    assert "3" in told


def test_a_fault_under_autocast_is_named(reference, tmp_path):
    broken = model()
    broken[4].eps = 1e-2
    train(broken, tmp_path / "tgt", lower=True)
    assert [f.name for f in whence.compare(reference, tmp_path / "tgt").findings] == ["4"]


class Decaying(torch.optim.AdamW):
    """Calls the step of its base, which other optimisers of the program have hooked too."""

    factor = 1.0

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(self.factor)


@pytest.mark.parametrize("factor", [1.0, 0.999])
def test_a_step_inside_of_a_step_is_a_part_of_it(factor, tmp_path):
    torch.optim.AdamW(nn.Linear(2, 2).parameters())  # from here on the base class has hooks

    def trained(path, factor):
        net = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
        torch.manual_seed(0)
        for parameter in net.parameters():
            nn.init.normal_(parameter)
        optimizer = Decaying(net.parameters())
        optimizer.factor = factor
        with whence.capture(net, path):
            net(torch.ones(3, 16)).pow(2).mean().backward()
            optimizer.step()
        return path

    result = whence.compare(trained(tmp_path / "a", 1.0), trained(tmp_path / "b", factor))
    steps = whence.open_run(tmp_path / "a").steps
    assert len({(step.root, step.step) for step in steps}) == 1
    if factor == 1.0:
        assert result.status == "same"
    else:
        first = result.findings[0]
        assert (first.op_type, first.slot, first.step) == ("Decaying", "output.param", 0)
