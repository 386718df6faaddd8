"""Size of the error: absolute, and relative to the size of the whole reference."""

from __future__ import annotations

import numpy as np

from whence.metrics.accumulators import Accumulators, Floats
from whence.metrics.metric import Metric, over, ratio


def _rel_l2(a: Accumulators) -> Floats:
    return np.where(
        a["pairs"] == 0, np.nan, np.sqrt(ratio(a["dd"], a["rr"])) * (a["rr_scale"] / a["dd_scale"])
    )


ORDER = 20
OVER_FINITE_PAIRS = True
METRICS = (
    Metric(
        "rel_l2",
        "core",
        "sqrt(sum (t - r)^2 / sum r^2); 0 when both are zero, inf when only the reference is",
        "Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sec. 1.2",
        _rel_l2,
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
)
