import math

import pytest

from whence.judge import Error, grow
from whence.judge.verdict import judge_region

U = 2.0**-24


@pytest.mark.parametrize(
    ("e_in", "e_out", "verdict"),
    [
        ([0.0], 1e-7, "noise"),
        ([1e-3], 1e-3, "inherited"),
        ([1e-3], 3e-3, "amplified"),
        ([1e-3], 6e-3, "introduced"),
        ([0.0], 1e-5, "introduced"),
        ([1.0], 1.4, "inherited"),
        ([math.inf], math.inf, "inherited"),
        ([0.0], math.inf, "introduced"),
    ],
)
def test_growth(e_in, e_out, verdict):
    assert grow([Error(e, u=U) for e in e_in], [Error(e_out, u=U)], U).verdict == verdict


def test_bitwise_equal_is_identical():
    assert grow([Error(0.3)], [Error(0.0, exact=True)], U).verdict == "identical"


def test_an_input_that_could_not_be_measured_makes_growth_undetermined():
    assert grow([Error(None), Error(0.0)], [Error(1e-3)], U).verdict == "undetermined"
    assert grow([Error(0.0)], [Error(None)], U).verdict == "undetermined"


def test_two_dumps_are_never_certain():
    verdict = judge_region(0, 1, grow([Error(0.0)], [Error(1.0)], U))
    assert (verdict.verdict, verdict.confidence) == ("introduced", "likely")


def test_statistics_have_twice_the_band_and_are_suspects():
    assert grow([Error(0.0, "statistics")], [Error(15 * U, "statistics")], U).verdict == "amplified"
    weak = judge_region(0, -1, grow([Error(0.0, "statistics")], [Error(30 * U, "statistics")], U))
    assert weak.confidence == "suspect"
