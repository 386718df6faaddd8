"""Direction and scale: whether both sides point the same way, and whether one is a multiple of the
other.
"""

from __future__ import annotations

import numpy as np

from whence.metrics.accumulators import Accumulators, Floats
from whence.metrics.metric import Metric, over


def _cosine(a: Accumulators) -> Floats:
    size = np.sqrt(a["rr"]) * np.sqrt(a["tt"])
    return np.clip(over(a["rt"], size), -1.0, 1.0)


ORDER = 30
OVER_FINITE_PAIRS = True
METRICS = (
    Metric(
        "cosine_similarity",
        "core",
        "sum r t / (|r| |t|) with 2-norms, for complex the real part of sum conj(r) t; blind to "
        "scale",
        "cosine of the angle between both as vectors",
        _cosine,
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
