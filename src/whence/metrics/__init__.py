"""Computes numbers from two aligned arrays. There are no thresholds here.

One pass over the bytes of a pair fills accumulators (compiled in `_kernels`, or `numpy_pass`); each
metric is a few lines that read them (`table`); `docs/metrics.md` is their reference.
"""

from __future__ import annotations

from whence.metrics.accumulators import edges as histogram_edges
from whence.metrics.custom import Custom, installed
from whence.metrics.error_profile import Closely, Heat, closely
from whence.metrics.measure import TIERS, measure, measure_many
from whence.metrics.metric import Metric
from whence.metrics.table import METRICS

__all__ = [
    "METRICS",
    "TIERS",
    "Closely",
    "Custom",
    "Heat",
    "Metric",
    "closely",
    "histogram_edges",
    "installed",
    "measure",
    "measure_many",
]
