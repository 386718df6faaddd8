"""Quantised weights found among a target's parameters, and checked against the reference's; every
scheme made here by hand.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whence.judge import quantised_weights, stored_codes
from whence.judge.policy import Scheme

ROWS, COLUMNS = 24, 64


def made(bits, per, *, symmetric=True, top=None, seed=0, group=16):
    """(weight, codes, scale, zero point) in float64, by hand; codes in the weight's shape."""
    w = (
        np.random.default_rng(seed)
        .standard_normal((ROWS, COLUMNS))
        .astype(np.float32)
        .astype(np.float64)
    )
    view = w.reshape(ROWS, -1, group) if per == "group" else w
    axes = {"tensor": (0, 1), "channel": (1,), "group": (2,)}[per]
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if symmetric:
        scale = np.abs(view).max(axes, keepdims=True) / (top or high)
        zero = np.zeros_like(scale)
    else:
        scale = (
            np.maximum(view.max(axes, keepdims=True), 0)
            - np.minimum(view.min(axes, keepdims=True), 0)
        ) / (high - low)
        zero = np.rint(low - np.minimum(view.min(axes, keepdims=True), 0) / scale)
    scale = scale.astype(np.float32).astype(np.float64)
    codes = np.clip(np.rint(view / scale) + zero, low, high)
    return w.astype(np.float32), codes.reshape(w.shape), scale, zero


def held(codes, scale, zero, *, name="param.weight"):
    out = {
        f"{name}.qdata": codes.astype(np.int8),
        f"{name}.scale": np.squeeze(scale, -1).astype(np.float32)
        if scale.ndim > 2
        else scale.astype(np.float32),
    }
    if zero.any():
        out[f"{name}.zero_point"] = (
            np.squeeze(zero, -1).astype(np.int8) if zero.ndim > 2 else zero.astype(np.int8)
        )
    return out


@settings(max_examples=150)
@given(
    st.integers(2, 8),
    st.sampled_from(["tensor", "channel", "group"]),
    st.booleans(),
    st.integers(0, 1000),
    st.booleans(),
)
def test_a_right_one_is_found_and_silent(bits, per, symmetric, seed, full):
    w, codes, scale, zero = made(
        bits,
        per,
        symmetric=symmetric,
        seed=seed,
        top=2 ** (bits - 1) - 0.5 if full and symmetric else None,
    )
    found = stored_codes.stored(w, held(codes, scale, zero), "param.weight")
    if found is None:  # two bits of a rough grid may lie too far from the weight to be recognised
        assert bits == 2
        return
    group = 16 if per == "group" else 0
    assert (found.scheme.per, found.scheme.group) == (per, group)
    by_hand = (codes.reshape(ROWS, -1, 16) if per == "group" else codes) - zero
    np.testing.assert_allclose(found.dequantised(), (by_hand * scale).reshape(w.shape), rtol=1e-6)
    declared = Scheme(bits, per, 0, group, symmetric or not zero.any())
    assert quantised_weights.check(w, found, declared=declared).sentence == ""
    assert quantised_weights.check(w, found).sentence == ""


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per", ["tensor", "channel", "group"])
@pytest.mark.parametrize("factor", [1.02, 0.98])
@pytest.mark.parametrize("declared", [True, False])
def test_a_scale_two_percent_off(bits, per, factor, declared):
    w, codes, scale, zero = made(bits, per)
    found = stored_codes.stored(w, held(codes, scale * factor, zero), "param.weight")
    scheme = Scheme(bits, per, 0, 16 if per == "group" else 0) if declared else None
    checked = quantised_weights.check(w, found, declared=scheme)
    assert checked.sentence == f"scale x{factor:g} in the whole tensor"
    assert checked.numbers["scale"] == pytest.approx(factor, rel=2e-3)


@pytest.mark.parametrize(
    ("bits", "per", "at", "where"),
    [
        (8, "channel", (7,), "row 7"),
        (4, "group", (7, 2), "row 7, group 2"),
        (4, "channel", (7,), "row 7"),
    ],
)
def test_one_scale_two_percent_off(bits, per, at, where):
    w, codes, scale, zero = made(bits, per)
    scale = scale.copy()
    scale[at] *= 1.02
    checked = quantised_weights.check(
        w, stored_codes.stored(w, held(codes, scale, zero), "param.weight")
    )
    assert checked.sentence == f"scale x1.02 in {where}"


@pytest.mark.parametrize(
    ("per", "axis", "by", "words"),
    [
        ("channel", 0, 1, "+1 channel"),
        ("channel", 0, -2, "-2 channels"),
        ("group", 1, 1, "+1 group"),
    ],
)
@pytest.mark.parametrize("declared", [True, False])
def test_shifted_scales(per, axis, by, words, declared):
    w, codes, scale, zero = made(8, per)
    checked = quantised_weights.check(
        w,
        stored_codes.stored(w, held(codes, np.roll(scale, by, axis), zero), "param.weight"),
        declared=Scheme(8, per, 0, 16 if per == "group" else 0) if declared else None,
    )
    assert checked.sentence.startswith(f"scales shifted by {words}")
    assert checked.numbers["shift"] == by


def test_a_zero_point():
    w, codes, scale, zero = made(8, "channel", symmetric=False)
    zero = zero.copy()
    zero[5] += 1
    checked = quantised_weights.check(
        w, stored_codes.stored(w, held(codes, scale, zero), "param.weight")
    )
    assert checked.sentence == "zero point off by +1 in row 5"


def test_codes_that_are_not_the_nearest():
    w, codes, scale, zero = made(4, "channel")
    rng = np.random.default_rng(1)
    moved = np.clip(codes + (rng.random(codes.shape) < 0.2), -8, 7)
    found = stored_codes.stored(w, held(moved, scale, zero), "param.weight")
    assert (
        "codes are not the reference's weight"
        in quantised_weights.check(w, found, declared=Scheme(4, "channel")).sentence
    )
    for scheme in (Scheme(4, "channel", rounding="free"), None):
        checked = quantised_weights.check(w, found, declared=scheme)
        assert (checked.sentence, checked.free) == ("", True)
    assert quantised_weights.looks_like(found, checked).rounding == "free"


def test_a_single_code_that_is_not_the_nearest_is_no_optimisation():
    w, codes, scale, zero = made(4, "channel")
    row, column = np.argwhere(np.abs(codes) < 6)[0]
    codes[row, column] += 1
    checked = quantised_weights.check(
        w, stored_codes.stored(w, held(codes, scale, zero), "param.weight")
    )
    assert "codes are not the reference's weight" in checked.sentence
    assert not checked.free


def test_one_group_a_row_is_a_row():
    w, codes, scale, zero = made(8, "channel")
    found = stored_codes.stored(w, held(codes, scale, zero), "param.weight")
    whole = quantised_weights.check(w, found, declared=Scheme(8, "group", 0, COLUMNS))
    assert whole.sentence == ""
    half = quantised_weights.check(w, found, declared=Scheme(8, "group", 0, COLUMNS // 2))
    assert half.sentence.startswith("has scales per channel")
    tensor = quantised_weights.check(w, found, declared=Scheme(8, "tensor"))
    assert tensor.sentence.startswith("has scales per channel")


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("signed", [True, False])
def test_the_ends_are_those_of_integers_of_so_many_bits(bits, signed):
    least = -(2 ** (bits - 1)) if signed else 0
    numbers = range(least, least + 2**bits)
    codes = np.array([-1.0 if signed else 0.0, 1.0])
    stored = stored_codes.Stored(
        (2,), codes, np.ones(1), np.zeros(1), Scheme(bits, "tensor"), 2.0**-24
    )
    assert stored.ends == (numbers[0], numbers[-1])
    if bits == 8:
        kind = np.iinfo(np.int8 if signed else np.uint8)
        assert stored.ends == (kind.min, kind.max)


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_grid_with_a_zero_point_of_its_own_needs_the_bits_of_its_levels(bits):
    """Multiples from 0 up, as a grid around another zero point has them."""
    multiples = np.stack([np.arange(2.0**bits), np.arange(2.0**bits) + 3])
    assert stored_codes._levels(multiples) == (bits, False)
    assert stored_codes._levels(multiples[:1] - 2 ** (bits - 1)) == (bits, True)
    one_more = np.arange(2.0**bits + 1) + 3
    assert stored_codes._levels(one_more[None]) == (bits + 1, False)


@pytest.mark.parametrize("order", ["halves", "neighbours", "swapped"])
@pytest.mark.parametrize("unsigned", [True, False])
def test_two_codes_in_a_byte(order, unsigned):
    w, codes, scale, zero = made(4, "channel", symmetric=not unsigned)
    if unsigned:
        codes, zero = codes + 8, zero + 8
    raw = codes.astype(np.int64) & 15
    a, b = (
        (raw[: ROWS // 2], raw[ROWS // 2 :]) if order == "halves" else (raw[:, ::2], raw[:, 1::2])
    )
    packed = (a | (b << 4) if order != "swapped" else b | (a << 4)).astype(np.uint8)
    params = {"param.weight.data": packed, "param.weight.scale": scale.astype(np.float32)}
    if unsigned:
        params["param.weight.shift"] = zero.astype(np.float32)
    found = stored_codes.stored(w, params, "param.weight")
    np.testing.assert_allclose(found.dequantised(), (codes - zero) * scale, rtol=1e-6)
    assert quantised_weights.check(w, found).sentence == ""


def test_eight_bit_floats():
    w = made(8, "channel")[0]
    scale = (np.abs(w).max(1, keepdims=True) / 448).astype(np.float32)
    params = {
        "param.weight.qdata": (w / scale).astype(ml_dtypes.float8_e4m3fn),
        "param.weight.scale": scale,
    }
    found = stored_codes.stored(w, params, "param.weight")
    assert str(found.scheme) == "float8 e4m3 per channel"
    assert quantised_weights.check(w, found).sentence == ""
    params["param.weight.scale"] = scale * np.float32(1.02)
    assert (
        quantised_weights.check(w, stored_codes.stored(w, params, "param.weight")).sentence
        == "scale x1.02 in the whole tensor"
    )


def test_what_is_not_quantised_is_not_found():
    w = made(8, "channel")[0]
    assert (
        stored_codes.stored(w, {"param.weight": w, "param.bias": w[:, 0]}, "param.weight") is None
    )
    assert (
        stored_codes.stored(
            w,
            {"param.ids": np.ones(w.shape, np.int8), "param.scale": np.ones(1, np.float32)},
            "param.weight",
        )
        is None
    )
    assert stored_codes.on_a_grid(w) is None
    assert stored_codes.on_a_grid(w.astype(ml_dtypes.bfloat16)) is None
    assert stored_codes.on_a_grid(np.zeros_like(w)) is None


@pytest.mark.parametrize(
    ("bits", "per"), [(8, "channel"), (4, "channel"), (8, "tensor"), (4, "group"), (3, "group")]
)
def test_a_grid_is_read_off_the_values(bits, per):
    w, codes, scale, _ = made(bits, per)
    values = (
        (codes.reshape(*scale.shape[:-1], -1) * scale if per != "tensor" else codes * scale)
        .reshape(w.shape)
        .astype(np.float32)
    )
    found = stored_codes.on_a_grid(values)
    assert (found.scheme.bits, found.scheme.per, found.scheme.group) == (
        bits,
        per,
        16 if per == "group" else 0,
    )
    np.testing.assert_allclose(found.dequantised(), values, rtol=1e-5, atol=1e-6)
    assert quantised_weights.check(w, found).sentence == ""
    off = stored_codes.on_a_grid(values * np.float32(1.02))
    assert quantised_weights.check(w, off).sentence == "scale x1.02 in the whole tensor"
