"""How many elements have an error above 1e-1, 1e-2, ... 1e-8: the distribution of the error in
decades.
"""

from __future__ import annotations

from operator import itemgetter

from whence.metrics.metric import Metric

ORDER = 60
METRICS = tuple(
    Metric(
        f"abs_err_over_1e-{k + 1}",
        "full",
        f"elements with |t - r| > 1e-{k + 1}",
        "count",
        itemgetter(f"over_{k}"),
    )
    for k in range(8)
)
