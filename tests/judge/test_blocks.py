"""Blocks of 8-bit codes against a loop, and when they explain an error."""

import numpy as np
import pytest

from whence.judge import block_quantisation
from whence.judge.limits import CODES_EXPLAINED


def test_codes_of_blocks_are_those_of_a_loop():
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    want = np.zeros_like(x)
    for row in range(3):
        for start in (0, 32):
            block = x[row, start : start + 32]
            d = np.float32(np.abs(block).max() / np.float32(127))
            codes = np.rint(block * (np.float32(127) / np.abs(block).max()))
            want[row, start : start + 32] = codes * np.float64(np.float16(d))
    np.testing.assert_array_equal(block_quantisation.in_blocks(x, width=32), want)


def test_zeros_stay_and_what_fits_no_block_is_left_alone():
    x = np.zeros((2, 32), np.float32)
    np.testing.assert_array_equal(block_quantisation.in_blocks(x, width=32), x)
    y = np.ones((2, 33), np.float32) / 3
    assert block_quantisation.in_blocks(y, width=32) is y


def test_gain_is_of_rows_and_one_faulty_row_is_not_explained():
    before, after = np.full(8, 1e-2), np.full(8, 1e-4)
    assert block_quantisation.gain(before, after) > CODES_EXPLAINED
    after[3] = 0.2
    assert block_quantisation.gain(before, after) == 0.0
    after[3] = np.inf
    assert block_quantisation.gain(before, after) == 0.0
    assert block_quantisation.gain(before, before) == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("width", [32, 0])
def test_a_block_that_is_not_finite_has_no_codes_and_the_others_keep_theirs(bad, width):
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    broken = x.copy()
    broken[1, 40] = bad
    made, right = (
        block_quantisation.in_blocks(broken, width=width),
        block_quantisation.in_blocks(x, width=width),
    )
    lost = np.zeros(x.shape, bool)
    lost[1, 32 if width else 0 :] = True
    assert np.isnan(made[lost]).all()
    np.testing.assert_array_equal(made[~lost], right[~lost])


def test_what_has_no_scale_in_float16_or_none_at_all():
    x = np.ones((3, 32), np.float32)
    x[1, 5], x[2] = 3e38, 1e-40
    made = block_quantisation.in_blocks(x, width=32)
    np.testing.assert_allclose(made[0], 1, rtol=1e-3)
    assert np.isnan(made[1]).all()
    assert not made[2].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_on_either_side_is_infinitely_far_off(bad):
    x = np.random.default_rng(0).standard_normal((4, 64))
    y, r = x + 0.1, x.copy()
    y[0, 3], r[1, 3], y[2, 3], r[2, 3] = bad, bad, bad, bad
    found = block_quantisation.by_row(y, r)
    assert np.isinf(found[:3]).all()
    assert found[3] == pytest.approx(np.sqrt(0.64) / np.linalg.norm(x[3]))
