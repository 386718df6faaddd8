"""Statistics of each side alone, over its own finite elements (of |z| for complex)."""

from __future__ import annotations

from operator import itemgetter

import numpy as np

from whence.metrics.accumulators import Accumulators, Floats
from whence.metrics.metric import Metric, over

_NONE = "no element of this side is finite"


def _extreme(column: str) -> Metric:
    side, name = {"r": "reference", "t": "target"}[column[0]], column[2:]

    def formula(a: Accumulators) -> Floats:
        return np.where(a[column[0] + "_finite"] == 0, np.nan, a[column])

    return Metric(
        f"{side}_{name}", "core", f"{name} of the {side}", "order statistic", formula, _NONE
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
        Metric(f"{side}_mean", "core", f"mean of the {side}", "arithmetic mean", mean, _NONE),
        Metric(
            f"{side}_std",
            "core",
            f"population standard deviation of the {side} (ddof 0)",
            "Chan, Golub, LeVeque 1979, block by block; safe when the mean is much larger",
            std,
            _NONE,
        ),
        Metric(f"{side}_norm", "core", f"2-norm of the {side}", "Euclidean norm", norm, _NONE),
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


ORDER = 40
METRICS = (*_side("r", "reference"), *_side("t", "target"))
