"""Other tools' formulas: against computations written apart, and in the cases in which they
mislead.
"""

import math

import ml_dtypes
import numpy as np
import pytest

from whence.comparison.views import tool
from whence.report.views import names as views

VIEWS = {name: tool(name).figures for name in views()}

RNG = np.random.default_rng(6)
G = RNG.standard_normal((7, 9)).astype(np.float32)
M = (G * (1 + 1e-3 * RNG.standard_normal(G.shape))).astype(np.float32)


def test_msit_on_ordinary_numbers():
    torch = pytest.importorskip("torch")
    found, why = VIEWS["msit"](G, M)
    g, m = torch.tensor(G).flatten().double(), torch.tensor(M).flatten().double()
    relative = (m / g - 1).abs()
    assert why == ""
    assert found["cosine_similarity"] == round(float(torch.cosine_similarity(g, m, dim=0)), 10)
    assert found["max_relative_error"] == pytest.approx(float(relative.max()), rel=1e-3)
    assert found["mean_relative_error"] == pytest.approx(float(relative.mean()), rel=1e-3)
    assert found["max_absolute_error"] == pytest.approx(float((m - g).abs().max()), rel=1e-5)
    assert found["relative_euclidean_distance"] == pytest.approx(
        float((m - g).norm() / g.norm()), rel=1e-9
    )
    divergence = torch.nn.functional.kl_div(m.log_softmax(0), g.softmax(0), reduction="sum")
    assert found["kl_divergence"] == pytest.approx(float(divergence), rel=1e-6)


@pytest.mark.parametrize(
    ("golden", "mine", "expected"),
    [
        (
            np.zeros(4, np.float32),
            np.ones(4, np.float32),
            {"cosine_similarity": 0.0, "max_absolute_error": 0.0},
        ),
        (
            np.array([True, False]),
            np.array([True, True]),
            {"max_relative_error": 0.0, "relative_euclidean_distance": 1.0},
        ),
        (np.array([2**24 + 1]), np.array([2**24]), {"max_absolute_error": 0.0}),
        (np.array([1 + 1j]), np.array([1 - 1j]), {"max_absolute_error": 0.0}),
        (
            np.ones(5, np.float32),
            2 * np.ones(5, np.float32),
            {"cosine_similarity": 1.0, "kl_divergence": 0.0},
        ),
    ],
)
def test_where_msit_misleads_the_figure_is_still_its_own(golden, mine, expected):
    found, _ = VIEWS["msit"](golden, mine)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("golden", "mine", "why"),
    [
        (np.ones(3), np.ones(4), "data shape doesn't match."),
        (np.array([np.inf]), np.array([np.inf]), "golden_data includes NAN or inf."),
        (np.array([1.0]), np.array([np.nan]), "my_data includes NAN or inf."),
        (np.array([1.0]), np.array([1e300]), "my_data includes NAN or inf."),
        (np.zeros((0, 2)), np.zeros((0, 2)), "empty"),
    ],
)
def test_msit_has_no_figures_and_says_why(golden, mine, why):
    assert VIEWS["msit"](golden, mine) == ({}, why)
    assert VIEWS["aclcmp"](golden, mine) == ({}, why)


def test_msit_compares_numbers_of_elements_only_and_aclcmp_writes_nan():
    assert VIEWS["msit"](np.ones((2, 3)), np.ones((3, 2)))[0]["cosine_similarity"] == 1.0
    assert VIEWS["aclcmp"](np.zeros(3), np.ones(3))[0]["cosine_similarity"] == "NaN"


def test_torch_xray_on_half_precision():
    g, m = G.astype(np.float16), (G * 1.002).astype(np.float16)
    found, _ = VIEWS["torch_xray"](g, m)
    a, b = g.astype(np.float64), m.astype(np.float64)
    assert found["rmse"] == pytest.approx(math.sqrt(((a - b) ** 2).mean()))
    assert found["max_err"] == np.abs(a - b).max()
    assert found["gt_num"] == np.count_nonzero(g != m)
    assert found["is_close"] == pytest.approx(100 * np.isclose(b, a, rtol=1e-3, atol=1e-5).mean())


def test_msprobe_does_not_compare_the_sign_of_infinity_but_its_place():
    assert (
        VIEWS["msprobe"](np.array([np.inf, 1.0]), np.array([-np.inf, 1.0]))[0]["max_abs_err"] == 0.0
    )
    assert "do not match" in VIEWS["msprobe"](np.array([np.inf, 1.0]), np.array([1.0, 1.0]))[1]
    lone, _ = VIEWS["msprobe"](np.zeros(2, np.float32), np.array([0.0, 1.0], np.float32))
    assert lone["cosine"] == "NaN"
    assert lone["max_relative_err"] == pytest.approx(
        (1 + 1.1920929e-7 - 1.1920929e-7) / 1.1920929e-7, rel=1e-6
    )


def test_polygraphy_passes_by_either_tolerance_and_never_what_is_not_finite():
    g = np.array([1e-8, 1.0, 1000.0, 2.0])
    m = np.array([5e-6, 1.0, 1000.005, 2.1])
    found, _ = VIEWS["polygraphy"](g, m)
    assert found["failing"] == 1
    assert found["max_reldiff"] == pytest.approx(abs(5e-6 - 1e-8) / 1e-8)
    assert found["quantile_absdiff"] == np.quantile(np.abs(g - m), 0.99)
    assert VIEWS["polygraphy"](np.array([np.inf]), np.array([np.inf]))[0]["failing"] == 1
    # Written by polygraphy 0.53.6: it takes care of zeros among floating numbers only.
    assert np.isnan(VIEWS["polygraphy"](np.arange(5), np.arange(5))[0]["max_reldiff"])
    assert (
        VIEWS["polygraphy"](np.zeros(4, np.int8), np.ones(4, np.int8))[0]["max_reldiff"] == np.inf
    )
    assert (
        VIEWS["polygraphy"](np.zeros(4, np.float32), np.zeros(4, np.float32))[0]["max_reldiff"] == 0
    )


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "dtype",
    [
        np.float64,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        np.int64,
        np.uint8,
        bool,
        np.complex64,
    ],
)
def test_every_dtype_has_figures_or_a_reason(view, dtype):
    a = (9 + RNG.standard_normal((3, 4))).astype(
        dtype
    )  # without zeros, over which Polygraphy has NaN
    found, why = VIEWS[view](a, a.copy())
    assert found or why
    assert all(not isinstance(v, float) or math.isfinite(v) for v in found.values())
