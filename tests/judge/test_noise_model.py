"""Limits that follow from a rate of false alarms, against independent computations."""

import math

import numpy as np
import pytest

from whence import judge
from whence.judge import noise_model
from whence.judge.noise_model import Tail


def tail_of_t(t, degrees):
    """P(|T| > t) by integrating Student's density, from t outwards, on a logarithmic grid."""
    x = t * np.exp(np.linspace(0, 40, 400_001))
    log_density = (
        math.lgamma((degrees + 1) / 2)
        - math.lgamma(degrees / 2)
        - math.log(degrees * math.pi) / 2
        - (degrees + 1) / 2 * np.log1p(x * x / degrees)
    )
    return 2 * float(np.trapezoid(np.exp(log_density), x))


@pytest.mark.parametrize("degrees", [7, 20, 100, 3000])
@pytest.mark.parametrize("t", [1.0, 3.0, 6.0, 12.0])
def test_a_quantile_of_student_is_as_rare_as_the_normal_one(degrees, t):
    score = noise_model.normal_score(t, degrees)
    if score > 7:
        return
    assert math.erfc(score / math.sqrt(2)) == pytest.approx(tail_of_t(t, degrees), rel=0.2)


def test_one_comparison_in_a_thousand_exceeds_a_limit():
    """The largest of all averages of a comparison, drawn from the null distribution."""
    rng = np.random.default_rng(0)
    tests, outputs, comparisons = 24, 100, 4000
    limit = noise_model.limit(tests, outputs)
    over = 0
    for _ in range(comparisons // 100):
        drawn = rng.standard_normal((100, noise_model.FAMILIES * tests * outputs))
        over += int((np.abs(drawn).max(1) > limit).sum())
    assert over <= 12  # four are expected


def test_limits_grow_with_what_is_tested():
    limits = [noise_model.limit(tests, n) for n in (100, 10_000) for tests in (1, 24, 4096)]
    assert limits[:3] == sorted(limits[:3])
    assert limits[3:] == sorted(limits[3:])
    assert limits[3] > limits[0]
    assert noise_model.limit(1, 1) == noise_model.limit(1, noise_model.FEWEST_OUTPUTS)


def test_a_chance_is_that_of_the_whole_comparison():
    score = 5.0
    one = noise_model.chance(score, 1, 1)
    assert one == pytest.approx(noise_model.FAMILIES * math.erfc(score / math.sqrt(2)))
    assert noise_model.chance(score, 24, 500) == pytest.approx(24 * 500 * one)
    assert noise_model.chance(0.0, 1, 1) == 1.0
    assert noise_model.chance(1e9, 1, 1) == 0.0


def test_an_exponential_tail():
    tail = Tail(2.0, 1.5)
    limit = tail.limit(1000)
    assert limit == pytest.approx(2.0 + 1.5 * 6)
    assert tail.chance(limit, 1000) == pytest.approx(noise_model.FALSE_ALARMS)
    assert tail.chance(limit + 1.5, 1000) == pytest.approx(noise_model.FALSE_ALARMS / 10)
    assert tail.chance(0.0, 1000) == 1.0
    assert tail.chance(math.inf, 1000) == 0.0


def test_the_more_outputs_the_further_one_may_stray():
    rng = np.random.default_rng(1)
    r = rng.standard_normal((64, 64))
    w = r.astype(np.float32)
    y = w.copy()
    y[3, 5] += 1.5e-6
    few, many = (judge.local(y, r, w, outputs=n) for n in (100, 10**9))
    assert few.z == many.z
    assert few.score > many.score
    assert few.chance() < many.chance()
