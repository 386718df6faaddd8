"""Range use against an oracle: rounding every element by torch, and looking at what is left."""

import ml_dtypes
import numpy as np
import pytest

from whence.metrics.range_use import FloatFormat, extent, fits

torch = pytest.importorskip("torch")

FORMATS = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def values():
    draw = np.random.default_rng(0)
    spread = (draw.standard_normal(200_000) * 2.0 ** draw.integers(-150, 124, 200_000)).astype("f4")
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan]
    for name in FORMATS:
        info = ml_dtypes.finfo(getattr(ml_dtypes, name, np.float16))
        for limit in (info.max, info.smallest_normal, info.smallest_subnormal):
            middle = float(limit) * np.array([0.5, 1, 1.5, 31 / 32, 1025 / 1024, 29 / 28])
            middle = middle[middle < 3.4e38].astype(np.float32)
            edges += [*middle, *np.nextafter(middle, np.float32(1)), *np.nextafter(middle, 0)]
    edges += [65520.0, 65519.996, 61440.0, 61439.996, 464.0, 464.00003]
    return np.concatenate([spread, np.float32(edges)])


def rounded_to(name, magnitudes):
    """By torch; by ml_dtypes where torch clamps what is too large."""
    if name == "float8_e4m3fn":
        narrow = magnitudes.float().numpy().astype(ml_dtypes.float8_e4m3fn)
        return torch.from_numpy(narrow.astype(np.float64))
    return magnitudes.float().to(getattr(torch, name)).double()


@pytest.mark.torch
@pytest.mark.parametrize("name", FORMATS)
def test_counts_are_those_of_rounding_every_element(name):
    tensor = torch.from_numpy(values())
    finite = tensor[torch.isfinite(tensor)].double().abs()
    rounded = rounded_to(name, finite)
    normal = torch.finfo(getattr(torch, name)).smallest_normal
    (counts,) = fits(values(), [FloatFormat(name)], extent(values()))
    assert counts.overflow == int((~torch.isfinite(rounded)).sum())
    assert counts.zero == int(((rounded == 0) & (finite > 0)).sum())
    assert counts.subnormal == int(((rounded > 0) & (rounded < normal)).sum())
    assert counts.zero and counts.subnormal
    assert counts.overflow or name == "bfloat16"
    form = FloatFormat(name)
    assert form.overflows(float(finite.max())) == bool(counts.overflow)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_scaled_format_holds_the_largest_element_and_loses_the_small_ones(name):
    info = ml_dtypes.finfo(getattr(ml_dtypes, name))
    small = float(info.smallest_subnormal) / float(info.max)
    array = np.array([3e9, 3e9 * small, 3e9 * small / 4, 0], np.float64)
    (counts,) = fits(array, [FloatFormat(name, is_scaled=True)], extent(array))
    assert tuple(getattr(counts, field) for field in ("overflow", "zero", "subnormal")) == (0, 1, 1)
    assert not FloatFormat(name, is_scaled=True).overflows(1e30)


def test_the_extent_of_a_tensor_that_saturates():
    array = np.array([[448, -448, 0, 2.0], [1, 0.5, 0, 448]]).astype(ml_dtypes.float8_e4m3fn)
    whole = extent(array)
    assert (whole.largest, whole.smallest, whole.zeros) == (448, 0.5, 2)
    assert (whole.saturated, whole.infinite) == (3, 0)


def test_the_extent_of_what_has_no_finite_element():
    whole = extent(np.array([np.inf, np.nan, -np.inf], np.float32))
    assert (whole.largest, whole.smallest, whole.zeros) == (0, 0, 0)
    assert whole.infinite == 2
    assert fits(np.float32([np.inf]), [FloatFormat("float16")], whole)[0].overflow == 0


def test_tensors_without_elements_count_nothing():
    empty = np.zeros((0, 3), np.float32)
    (counts,) = fits(empty, [FloatFormat("float8_e4m3fn", is_scaled=True)], extent(empty))
    assert (counts.overflow, counts.zero, counts.subnormal) == (0, 0, 0)
