"""How far the statistics of one side have moved from those of the other.

Rounding moves each statistic by far less than it moves the elements, and by less the more elements it is taken over: a mean by e / sqrt(n).
What moves a mean or a norm as far as single elements move is no rounding. Each kind of statistic therefore has a limit of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from whence.records import Record, Statistics


class Drift(NamedTuple):
    """Relative distances: of the smallest and largest element over the largest magnitude, of the mean over the root mean square, of the
    second moments (norm, standard deviation, sum of |x|) and of the higher ones (sums of x^3 and x^4, as lengths)."""

    extreme: float
    mean: float
    moment: float
    higher: float


def drift(reference: Record, target: Record) -> Drift | None:
    """The drift of a pair of one shape, None where either side has no statistics of finite elements."""
    a, b = reference.statistics, target.statistics
    if a is None or b is None or a.count != b.count or not a.count:
        return None
    first, second = _known(a), _known(b)
    if first is None or second is None:
        return None
    (low, high, mean, std, norm), (low2, high2, mean2, std2, norm2) = first, second
    big = max(abs(low), abs(high)) or _TINY
    rms = norm / math.sqrt(a.count) or _TINY
    # Rounding by e moves a standard deviation by up to e rms / sqrt(n), however small it is itself (4 values of 0.45 to 0.52).
    moment = max(abs(norm - norm2) / (norm or _TINY), abs(std - std2) / max(std, rms / math.sqrt(a.count)))
    higher = 0.0
    x, y = reference.sketch, target.sketch
    if x is not None and y is not None and x.abs_sum is not None and y.abs_sum is not None:
        moment = max(moment, abs(x.abs_sum - y.abs_sum) / (x.abs_sum or _TINY))
        if x.fourth_sum is not None and y.fourth_sum is not None:
            higher = abs(x.fourth_sum - y.fourth_sum) / (4 * x.fourth_sum or _TINY)
            if x.cube_sum is not None and y.cube_sum is not None:
                size = x.fourth_sum**0.75 * a.count**0.25  # at least the sum of |x|^3 (Hölder)
                higher = max(higher, abs(x.cube_sum - y.cube_sum) / (size or _TINY))
    return Drift(max(abs(low - low2), abs(high - high2)) / big, abs(mean - mean2) / rms, moment, higher)


def _known(s: Statistics) -> tuple[float, float, float, float, float] | None:
    if s.min is None or s.max is None or s.mean is None or s.std is None or s.norm is None:
        return None
    return s.min, s.max, s.mean, s.std, s.norm


_TINY = 1e-300
