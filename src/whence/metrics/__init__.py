"""Numbers from two aligned arrays. No threshold anywhere.

One pass over the bytes of a pair fills accumulators (compiled, or numpy: `pairs`, `plain`); each metric is a few lines that
read them (`agreement`, `distance`, `similarity`, ...). METRICS lists them all; `docs/metrics.md` is their reference.
"""

from __future__ import annotations

from whence.metrics.closely import Closely, Heat, closely
from whence.metrics.custom import Custom, installed
from whence.metrics.histogram import edges as histogram_edges
from whence.metrics.metric import Metric
from whence.metrics.pairs import METRICS, TIERS, measure, measure_many
from whence.metrics.views import FORMULAS as VIEWS
from whence.metrics.views import Figures

__all__ = [
    "METRICS",
    "TIERS",
    "VIEWS",
    "Closely",
    "Custom",
    "Figures",
    "Heat",
    "Metric",
    "closely",
    "histogram_edges",
    "installed",
    "measure",
    "measure_many",
]
