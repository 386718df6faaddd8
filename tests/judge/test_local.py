"""Replay figures against an independent computation, and the cases that are not numbers."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whence import judge
from whence.judge.limits import LIMITS

RNG = np.random.default_rng(0)


def pair(dtype, n=(40, 64)):
    r = RNG.standard_normal(n)
    return r, r.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_own_rounding_is_noise(dtype):
    r, w = pair(dtype)
    local = judge.local(w, r, w)
    assert local.score <= 1
    assert local.rho <= 2


def test_rho_is_error_over_the_floor():
    r, w = pair(np.float32)
    y = (r * (1 + 1e-5)).astype(np.float32)
    got = judge.local(y, r, w, reduction_length=100)
    e = np.linalg.norm((y - r).ravel())
    size = np.linalg.norm(r.ravel())
    floor = max(np.linalg.norm((w - r).ravel()), 0.5 * 2**-24 * size, 0.3 * 10 * 2**-24 * size)
    assert got.rho == pytest.approx(e / floor, rel=1e-9)
    assert got.floor_rel == pytest.approx(floor / size, rel=1e-9)
    assert got.structure.slope == pytest.approx(1e-5, rel=0.02)
    assert got.parts()["slope"] > 1


def in_order(terms, shape):
    """A rectified sum of products, added one by one in float32; and exact."""
    draw = np.random.default_rng(4)
    x, weight = (draw.standard_normal((terms, n)).astype(np.float32) for n in shape)
    total = np.zeros(shape, np.float32)
    for a, b in zip(x, weight, strict=True):
        total += a[:, None] * b
    exact = x.T.astype(np.float64) @ weight
    return np.maximum(total, 0), np.maximum(exact, 0), x.T @ weight


def test_the_worst_of_many_sums_in_order_is_rounding():
    """Each rounds by how far its own partial sums wandered, so that some stray far."""
    y, r, w = in_order(3000, (384, 320))
    got = judge.local(y, r, np.maximum(w, 0), reduction_length=3000)
    assert got.score <= 1
    assert got.z > 5  # more than the error of most
    y[7, np.argmax(y[7])] *= 1 + 1e-4
    assert judge.local(y, r, np.maximum(w, 0), reduction_length=3000).parts()["z"] > 1


def test_z_is_the_worst_element_in_units_of_its_row_or_column():
    r, w = pair(np.float32)
    y = w.copy()
    y[7, 11] += 1e-3
    got = judge.local(y, r, w)
    f = w.astype(np.float64) - r
    row, col = np.sqrt((f**2).mean(1, keepdims=True)), np.sqrt((f**2).mean(0, keepdims=True))
    u = 2.0**-24
    scale = np.maximum(row, col) + u * abs(r) + 1e-3 * u * np.sqrt((r**2).mean())
    z = abs(y - r) / scale
    assert got.z == pytest.approx(z.max(), rel=1e-9)
    assert got.z_index == (7, 11)
    assert got.score > 1


def test_an_element_may_be_off_by_what_any_order_of_its_sum_rounds():
    """Winograd's kernels round more than the replay's, here of 4608 terms; not by a ten-thousandth
    of what a weight is.
    """
    r, w = pair(np.float32)
    size = np.sqrt((r**2).mean())
    for off, is_right in ((6e-6, True), (1e-4, False)):
        y = w.copy()
        y[7, 11] += off * size
        got = judge.local(y, r, w, reduction_length=4608)
        assert (got.parts()["z"] <= 1) == is_right
        assert judge.local(y, r, w).parts()["z"] > 1


def test_an_element_that_the_working_replay_gives_too_is_no_fault():
    """Attention on a few of many tokens: one row of a head rounds far more than the rest does."""
    r, w = pair(ml_dtypes.bfloat16, (200, 64))
    w[7, 11] = r[7, 11] + 0.5
    assert judge.local(w, r, w).score <= 1
    elsewhere = w.copy()
    elsewhere[7, 11], elsewhere[8, 12] = r[7, 11], r[8, 12] + 0.5
    local = judge.local(elsewhere, r, w)
    assert local.parts()["z"] > 1
    assert local.z_index == (8, 12)


def test_one_element_out_of_many_is_flagged_although_rho_is_small():
    r = RNG.standard_normal((512, 512))
    w = r.astype(np.float32)
    y = w.copy()
    y[3, 4] += 2e-5
    got = judge.local(y, r, w)
    assert got.rho < LIMITS.rho
    assert got.score > 1


def test_masks_filled_with_the_smallest_number_of_each_dtype_match():
    r = RNG.standard_normal((8, 8))
    r[0, :] = np.finfo(np.float32).min
    y = r.astype(ml_dtypes.bfloat16)
    y[0, :] = ml_dtypes.finfo(ml_dtypes.bfloat16).min
    w = y.copy()
    got = judge.local(y, r, w)
    assert got.mismatch == 0
    assert got.score <= 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nan_the_replay_has_too_is_inherited_and_one_it_has_not_is_introduced(bad):
    r, w = pair(np.float32)
    y = w.copy()
    y[1, 2] = bad
    assert judge.local(y, r, w).score == math.inf
    assert judge.local(y, r, w).z_index == (1, 2)
    r[1, 2] = w[1, 2] = bad
    assert judge.local(y, r, w).score <= 1


def test_a_target_that_overflows_as_its_dtype_must_is_not_at_fault():
    r = np.full((4, 4), 1e5)
    with np.errstate(over="ignore"):
        w = r.astype(np.float16)
    assert judge.local(w.copy(), r, w).mismatch == 0


def test_integers_are_exact_against_either_replay():
    r = np.arange(12.0).reshape(3, 4)
    y = np.arange(12).reshape(3, 4)
    assert judge.local(y, r, r).score == 0
    y[2, 1] += 1
    got = judge.local(y, r, r)
    assert (got.score, got.integer_mismatch, got.z_index) == (math.inf, 1, (2, 1))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5,)])
def test_odd_shapes(shape):
    r = np.zeros(shape)
    assert judge.local(r.astype(np.float32), r, r.astype(np.float32)).score == 0


def test_zero_replay_and_a_target_that_is_not_zero():
    y = np.ones((4, 4), np.float32)
    got = judge.local(y, np.zeros((4, 4)), np.zeros((4, 4), np.float32))
    assert got.score > 1


def test_complex_parts_are_compared():
    r = RNG.standard_normal((6, 8)) + 1j * RNG.standard_normal((6, 8))
    y = r.astype(np.complex64)
    assert judge.local(y, r, y).score <= 1
    assert judge.local(y.conj(), r, y).score > 1


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 17, 64]), st.sampled_from([2, 7, 33]))
def test_scaling_everything_by_two_changes_no_score(seed, rows, columns):
    rng = np.random.default_rng(seed)
    r = rng.standard_normal((rows, columns))
    w = r.astype(np.float32)
    y = (r * (1 + 3e-7 * rng.standard_normal(r.shape))).astype(np.float32)
    a, b = judge.local(y, r, w), judge.local(2 * y, 2 * r, 2 * w)
    assert a.rho == pytest.approx(b.rho, rel=1e-9)
    assert a.z == pytest.approx(b.z, rel=1e-9)


def test_an_element_is_measured_by_what_rounds_beside_it():
    """One head of sixteen reads few tokens and rounds 40 times as much as the others do."""
    r = RNG.standard_normal((60, 16 * 64))
    size = np.full(r.shape, 2.0**-24)
    size[7, 128:192] *= 40

    def drawn():
        return (r + size * RNG.standard_normal(r.shape)).astype(np.float32)

    y = drawn()
    assert judge.whole(y, r, [drawn() for _ in range(4)]).z < 7
    y[7, 150] = r[7, 150] + 40 * 40 * 2.0**-24
    assert judge.whole(y, r, [drawn() for _ in range(4)]).z > 24
    y = drawn()
    y[7, 200] = r[7, 200] + 800 * 2.0**-24  # in a quiet head of that row
    assert judge.whole(y, r, [drawn() for _ in range(4)]).z > 24


def test_one_element_is_measured_again_where_one_draw_said_too_little():
    """The rounding of the first row is large, and came out small in one repetition by chance."""
    rng = np.random.default_rng(5)
    r = rng.standard_normal((256, 64))
    noise = [rng.standard_normal((256, 64)) * 1e-7 for _ in range(5)]
    for other in noise[1:]:
        other[0] *= 8
    w, *copies, y = ((r + n).astype(np.float32) for n in noise)
    once = judge.local(y, r, w)
    many = judge.steadier(once, y, r, [w, *copies], 1)
    assert once.parts()["z"] > 1
    assert many.parts()["z"] <= 1
    assert (many.rho, many.structure, many.score) == (
        once.rho,
        once.structure,
        max(many.parts().values()),
    )
    # a sum of many terms, in order, may be as many times as far off
    sums = judge.steadier(once, y, r, [w, *copies], 400)
    assert sums.z == pytest.approx(min(once.z, many.z / (2 * 0.3 * 400**0.5)))
    wrong = (r * 1.01).astype(np.float32)
    assert judge.steadier(judge.local(wrong, r, w), wrong, r, [w, *copies], 1) == judge.local(
        wrong, r, w
    )
