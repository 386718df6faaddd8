"""The second floor has the noise of torch's own kernels too, not only of oneDNN's."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import program_recording as recording  # noqa: E402
from torch import nn  # noqa: E402

import whence  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def onednn():
    if not torch._C._get_mkldnn_enabled() or not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")


def without(function):
    torch._C._set_mkldnn_enabled(False)
    try:
        return function()
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_written_out_means_on_torchs_own_kernels(onednn):
    x = torch.linspace(-4, 4, 4096).reshape(16, 256)
    with torch.no_grad():
        _, recorded = recording.record(nn.GELU(), x)
    loaded = recorded.load()
    one = loaded.run(recorded.inputs, {})["output.0"]
    other = loaded.run(recorded.inputs, {}, stepwise=True)["output.0"]
    np.testing.assert_array_equal(one, nn.functional.gelu(x).numpy())
    np.testing.assert_array_equal(other, without(lambda: nn.functional.gelu(x)).numpy())
    assert torch._C._get_mkldnn_enabled()


def test_16_bit_kernels_stay(onednn):
    x = torch.linspace(-4, 4, 4096).reshape(16, 256).bfloat16()
    with torch.no_grad():
        _, recorded = recording.record(nn.GELU(), x)
    loaded = recorded.load()
    for stepwise in (False, True):
        np.testing.assert_array_equal(
            loaded.run(recorded.inputs, {}, stepwise=stepwise)["output.0"],
            recording.host(nn.functional.gelu(x)),
        )


@pytest.mark.parametrize("swap", [False, True])
def test_a_run_without_onednn_is_the_same(tmp_path, onednn, swap):
    """A GELU of values near -3, where torch's own erf leaves 1 + erf the least."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    with torch.no_grad():
        model[0].bias -= 3.0
        model[0].weight *= 0.1
    x = torch.randn(64, 8)

    def run(m, path):
        with torch.no_grad(), whence.capture(m, path):
            m(x)

    sides = [
        (lambda: run(model, tmp_path / "0")),
        (lambda: without(lambda: run(copy.deepcopy(model), tmp_path / "1"))),
    ]
    for side in reversed(sides) if swap else sides:
        side()
    order = ("1", "0") if swap else ("0", "1")
    result = whence.compare(*(tmp_path / name for name in order))
    assert (result.status, result.findings) == ("same", ())


class WrittenGelu(nn.Module):
    """GELU as a decomposed graph writes it, with an error function of one's own."""

    def __init__(self, erf):
        super().__init__()
        self.erf = erf

    def forward(self, x):
        return 0.5 * x * (1 + self.erf(x * 0.5**0.5))


def vector_erf(x):
    """Abramowitz and Stegun 7.1.26 in Horner form, as vector kernels have it."""
    t = torch.reciprocal(x.abs() * 0.3275911 + 1)
    r = torch.full_like(t, 1.061405429)
    for a in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        r = r * t + a
    return torch.sign(x) * (1 - r * t * torch.exp(-x * x))


@pytest.mark.parametrize(("fault", "status"), [(0.0, "same"), (3e-5, "different")])
def test_an_error_function_of_vector_kernels_is_no_fault(tmp_path, fault, status):
    torch.manual_seed(0)
    x = 0.7 * torch.randn(64, 96) - 1.5  # 1 + erf cancels
    for name, erf in (("ref", torch.erf), ("tgt", lambda x: vector_erf(x) + fault)):
        model = WrittenGelu(erf)
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(x)
    assert whence.compare(tmp_path / "ref", tmp_path / "tgt").status == status
