"""Distance in units in the last place: the number of steps between neighbouring numbers of the
dtype from one value to the other. 0 and -0 are the same number.
"""

from __future__ import annotations

import numpy as np

from whence.metrics.accumulators import Accumulators, Floats
from whence.metrics.metric import Metric, over

_NONE = "needs one floating-point dtype on both sides"
_SOURCE = (
    "Bruce Dawson, Comparing Floating Point Numbers (2012): difference of the ordered bit patterns"
)


def _largest(a: Accumulators) -> Floats:
    return np.where(a.ulp & (a["pairs"] > 0), a["ulp_max"], np.nan)


def _mean(a: Accumulators) -> Floats:
    return np.where(a.ulp, over(a["ulp_sum"], a["pairs"]), np.nan)


ORDER = 70
METRICS = (
    Metric(
        "ulp_max",
        "full",
        "largest distance of r and t in units in the last place",
        _SOURCE,
        _largest,
        _NONE,
    ),
    Metric(
        "ulp_mean",
        "full",
        "mean distance of r and t in units in the last place",
        _SOURCE,
        _mean,
        _NONE,
    ),
)
