"""Numbers that a generator draws are as they should be; those of another distribution are not."""

import math

import numpy as np
import pytest
from scipy import stats

from whence.judge import chance_bits, misdrawn
from whence.judge.random_numbers import distribution
from whence.records.storage import Statistics

SETTINGS = {
    "aten.bernoulli_.float": {"p": 0.9},
    "aten.native_dropout.default": {"p": 0.1},
    "aten.uniform_.default": {"from": -1.0, "to": 3.0},
    "aten.rand.default": {},
    "aten.normal_.default": {"mean": 1.0, "std": 0.02},
    "aten.randn_like.default": {},
    "aten.exponential_.default": {"lambd": 2.0},
}
ORACLES = {
    "aten.bernoulli_.float": stats.bernoulli(0.9),
    "aten.native_dropout.default": stats.bernoulli(0.9),
    "aten.uniform_.default": stats.uniform(-1, 4),
    "aten.rand.default": stats.uniform(0, 1),
    "aten.normal_.default": stats.norm(1, 0.02),
    "aten.randn_like.default": stats.norm(),
    "aten.exponential_.default": stats.expon(scale=0.5),
}


def figures(x):
    x = np.asarray(x, np.float64)
    norm = float(np.linalg.norm(x))
    low, high, zeros = float(x.min()), float(x.max()), int((x == 0).sum())
    return Statistics(x.size, low, high, float(x.mean()), float(x.std()), norm, 0, 0, zeros)


@pytest.mark.parametrize("operator", ORACLES)
def test_the_distribution_is_scipys(operator):
    mean, variance, excess = ORACLES[operator].stats("mvk")
    found = distribution(operator, SETTINGS[operator])
    assert found == pytest.approx((float(mean), math.sqrt(variance), float(excess) + 3))


@pytest.mark.parametrize("operator", ORACLES)
def test_what_is_drawn_right_is_silent_and_what_is_drawn_otherwise_is_not(operator):
    rng = np.random.default_rng(0)
    for size in (8, 300, 5_000):
        for _ in range(200):
            drawn = ORACLES[operator].rvs(size=size, random_state=rng)
            assert not misdrawn(figures(drawn), operator, SETTINGS[operator])
    drawn = ORACLES[operator].rvs(size=5_000, random_state=rng)
    words = misdrawn(figures(0.5 * drawn), operator, SETTINGS[operator])
    assert "of 5000 random numbers is" in words and "deviations off" in words


def test_rounding_of_millions_of_numbers_is_no_other_distribution():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    drawn = np.random.default_rng(1).random(2_000_000).astype(ml_dtypes.bfloat16)
    floored = np.floor(np.random.default_rng(1).random(2_000_000) * 128) / 128
    assert not misdrawn(figures(drawn), "aten.rand.default", {})
    assert not misdrawn(figures(floored), "aten.rand.default", {})


def test_operators_that_are_not_known_and_too_few_numbers_say_nothing():
    assert not misdrawn(figures(np.zeros(9)), "aten.bernoulli_.float", {"p": 0.9})
    assert not misdrawn(figures(np.zeros(999)), "aten.randint.default", {"high": 7})
    assert not misdrawn(None, "aten.rand.default", {})


def test_bits_of_chance():
    mask = np.r_[np.zeros(3), np.ones(253)]
    assert chance_bits(figures(mask), is_floating=True) == pytest.approx(
        math.log2(math.comb(256, 3))
    )
    assert chance_bits(figures(np.ones(999)), is_floating=True) == 0
    assert chance_bits(figures([0.1, 0.2]), is_floating=True) == 32
    assert chance_bits(figures([1, 2]), is_floating=False) == 0
