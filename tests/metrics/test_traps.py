"""Inputs on which other tools answer wrongly: each must come out right, in both passes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from whence.metrics import measure, measure_many


@pytest.fixture(params=[False, True], ids=["numpy", "kernels"])
def one(request):
    return lambda r, t, **options: measure(
        np.asarray(r), np.asarray(t), kernels=request.param, **options
    )


def test_reference_all_zero_and_target_all_one(one):
    values = one(np.zeros(8, np.float32), np.ones(8, np.float32)).values
    assert (
        values["max_abs_err"] == 1.0
        and values["rel_l2"] == math.inf
        and values["close_share"] == 0.0
    )
    assert (
        values["cosine_similarity"] is None
        and values["max_rel_err"] is None
        and values["rel_err_skipped"] == 8
    )


def test_tiny_values_with_the_wrong_sign(one):
    r = np.full(10, 1e-8, np.float32)
    t = r * np.array([1, -1] * 5, np.float32)
    values = one(r, t).values
    assert (
        values["sign_mismatch"] == 5
        and values["rel_l2"] == pytest.approx(math.sqrt(2))
        and values["max_rel_err"] == pytest.approx(2)
    )


def test_bool_that_differs(one):
    values = one([True, False], [True, True]).values
    assert (
        values["equal_count"] == 1
        and values["max_abs_err"] == 1.0
        and values["values_equal"] == 0.0
    )


def test_equal_infinities_are_equal(one):
    r = np.array([1, -np.inf, np.inf, 2], np.float32)
    values = one(r, np.array([1, -np.inf, np.inf, 2.5], np.float32)).values
    assert (
        values["inf_matched"] == 2
        and values["inf_mismatch"] == 0
        and values["max_abs_err"] == 0.5
        and values["close_share"] == 0.75
    )
    assert one(r, r.copy()).identical and one(r, r.copy()).values["close_share"] == 1.0
    other = one(r, np.array([1, np.inf, 3, 2], np.float32))
    assert other.values["inf_mismatch"] == 2 and other.values["max_abs_err"] == 0.0
    assert other.values["first_nonfinite_mismatch"] == 1 and other.max_abs_index == (1,)


def test_nan_on_both_sides_has_its_own_column(one):
    r = np.array([np.nan, np.nan, 1, 2], np.float32)
    t = np.array([np.nan, 0, np.nan, 2], np.float32)
    values = one(r, t).values
    assert (values["nan_matched"], values["nan_mismatch"], values["compared"]) == (1, 2, 1)
    assert values["close_share"] == pytest.approx(1 / 3) and values["values_equal"] == 0.0


def test_shapes_that_differ(one):
    measured = one(np.zeros((2, 3)), np.zeros((3, 2)))
    assert (measured.tier, measured.identical, measured.why) == (
        "none",
        False,
        "shape (2,3) against (3,2)",
    )


def test_integers_beyond_float(one):
    assert one(np.array([2**24]), np.array([2**24 + 1])).values["max_abs_err"] == 1.0
    values = one(np.array([2**62, -(2**63)]), np.array([2**62 + 1, 2**63 - 1])).values
    assert values["equal_count"] == 0 and values["max_abs_err"] == 2.0**64
    assert one(np.array([2**64 - 1], np.uint64), np.array([-1])).values["max_abs_err"] == 2.0**64
    assert one(np.array([2**53 + 1]), np.array([2.0**53])).values["max_abs_err"] == 1.0
    assert one(np.array([2.0**53]), np.array([2**53 + 1], np.uint64)).values["equal_count"] == 0
    assert one(np.array([7], np.uint64), np.array([7.0])).values["values_equal"] == 1.0


def test_float64_that_overflows_when_squared(one):
    r = np.array([1e300, -2e300, 3e299])
    values = one(r, r * 1.001).values
    assert values["rel_l2"] == pytest.approx(1e-3) and values["cosine_similarity"] == pytest.approx(
        1
    )
    assert values["rmse"] == pytest.approx(1e297 * math.sqrt((1 + 4 + 0.09) / 3)) and values[
        "scale_estimate"
    ] == pytest.approx(1.001)
    tiny = np.array([1e-300, 3e-310])
    assert one(tiny, tiny * 2).values["rel_l2"] == pytest.approx(1)
    assert one(np.array([1.7e308]), np.array([-1.7e308])).values["rel_l2"] == pytest.approx(2)


def test_complex_keeps_its_imaginary_part(one):
    values = one(np.array([1 + 1j]), np.array([1 - 1j])).values
    assert (
        values["max_abs_err"] == 2.0
        and values["cosine_similarity"] == 0.0
        and values["sign_mismatch"] is None
    )
    assert one(np.array([3 + 4j]), np.array([3 + 4j])).values["reference_norm"] == 5.0


def test_empty(one):
    measured = one(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32))
    assert measured.identical and measured.tier == "full"
    assert set(measured.whys.values()) == {"empty"} and set(measured.values.values()) == {None}
    assert not one(np.zeros(0, np.float32), np.zeros(0, np.float64)).identical


def test_scale_error(one):
    r = np.linspace(-1, 2, 100, dtype=np.float32)
    values = one(r, 2 * r).values
    assert (
        values["cosine_similarity"] == pytest.approx(1)
        and values["rel_l2"] == pytest.approx(1)
        and values["scale_estimate"] == pytest.approx(2)
    )


def test_constant_shift(one):
    values = one(np.ones(9, np.float32), np.zeros(9, np.float32)).values
    assert (
        values["rel_l2"] == 1.0 and values["mean_err"] == -1.0 and values["scale_estimate"] == 0.0
    )


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, np.complex128])
def test_transposed_memory_is_said_to_be_a_permutation(one, dtype):
    r = np.random.default_rng(0).permutation(100).reshape(10, 10).astype(dtype)
    measured = one(r, np.ascontiguousarray(r.T))
    assert measured.values["permuted"] == 1.0 and not measured.identical
    changed = np.ascontiguousarray(r.T)
    changed[0, 0] += 1
    assert one(r, changed).values["permuted"] == 0.0
    assert one(r, r.copy()).values["permuted"] == 0.0
    assert one(r, np.ascontiguousarray(r.T).astype(np.complex128)).values["permuted"] == 1.0


def test_float16_that_saturated(one):
    values = one(np.array([7e4, 1], np.float32), np.array([65504, 1], np.float16)).values
    assert values["target_saturated"] == 1.0 and values["reference_saturated"] == 0.0


def test_custom_metric_is_kept(one):
    def broken(r, t):
        raise ValueError("no such thing")

    custom = [
        ("sum_gap", lambda r, t: float(t.sum() - r.sum())),
        ("broken", broken),
        ("nan", lambda r, t: math.nan),
    ]
    measured = one(np.ones(3), np.full(3, 2.0), custom=custom)
    assert measured.values["sum_gap"] == 3.0
    assert (
        measured.whys["broken"] == "raised ValueError: no such thing"
        and measured.values["broken"] is None
    )
    assert measured.whys["nan"] == "returned NaN"


def test_a_giant_activation_does_not_hide_an_error(one):
    rng = np.random.default_rng(1)
    r = rng.standard_normal((6, 5, 4)).astype(np.float32)
    r[0, 0, 3] = 22500
    t = r.copy()
    t[2, 4] *= 2
    values = one(r, t).values
    assert (
        values["rel_l2"] < 1e-3
        and values["worst_row_rel_l2"] == 1.0
        and values["worst_row"] == 2 * 5 + 4
    )
    t = r.copy()
    t[..., 1] *= 3
    values = one(r, t).values
    assert values["worst_channel"] == 1 and values["worst_channel_rel_l2"] == pytest.approx(2)


def test_mean_far_from_zero(one):
    r = 1e9 + np.arange(5000.0)
    values = one(r, r + 1).values
    assert values["reference_std"] == pytest.approx(np.std(np.arange(5000.0)), rel=1e-12)


def test_negative_zero_is_the_same_value_but_not_the_same_bits(one):
    measured = one(np.array([0.0, 1.0], np.float32), np.array([-0.0, 1.0], np.float32))
    assert (
        not measured.identical
        and measured.values["values_equal"] == 1.0
        and measured.values["ulp_max"] == 0.0
    )


def test_ulp_does_not_wrap(one):
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        top = np.array(float(ml_dtypes.finfo(dtype).max)).astype(dtype)
        values = one(
            np.array([top, 1]).astype(dtype), np.array([-top, np.nan]).astype(dtype)
        ).values
        bits = int(np.array([top], dtype).view(f"u{np.dtype(dtype).itemsize}")[0])
        assert values["ulp_max"] == float(2 * bits)


def test_ulp_of_a_block_with_nan(one):
    r = np.ones(100, np.float32)
    t = np.nextafter(r, np.float32(2))
    r[5], t[7] = np.nan, np.inf
    values = one(r, t).values
    assert values["ulp_max"] == 1.0 and values["ulp_mean"] == 1.0 and values["compared"] == 98


def test_zero_error_has_a_bin_of_its_own(one):
    measured = one(np.array([1.0, 0.0, 0.0]), np.array([1.0, 1e-200, 5e-324]))
    assert measured.histogram[:3] == (1, 2, 0)


def test_dtype_without_a_name(one):
    measured = one(np.array(["a"]), np.array(["b"]))
    assert measured.tier == "none" and "no whence name" in measured.why


def test_foreign_byte_order_and_strides(one):
    r = np.arange(12, dtype=">f4").reshape(3, 4)
    assert one(r, np.arange(12, dtype="<f4").reshape(3, 4)).identical
    wide = np.arange(24, dtype=np.float32).reshape(3, 8)
    assert one(wide[:, ::2], np.ascontiguousarray(wide[:, ::2])).identical
    buffer = np.zeros(4 * 9 + 1, np.uint8)
    odd = buffer[1:].view(np.float32)
    odd[:] = 3
    assert one(odd, np.full(9, 3, np.float32)).identical
    assert one(np.float32(3), np.full((), 3, np.float32)).max_abs_index is None
    assert one(np.float32(3), np.full((), 4, np.float32)).max_abs_index == ()


def test_first_of_equal_errors_is_named(one):
    r = np.zeros((3, 5000), np.float32)
    t = r.copy()
    t[0, 4999] = t[1, 17] = t[2, 0] = -0.5
    assert one(r, t).max_abs_index == (0, 4999)


@pytest.mark.parametrize("kernels", [False, True])
def test_tier_same(kernels):
    x = np.arange(5, dtype=np.float32)
    pairs = [
        (x, x.copy()),
        (x, x + 1),
        (x, x.astype(np.float64)),
        (x, x.astype(np.float64) + 1e-9),
        (x[:0], x[:0]),
    ]
    same, other, wide, off, empty = measure_many(pairs, tier="same", kernels=kernels)
    assert (same.tier, same.identical, same.values) == ("same", True, {"values_equal": 1.0})
    assert (other.identical, other.values) == (False, {})
    assert (wide.identical, wide.values) == (False, {"values_equal": 1.0})
    assert off.values == {"values_equal": 0.0}
    assert empty.identical
