"""Where a number lies in the band of its evidence."""

import numpy as np
import pytest

from whence.judge.band import band, with_sums

U32 = 2.0**-24


def drawn(seed, size, unit=U32):
    return 1 + unit * np.random.default_rng(seed).uniform(-1, 1, size)


def test_what_rounds_alike_is_inside_and_what_is_far_is_not():
    ways = [drawn(seed, 50) for seed in range(6)]
    around = band(np.ones(50), ways, U32)
    assert all(around.place(drawn(seed, 50)).is_inside for seed in range(10, 60))
    moved = drawn(9, 50)
    moved[7] += 1e-5
    placed = around.place(moved)
    assert not placed.is_inside and placed.index == (7,)


def test_few_ways_allow_more_than_many():
    limits = [band(np.ones(1), [drawn(s, 1) for s in range(n)], U32).limit_z for n in (1, 2, 4, 30)]
    assert limits == sorted(limits, reverse=True) and limits[0] > 100 > 10 > limits[-1]


def test_without_an_exact_result_the_mean_of_the_ways_stands_for_it():
    with pytest.raises(ValueError, match="an exact result or two ways"):
        band(None, [np.ones(3)], U32)
    around = band(None, [np.full(3, 1.0), np.full(3, 1.2)], 0.0)
    assert around.centre == pytest.approx(1.1) and around.degrees == 1 and not around.is_exact


def test_a_late_step_of_a_chaotic_curve_does_not_widen_the_band_of_an_early_one():
    growth = np.exp(np.linspace(0, 12, 40))
    ways = [1 + 1e-7 * growth * np.random.default_rng(s).normal(size=40) for s in range(6)]
    around = band(np.ones(40), ways, U32)
    assert around.halfwidth[0] < 1e-5 < 1e-3 < around.halfwidth[-1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_on_one_side_alone_is_outside(value):
    exact = np.array([1.0, value])
    assert band(exact, [exact, exact], U32).place(exact).is_inside
    placed = band(exact, [exact, exact], U32).place(np.ones(2))
    assert placed.mismatches == 1 and not placed.is_inside and placed.index == (1,)


def test_a_right_number_is_right_though_a_way_overflows():
    exact, way = np.array([1e39, 1.0]), np.array([np.inf, 1.0])
    around = band(exact, [way, way], U32)
    assert around.place(way).is_inside and around.place(exact).is_inside
    assert not around.place(np.array([-np.inf, 1.0])).is_inside


def test_printed_digits_are_no_difference():
    around = band(np.array([10.860583]), [np.array([10.860583])] * 4, U32)
    assert not around.place(np.array([10.86058])).is_inside
    assert around.place(np.array([10.86058]), 0.5e-5).is_inside


def test_sums_of_many_terms_may_be_added_in_any_order():
    numbers = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    exact = np.array([numbers.astype(np.float64).sum()])
    one_by_one = np.array([np.add.accumulate(numbers)[-1]], np.float32)
    plain = band(exact, [exact.astype(np.float32)] * 4, U32, alike=True)
    moved = np.array([U32 * np.linalg.norm(numbers)])
    assert with_sums(plain, moved, 4096, "float32").place(one_by_one).is_inside
