"""Blocks of 8-bit codes against a loop, and when they explain an error."""

import numpy as np

from whence.judge import blocks


def test_codes_of_blocks_are_those_of_a_loop():
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    want = np.zeros_like(x)
    for row in range(3):
        for start in (0, 32):
            block = x[row, start : start + 32]
            d = np.float32(np.abs(block).max() / np.float32(127))
            codes = np.rint(block * (np.float32(127) / np.abs(block).max()))
            want[row, start : start + 32] = codes * np.float64(np.float16(d))
    np.testing.assert_array_equal(blocks.in_blocks(x, width=32), want)


def test_zeros_stay_and_what_fits_no_block_is_left_alone():
    x = np.zeros((2, 32), np.float32)
    np.testing.assert_array_equal(blocks.in_blocks(x, width=32), x)
    y = np.ones((2, 33), np.float32) / 3
    assert blocks.in_blocks(y, width=32) is y


def test_gain_is_of_rows_and_one_faulty_row_is_not_explained():
    before, after = np.full(8, 1e-2), np.full(8, 1e-4)
    assert blocks.gain(before, after) > blocks.EXPLAINED
    after[3] = 0.2
    assert blocks.gain(before, after) == 0.0
    after[3] = np.inf
    assert blocks.gain(before, after) == 0.0
    assert blocks.gain(before, before) == 1.0
