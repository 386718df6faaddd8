"""What is wrong before an optimiser's step and right behind it: another form, if the step makes up
for it.
"""

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.nn import functional as F

import whence

pytestmark = pytest.mark.torch


def taught(path, optimiser, loss=F.mse_loss):
    """Two steps of a small network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x, y = torch.randn(2, 6, 8), torch.randn(2, 6, 4)
    step = optimiser(net.parameters())
    with whence.capture(net, path):
        for batch, wanted in zip(x, y, strict=True):
            loss(net(batch), wanted).backward()
            step.step()
            step.zero_grad()
    return path


def sgd(**options):
    return lambda p: torch.optim.SGD(p, **{"lr": 0.1, **options})


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2, eps=0.0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return taught(tmp_path_factory.mktemp("made") / "reference", sgd())


SAME = {
    "the rate in the loss": (sgd(lr=1.0), lambda out, y: F.mse_loss(out, y) * 0.1),
    "maximised": (sgd(maximize=True), lambda out, y: -F.mse_loss(out, y)),
}


@pytest.mark.parametrize("case", SAME)
def test_what_the_step_makes_up_for_is_another_form(case, reference, tmp_path):
    result = whence.compare(reference, taught(tmp_path / "target", *SAME[case]))
    assert result.status == "same", result.findings[0].sentence
    withdrawn = [v.sentence for v in result.verdicts if v.verdict == "other-form"]
    assert any("the parameters that it leaves are right" in words for words in withdrawn)


def test_half_of_it_is_a_fault(reference, tmp_path):
    """The rate makes up for another factor than the loss has."""
    optimiser, _ = SAME["the rate in the loss"]
    target = taught(tmp_path / "target", optimiser, lambda out, y: F.mse_loss(out, y) * 0.11)
    assert whence.compare(reference, target).status == "different"


def test_a_scale_that_the_step_hides_is_a_fault(tmp_path):
    """Adam takes any factor out of the gradients: the same step in both runs makes up for none."""
    runs = [
        taught(tmp_path / name, adam, loss)
        for name, loss in (("a", F.mse_loss), ("b", lambda out, y: F.mse_loss(out, y) * 4))
    ]
    result = whence.compare(*runs)
    assert result.status == "different"
    assert "loss" in result.findings[0].name


def test_a_weight_that_the_code_behind_it_counts_on_is_another_form(tmp_path):
    """A layer's outputs are centred by its weight, and the norm behind it subtracts no mean."""

    class Norm(nn.LayerNorm):
        def forward(self, x):
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) + self.bias

    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(8, 16), kind(16), nn.Linear(16, 4)) for kind in (nn.LayerNorm, Norm)
    ]
    nets[1].load_state_dict(nets[0].state_dict())
    runs = []
    for name in ("reference", "half", "target"):
        net = nets[name != "reference"]
        if name == "target":
            with torch.no_grad():
                net[0].weight -= net[0].weight.mean(0)
                net[0].bias -= net[0].bias.mean()
        runs.append(tmp_path / name)
        with whence.capture(net, runs[-1]), torch.no_grad():
            net(torch.linspace(-1, 1, 48).reshape(6, 8))
    assert whence.compare(runs[0], runs[1]).findings[0].name == "1"
    result = whence.compare(runs[0], runs[2])
    assert result.status == "same", [f.sentence for f in result.findings]
