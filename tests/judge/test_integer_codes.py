"""Integers of 8 bits that were rounded from something: how far the values were apart, and what lies
at a boundary.
"""

import ml_dtypes
import numpy as np
import pytest

from whence import metrics
from whence.judge import PairError as Err
from whence.judge import (
    are_codes,
    at_boundaries,
    beyond_boundaries,
    error_of_codes,
    error_of_scaled,
    grow,
)

RNG = np.random.default_rng(5)
U32 = 2.0**-24


def codes(values, scale=0.02, zero=0, dtype=np.int8, rounded=np.rint):
    ends = np.iinfo(dtype)
    return np.clip(rounded(values / scale) + zero, ends.min, ends.max).astype(dtype)


@pytest.mark.parametrize("size", [1e-3, 1e-2, 0.1])
@pytest.mark.parametrize(("zero", "dtype"), [(0, np.int8), (128, np.uint8)])
def test_the_error_is_that_of_the_values_before_rounding(size, zero, dtype):
    x = RNG.normal(size=200_000) * 0.7
    y = x + RNG.normal(size=x.size) * 0.7 * size
    found = error_of_codes(
        np.dtype(dtype).name,
        metrics.measure(codes(x, zero=zero, dtype=dtype), codes(y, zero=zero, dtype=dtype)),
    )
    assert found.value == pytest.approx(size, rel=0.2)
    assert found.codes


@pytest.mark.parametrize(
    ("dtype", "array", "is_codes"),
    [
        ("int8", np.array([-128, 0, 127], np.int8), True),
        ("uint8", np.arange(256, dtype=np.uint8), True),
        ("uint8", np.array([0, 1, 1], np.uint8), False),
        ("int64", np.array([0, 9, 40]), False),
        ("int8", np.array([-8, 7], np.int8), True),
    ],
)
def test_masks_and_indices_are_no_codes(dtype, array, is_codes):
    assert are_codes(dtype, metrics.measure(array, array[::-1].copy())) is is_codes


def test_one_element_off_by_many_steps_stands_alone():
    a = codes(RNG.normal(size=4096))
    b = a.copy()
    b[7] = -128 if a[7] > 0 else 127
    error = error_of_codes("int8", metrics.measure(a, b))
    assert grow([Err(0.0, exact=True, u=U32)], [error], error.u).verdict == "introduced"


def test_a_few_codes_at_a_boundary_are_no_growth_and_half_of_them_are():
    x = RNG.normal(size=4096)
    a = codes(x)
    few = a.copy()
    few[:3] += np.where(a[:3] < 100, 1, -1).astype(np.int8)
    for b, verdict in (
        (few, ("noise", "amplified")),
        (codes(x, rounded=np.floor), ("introduced",)),
        (codes(x, 0.021), ("introduced",)),
    ):
        error = error_of_codes("int8", metrics.measure(a, b))
        assert grow([Err(0.0, exact=True, u=U32)], [error], error.u).verdict in verdict


def half_away(x):
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def test_ties_lie_at_boundaries():
    x = (RNG.integers(-60, 60, size=4096) / 8).astype(np.float32)
    even, away = codes(x, 0.25), codes(x, 0.25, rounded=half_away)
    assert (even != away).any()
    assert at_boundaries(x, even, away, U32)
    y = RNG.normal(size=4096).astype(np.float32)
    assert not at_boundaries(y, codes(y), codes(y, rounded=np.floor), U32)
    assert not at_boundaries(y, codes(y), codes(y, 0.0201), U32)
    assert not at_boundaries(y, codes(y), codes(2 * y), U32)


def test_what_copies_show_to_lie_at_a_boundary_may_be_either():
    wide = np.array([10, 20, 30, 40], np.int8)
    copy = np.array([10, 21, 30, 40], np.int8)
    assert beyond_boundaries(np.array([10, 21, 30, 40], np.int8), [wide, copy]) == 0
    assert (
        beyond_boundaries(np.array([11, 20, 30, 40], np.int8), [wide, copy]) == 0
    )  # one more draw might have shown it
    assert beyond_boundaries(np.array([11, 20, 31, 40], np.int8), [wide, copy]) == 2
    assert beyond_boundaries(np.array([12, 20, 30, 40], np.int8), [wide, copy]) == 1
    assert beyond_boundaries(np.array([11, 20]), [np.array([10, 20])]) == 1


E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-3, 1e-2, 0.1])
def test_the_error_of_float_codes_is_that_of_the_values_before_rounding(dtype, size):
    x = RNG.normal(size=100_000) * 20
    y = x + RNG.normal(size=x.size) * 20 * size
    measured = metrics.measure(x.astype(dtype), y.astype(dtype))
    name = np.dtype(dtype).name
    assert are_codes(name, measured)
    assert error_of_codes(name, measured).value == pytest.approx(size, rel=0.2)


def scaled(values, amax, dtype, made=np.asarray):
    """(codes, scale) with a scale for each row."""
    top = 127.0 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max)
    scale = (amax / top).astype(np.float32)
    wide = np.clip(made(values / scale), -top, top)
    return (np.rint(wide) if dtype == np.int8 else wide).astype(dtype), scale


@pytest.mark.parametrize("dtype", [np.int8, E4M3, E5M2])
@pytest.mark.parametrize("factor", [1 + 1e-6, 1.01, 1.4, 2.0])
def test_codes_of_another_scale_that_stand_for_the_same_numbers_do_not_differ(dtype, factor):
    x = RNG.normal(size=(64, 256))
    amax = np.abs(x).max(1, keepdims=True)
    a, scale_a = scaled(x, amax, dtype)
    b, scale_b = scaled(x, amax * factor, dtype)
    for form in (np.asarray, np.reciprocal, np.ravel):
        error = error_of_scaled((a, b), (form(scale_a), form(scale_b)))
        assert error.value < 1e-6


@pytest.mark.parametrize("dtype", [np.int8, E4M3, E5M2])
@pytest.mark.parametrize("factor", [1 + 1e-6, 1.4])
@pytest.mark.parametrize(
    "made",
    [
        lambda y: y * 1.3,
        lambda y: np.where(np.arange(y.shape[1]) % 4 == 0, y * 1.3, y),
        lambda y: y * 0.96,
        lambda y: np.roll(y, 1, axis=0),
    ],
)
def test_codes_of_another_scale_that_stand_for_other_numbers_differ(dtype, factor, made):
    x = RNG.normal(size=(64, 256))
    amax = np.abs(x).max(1, keepdims=True)
    a, scale_a = scaled(x, amax, dtype)
    b, scale_b = scaled(x, amax * factor, dtype, made)
    assert error_of_scaled((a, b), (scale_a, scale_b)).value > 0.01
