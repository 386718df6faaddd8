"""A scripted reference shows no inside: growth across a whole model is no evidence, a NaN is."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import whence  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
X = torch.linspace(-2, 2, 64).reshape(8, 8)


class Deep(nn.Module):
    def __init__(self, noise):
        super().__init__()
        torch.manual_seed(0)
        self.noise = noise
        self.layers = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(8, 8), nn.Tanh())])

    def forward(self, x):
        return self.layers(x) * (1 + (self.noise(x) if callable(self.noise) else self.noise))


def compared(tmp_path, noise):
    paths = [tmp_path / "reference", tmp_path / "target"]
    for path, how in zip(paths, (0.0, noise), strict=True):
        model = torch.jit.trace(Deep(how).eval(), X)
        with torch.no_grad(), whence.capture(model, path):
            model(X)
    return whence.compare(*paths)


def test_growth_across_a_whole_model_is_no_evidence(tmp_path):
    result = compared(tmp_path, 3e-6)  # 25 times the unit roundoff, from equal inputs
    assert (result.status, result.findings) == ("same", ())
    assert result.verdicts[0].numbers["growth"] > 5


def test_more_than_rounding_usually_makes_is_open(tmp_path):
    result = compared(tmp_path, lambda x: 1e-3 * torch.sin(100 * x))
    assert (result.status, result.findings) == ("undecided", ())
    assert "how many operators lie between is not known" in result.verdicts[0].sentence


def test_one_factor_on_everything_is_no_rounding(tmp_path):
    result = compared(tmp_path, 1e-3)
    assert (result.status, [f.verdict for f in result.findings]) == ("different", ["introduced"])
    assert "everything is multiplied by 1.001" in result.findings[0].sentence


def test_what_is_not_finite_on_one_side_is(tmp_path):
    result = compared(tmp_path, float("nan"))
    assert (result.status, [f.verdict for f in result.findings]) == ("different", ["introduced"])
