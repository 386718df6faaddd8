"""The worst row and the worst channel, so that one giant activation cannot hide an error in all the
others.

A row is a vector of the last axis (a token), a channel a place in it (a feature). Of equal ones the
first is named.
"""

from __future__ import annotations

import numpy as np

from whence.metrics.accumulators import Accumulators, Floats
from whence.metrics.metric import Metric

MAX_CHANNELS = 1 << 20
"""A longer last axis is not measured by row and channel: the sums would no longer fit in cache."""

_NONE = "needs two axes or more, and a last one of at most 1048576"
_SOURCE = "rel_l2 of each"


def _worst(a: Accumulators, column: str) -> Floats:
    # the pass leaves -1 when it saw no difference at all
    return np.where(
        (a.channels > 0) & (a["pairs"] > 0), np.sqrt(np.maximum(a[column], 0.0)), np.nan
    )


def _place(a: Accumulators, column: str) -> Floats:
    return np.where((a.channels > 0) & (a["pairs"] > 0), np.maximum(a[column], 0.0), np.nan)


ORDER = 80
METRICS = (
    Metric(
        "worst_row_rel_l2",
        "full",
        "largest rel_l2 of a row",
        _SOURCE,
        lambda a: _worst(a, "row_worst"),
        _NONE,
    ),
    Metric(
        "worst_row",
        "full",
        "that row, as flat index over all axes but the last",
        _SOURCE,
        lambda a: _place(a, "row_index"),
        _NONE,
    ),
    Metric(
        "worst_channel_rel_l2",
        "full",
        "largest rel_l2 of a channel",
        _SOURCE,
        lambda a: _worst(a, "channel_worst"),
        _NONE,
    ),
    Metric(
        "worst_channel",
        "full",
        "that channel, as index on the last axis",
        _SOURCE,
        lambda a: _place(a, "channel_index"),
        _NONE,
    ),
)
