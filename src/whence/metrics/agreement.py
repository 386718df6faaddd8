"""How many elements agree: exactly, within a tolerance, in sign, and in being non-finite."""

from __future__ import annotations

from operator import itemgetter

import numpy as np

from whence.metrics.accumulators import Accumulators, Floats
from whence.metrics.metric import Metric, over


def _equal(a: Accumulators) -> Floats:
    return a["pairs"] - a["values_differ"] + a["inf_match"]


def _all_equal(a: Accumulators) -> Floats:
    return np.where(_equal(a) + a["nan_both"] == a["n"], 1.0, 0.0)


def _close(a: Accumulators) -> Floats:
    return over(a["close"] + a["inf_match"], a["n"] - a["nan_both"])


ORDER = 10
METRICS = (
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
        _all_equal,
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
        _close,
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
