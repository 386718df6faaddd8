"""All metrics in the order of their columns: definition, source, formula, why one may be missing.

A row is a vector along the last axis (a token), a channel an index on the last axis (a feature); of
equally bad ones the first is named. Distances in units in the last place are steps between
neighbouring numbers of the dtype; 0 and -0 are the same number.
"""

from __future__ import annotations

from operator import itemgetter

import numpy as np

from whence.metrics.accumulators import Accumulators, Floats
from whence.metrics.metric import Metric, over, ratio

MAX_CHANNELS = 1 << 20
"""A longer last axis is not measured by row and channel: the sums would no longer fit in the
cache.
"""

_ZERO = "the reference is zero wherever both sides are finite"
_NOT_FINITE = "no element of this side is finite"
_NOT_ONE_FLOAT = "needs one floating-point dtype on both sides"
_NO_ROWS = "needs two axes or more, and a last one of at most 1048576"
_ULP_SOURCE = (
    "Bruce Dawson, Comparing Floating Point Numbers (2012): difference of the ordered bit patterns"
)


def _equal(a: Accumulators) -> Floats:
    return a["pairs"] - a["values_differ"] + a["inf_match"]


def _extreme(column: str) -> Metric:
    side, name = {"r": "reference", "t": "target"}[column[0]], column[2:]

    def formula(a: Accumulators) -> Floats:
        return np.where(a[column[0] + "_finite"] == 0, np.nan, a[column])

    return Metric(
        f"{side}_{name}", "core", f"{name} of the {side}", "order statistic", formula, _NOT_FINITE
    )


def _side(letter: str, side: str) -> tuple[Metric, ...]:
    def mean(a: Accumulators) -> Floats:
        return over(a[letter + "_sum"], a[letter + "_finite"]) / a[letter + "_scale"]

    def std(a: Accumulators) -> Floats:
        return np.sqrt(over(a[letter + "_m2"], a[letter + "_finite"])) / a[letter + "_scale"]

    def norm(a: Accumulators) -> Floats:
        return np.where(
            a[letter + "_finite"] == 0, np.nan, np.sqrt(a[letter + "_sq"]) / a[letter + "_scale"]
        )

    def saturated(a: Accumulators) -> Floats:
        top = a.r_top if letter == "r" else a.t_top
        size = np.maximum(np.abs(a[letter + "_min"]), np.abs(a[letter + "_max"]))
        return ((size >= top) & (a[letter + "_finite"] > 0)).astype(np.float64)

    def column(name: str) -> Metric:
        figure = {"nan": "NaN", "inf": "infinite elements"}[name]
        return Metric(
            f"{side}_{name}",
            "core",
            f"{figure} in the {side}",
            "count",
            itemgetter(f"{letter}_{name}"),
        )

    return (
        _extreme(letter + "_min"),
        _extreme(letter + "_max"),
        Metric(f"{side}_mean", "core", f"mean of the {side}", "arithmetic mean", mean, _NOT_FINITE),
        Metric(
            f"{side}_std",
            "core",
            f"population standard deviation of the {side} (ddof 0)",
            "Chan, Golub, LeVeque 1979, block by block; safe when the mean is much larger",
            std,
            _NOT_FINITE,
        ),
        Metric(
            f"{side}_norm", "core", f"2-norm of the {side}", "Euclidean norm", norm, _NOT_FINITE
        ),
        column("nan"),
        column("inf"),
        Metric(
            f"{side}_saturated",
            "core",
            f"1 if the {side} reaches the largest finite number of its floating-point dtype "
            "(65504 in float16), a sign of overflow, else 0",
            "comparison with the dtype's range",
            saturated,
        ),
    )


def _worst(name: str, definition: str, column: str, finish: np.ufunc) -> Metric:
    def formula(a: Accumulators) -> Floats:
        # the pass leaves -1 when there was no difference at all
        is_measured = (a.channels > 0) & (a["pairs"] > 0)
        return np.where(is_measured, finish(np.maximum(a[column], 0.0)), np.nan)

    return Metric(name, "full", definition, "rel_l2 of each", formula, _NO_ROWS)


_AGREEMENT = (
    Metric(
        "compared",
        "core",
        "places where both sides are finite; the error figures are taken over these",
        "count",
        itemgetter("pairs"),
    ),
    Metric(
        "values_equal",
        "core",
        "1 if every element has the same value on both sides whatever the dtypes (0 equals -0, "
        "NaN equals NaN), else 0",
        "exact comparison",
        lambda a: np.where(_equal(a) + a["nan_both"] == a["n"], 1.0, 0.0),
    ),
    Metric(
        "equal_count",
        "core",
        "elements with the same value on both sides, equal infinities included, NaN not",
        "count",
        _equal,
    ),
    Metric(
        "close_share",
        "core",
        "share of elements with |t - r| <= atol + rtol |r|; equal infinities are close, places "
        "with NaN on both sides are left out",
        "numpy.isclose with the reference as second argument",
        lambda a: over(a["close"] + a["inf_match"], a["n"] - a["nan_both"]),
        "every element is NaN on both sides",
    ),
    Metric(
        "nan_mismatch",
        "core",
        "places where exactly one side is NaN",
        "count",
        itemgetter("nan_mismatch"),
    ),
    Metric(
        "inf_mismatch",
        "core",
        "places without NaN where one side is Inf and the other is not the same Inf",
        "count",
        itemgetter("inf_mismatch"),
    ),
    Metric(
        "nan_matched", "core", "places where both sides are NaN", "count", itemgetter("nan_both")
    ),
    Metric(
        "inf_matched",
        "core",
        "places where both sides are the same Inf",
        "count",
        itemgetter("inf_match"),
    ),
    Metric(
        "sign_mismatch",
        "core",
        "places where both sides are non-zero and of opposite sign",
        "count",
        lambda a: np.where(a.signed, a["sign"], np.nan),
        "complex numbers have no sign",
    ),
)
_DISTANCES = (
    Metric(
        "rel_l2",
        "core",
        "sqrt(sum (t - r)^2 / sum r^2); 0 when both are zero, inf when only the reference is",
        "Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sec. 1.2",
        lambda a: np.where(
            a["pairs"] == 0,
            np.nan,
            np.sqrt(ratio(a["dd"], a["rr"])) * (a["rr_scale"] / a["dd_scale"]),
        ),
    ),
    Metric(
        "rmse",
        "core",
        "sqrt(mean (t - r)^2)",
        "root mean square error",
        lambda a: np.sqrt(over(a["dd"], a["pairs"])) / a["dd_scale"],
    ),
    Metric(
        "max_abs_err",
        "core",
        "max |t - r|; where it is stands in max_abs_index, the first place if there are several",
        "maximum norm",
        lambda a: np.where(a["pairs"] == 0, np.nan, a["ad_max"]),
    ),
    Metric(
        "mean_abs_err",
        "core",
        "mean |t - r|",
        "mean absolute error",
        lambda a: over(a["ad_sum"], a["pairs"]) / a["dd_scale"],
    ),
    Metric(
        "mean_err",
        "core",
        "mean (t - r), signed: a shift in one direction",
        "bias",
        lambda a: over(a["d_sum"], a["pairs"]) / a["dd_scale"],
        "a complex error has no sign",
    ),
    Metric(
        "cosine_similarity",
        "core",
        "sum r t / (|r| |t|) with 2-norms, for complex the real part of sum conj(r) t; blind to "
        "scale",
        "cosine of the angle between both as vectors",
        lambda a: np.clip(over(a["rt"], np.sqrt(a["rr"]) * np.sqrt(a["tt"])), -1.0, 1.0),
        "one side is all zero and has no direction",
    ),
    Metric(
        "scale_estimate",
        "core",
        "sum r t / sum r^2: the factor that brings the reference closest to the target; 1 "
        "without scale error",
        "least squares through the origin",
        lambda a: over(a["rt"], a["rr"]) * (a["rr_scale"] / a["tt_scale"]),
        "the reference is all zero",
    ),
)
_RELATIVE = (
    Metric(
        "max_rel_err",
        "full",
        "max |t - r| / |r| over elements with r not 0",
        "Higham 2002, sec. 1.2, componentwise",
        lambda a: np.where(a["pairs"] - a["rel_skipped"] == 0, np.nan, a["rel_max"]),
        _ZERO,
    ),
    Metric(
        "mean_rel_err",
        "full",
        "mean |t - r| / |r| over elements with r not 0",
        "Higham 2002, sec. 1.2, componentwise",
        lambda a: over(a["rel_sum"], a["pairs"] - a["rel_skipped"]),
        _ZERO,
    ),
    Metric(
        "rel_err_skipped",
        "full",
        "elements left out of both because r is exactly 0",
        "count",
        itemgetter("rel_skipped"),
    ),
)
_DECADES = tuple(
    Metric(
        f"abs_err_over_1e-{k + 1}",
        "full",
        f"elements with |t - r| > 1e-{k + 1}",
        "count",
        itemgetter(f"over_{k}"),
    )
    for k in range(8)
)
_ULPS = (
    Metric(
        "ulp_max",
        "full",
        "largest distance of r and t in units in the last place",
        _ULP_SOURCE,
        lambda a: np.where(a.ulp & (a["pairs"] > 0), a["ulp_max"], np.nan),
        _NOT_ONE_FLOAT,
    ),
    Metric(
        "ulp_mean",
        "full",
        "mean distance of r and t in units in the last place",
        _ULP_SOURCE,
        lambda a: np.where(a.ulp, over(a["ulp_sum"], a["pairs"]), np.nan),
        _NOT_ONE_FLOAT,
    ),
)
_WORST = tuple(
    metric
    for part, place in (
        ("row", "flat index over all axes but the last"),
        ("channel", "index on the last axis"),
    )
    for metric in (
        _worst(f"worst_{part}_rel_l2", f"largest rel_l2 of a {part}", f"{part}_worst", np.sqrt),
        _worst(f"worst_{part}", f"that {part}, as {place}", f"{part}_index", np.positive),
    )
)

_PERMUTED = Metric(
    "permuted",
    "full",
    "1 if the elements differ but are the same ones in another order, else 0",
    "equal sums of 64-bit mixes (splitmix64) of the elements",
    lambda a: a.permuted,
)
METRICS: tuple[Metric, ...] = (
    *_AGREEMENT,
    *_DISTANCES,
    *_side("r", "reference"),
    *_side("t", "target"),
    *_RELATIVE,
    *_DECADES,
    *_ULPS,
    *_WORST,
    _PERMUTED,
)
OVER_FINITE_PAIRS = frozenset(metric.name for metric in (*_DISTANCES, *_RELATIVE))
"""Metrics taken over elements that are finite on both sides, and missing where there are none."""
