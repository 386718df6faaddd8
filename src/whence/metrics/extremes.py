"""The worst row and the worst channel, so that one giant activation cannot hide an error elsewhere.

A row is a vector along the last axis (a token), a channel an index on the last axis (a feature). Of
equally bad ones the first is named.
"""

from __future__ import annotations

import numpy as np

from whence.metrics.accumulators import Accumulators, Floats
from whence.metrics.metric import Metric

MAX_CHANNELS = 1 << 20
"""A longer last axis is not measured by row and channel: the sums would no longer fit in the
cache.
"""

_NONE = "needs two axes or more, and a last one of at most 1048576"


def _metric(name: str, definition: str, column: str, finish: np.ufunc) -> Metric:
    def formula(a: Accumulators) -> Floats:
        # the pass leaves -1 when there was no difference at all
        is_measured = (a.channels > 0) & (a["pairs"] > 0)
        return np.where(is_measured, finish(np.maximum(a[column], 0.0)), np.nan)

    return Metric(name, "full", definition, "rel_l2 of each", formula, _NONE)


ORDER = 80
METRICS = tuple(
    metric
    for part, place in (
        ("row", "flat index over all axes but the last"),
        ("channel", "index on the last axis"),
    )
    for metric in (
        _metric(f"worst_{part}_rel_l2", f"largest rel_l2 of a {part}", f"{part}_worst", np.sqrt),
        _metric(f"worst_{part}", f"that {part}, as {place}", f"{part}_index", np.positive),
    )
)
