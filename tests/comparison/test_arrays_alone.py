"""Arrays without calls or inputs: what differs is never the same, however its size is put."""

import numpy as np
import pytest

import whence

NUMBERS = np.random.default_rng(0).normal(size=(8, 9)).astype(np.float32)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (np.zeros((8, 8), np.float32), np.ones((8, 8), np.float32)),
        (
            NUMBERS * np.float32(1e-8),
            NUMBERS * np.where(np.arange(9) % 2, -1, 1).astype(np.float32) * np.float32(1e-8),
        ),
        (np.array([True, False] * 8), np.array([True, True] * 8)),
        (np.full(9, 2**24 + 1), np.full(9, 2**24)),
        (NUMBERS.astype(np.float64) * 1e300, NUMBERS.astype(np.float64) * 1.1e300),
        (NUMBERS + 1j, NUMBERS - 1j),
        (NUMBERS, 2 * NUMBERS),
        (NUMBERS, np.where(NUMBERS.max() == NUMBERS, np.float32(np.inf), NUMBERS)),
        (np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(3, 2)),
    ],
)
def test_what_differs_is_not_the_same(tmp_path, one, two):
    for side, array in (("ref", one), ("tgt", two)):
        (tmp_path / side).mkdir()
        np.save(tmp_path / side / "x.npy", array)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt", view=("msit", "aclcmp"))
    assert result.status != "same"
    assert result.headline or result.findings
    assert whence.compare(tmp_path / "ref", tmp_path / "ref").status == "same"
