"""What a parameter looks like that was never loaded, and what does not look so."""

import numpy as np
import pytest

from whence.judge.initialisation import unlike

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def trained(shape, seed=0):
    """Heavy-tailed, as weights are after training: the product of two independent normals."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * rng.standard_normal(shape) * 0.07).astype(np.float32)


def drawn(how, shape, seed=1):
    made = torch.Generator().manual_seed(seed)
    weight, init = torch.empty(shape), torch.nn.init
    if how == "linear":
        return init.kaiming_uniform_(weight, a=5**0.5, generator=made).numpy()
    if how == "glorot":
        return init.xavier_uniform_(weight, generator=made).numpy()
    if how == "he":
        return init.kaiming_normal_(weight, generator=made).numpy()
    return weight.normal_(0, float(how), generator=made).numpy()


@pytest.mark.parametrize("how", ["linear", "glorot", "he", "0.02", "1.0"])
@pytest.mark.parametrize("shape", [(48, 96), (64, 8, 3, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_layer_is_made_with(how, shape, seed):
    words = unlike(trained(shape, seed), drawn(how, shape, seed))
    assert words.endswith("as a layer is made: not loaded?")
    assert "correlation" in words and ("uniform" in words) == (how in ("linear", "glorot"))


@pytest.mark.parametrize("seed", range(8))
def test_trained_weights_are_never_called_made(seed):
    weight = trained((48, 96), seed)
    other = trained((48, 96), seed + 100)
    assert unlike(weight, other) == unlike(weight, other).partition(",")[0] != ""
    noise = np.random.default_rng(seed).standard_normal(weight.shape).astype(np.float32)
    for near in (weight * 1.3, weight + 0.02 * noise, np.where(noise > 0, weight, other)):
        assert unlike(weight, near) == ""


def test_two_models_that_were_never_trained_say_nothing_of_loading():
    first, second = drawn("linear", (48, 96), 1), drawn("linear", (48, 96), 2)
    assert "not loaded" not in unlike(first, second)
    assert unlike(first, second).startswith("nothing in common")


def test_constants():
    norm = np.linspace(0.5, 2, 16, dtype=np.float32)
    assert unlike(norm, np.ones_like(norm)) == "all ones is what a layer is made with: not loaded?"
    assert unlike(norm, np.zeros_like(norm)).endswith("not loaded?")
    assert unlike(norm, np.full_like(norm, 3)) == ""
    assert unlike(np.ones_like(norm), norm) == ""
    assert unlike(norm[:1], np.ones_like(norm[:1])) == ""


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_or_no_number_is_left_alone(bad):
    weight = trained((8, 16))
    broken = weight.copy()
    broken[3, 3] = bad
    assert unlike(weight, broken) == unlike(broken, weight) == ""
    assert unlike(weight, np.ones(weight.shape, np.int8)) == ""
