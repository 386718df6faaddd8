"""Relative error of each element. Elements whose reference is exactly 0 have none: they are left
out and counted.
"""

from __future__ import annotations

from operator import itemgetter

import numpy as np

from whence.metrics.accumulators import Accumulators, Floats
from whence.metrics.metric import Metric, over

_NONE = "the reference is zero wherever both sides are finite"


def _largest(a: Accumulators) -> Floats:
    return np.where(a["pairs"] - a["rel_skipped"] == 0, np.nan, a["rel_max"])


ORDER = 50
OVER_FINITE_PAIRS = True
METRICS = (
    Metric(
        "max_rel_err",
        "full",
        "max |t - r| / |r| over elements with r not 0",
        "Higham 2002, sec. 1.2, componentwise",
        _largest,
        _NONE,
    ),
    Metric(
        "mean_rel_err",
        "full",
        "mean |t - r| / |r| over elements with r not 0",
        "Higham 2002, sec. 1.2, componentwise",
        lambda a: over(a["rel_sum"], a["pairs"] - a["rel_skipped"]),
        _NONE,
    ),
    Metric(
        "rel_err_skipped",
        "full",
        "elements left out of both because r is exactly 0",
        "count",
        itemgetter("rel_skipped"),
    ),
)
