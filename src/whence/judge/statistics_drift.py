"""How far the statistics of one side have moved from those of the other.

Rounding moves each statistic by far less than it moves the elements, and by less the more elements
it is taken over: a mean by e / sqrt(n). What moves a mean or a norm as far as single elements move
is no rounding. Each kind of statistic therefore has a limit of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from whence.judge.limits import NORM_SUMMATION
from whence.records import Record, Statistics


class Drift(NamedTuple):
    """Relative distances: of the smallest and largest element over the largest magnitude, of the
    mean over the root mean square, of the second moments (norm, standard deviation, sum of |x|) and
    of the higher ones (sums of x^3 and x^4, as lengths)."""

    extreme: float
    mean: float
    moment: float
    higher: float


def drift(reference: Record, target: Record) -> Drift | None:
    """The drift of a pair of one shape, None where either side has no statistics of finite
    elements.
    """
    a, b = reference.statistics, target.statistics
    if a is None or b is None or a.count != b.count or not a.count:
        return None
    figures = zip(_figures(a), _figures(b), strict=True)
    if not any(x is not None and y is not None for x, y in figures):
        return None
    step = _last_digit(reference, target)

    def apart(x: float, y: float) -> float:
        return max(abs(x - y) - step, 0.0)

    # Dumps of other tools may lack any of these.
    big = _magnitude(a)
    rms = a.norm / math.sqrt(a.count) if a.norm is not None else big
    moment = mean = 0.0
    if a.norm is not None and b.norm is not None:
        moment = _over(apart(a.norm, b.norm), a.norm)
    if a.std is not None and b.std is not None:
        # Rounding by e moves a standard deviation by up to e rms / sqrt(n), however small it is
        # itself (4 values of 0.45 to 0.52).
        moment = max(moment, _over(apart(a.std, b.std), max(a.std, rms / math.sqrt(a.count))))
    if a.mean is not None and b.mean is not None:
        mean = _over(apart(a.mean, b.mean), rms)
    higher = 0.0
    x, y = reference.sketch, target.sketch
    if x is not None and y is not None and x.abs_sum is not None and y.abs_sum is not None:
        moment = max(moment, _over(abs(x.abs_sum - y.abs_sum), x.abs_sum))
        if x.fourth_sum is not None and y.fourth_sum is not None:
            higher = _over(abs(x.fourth_sum - y.fourth_sum), 4 * x.fourth_sum)
            if x.cube_sum is not None and y.cube_sum is not None:
                size = x.fourth_sum**0.75 * a.count**0.25  # at least the sum of |x|^3 (Hölder)
                higher = max(higher, _over(abs(x.cube_sum - y.cube_sum), size))
    ends = [(x, y) for x, y in ((a.min, b.min), (a.max, b.max)) if x is not None and y is not None]
    extreme = max((apart(x, y) for x, y in ends), default=0.0)
    return Drift(_over(extreme, big), mean, moment, higher)


def resolution(reference: Record, target: Record) -> float:
    """The last printed digit of statistics over the magnitude of their tensor."""
    size = _magnitude(reference.statistics) if reference.statistics is not None else 0.0
    return _over(_last_digit(reference, target), size)


def _last_digit(reference: Record, target: Record) -> float:
    """Figures that were printed say nothing below it; 0 for others."""
    return max((r.quantum for r in (reference, target) if r.why), default=0.0)


def _magnitude(s: Statistics) -> float:
    return max(abs(x) for x in (s.min, s.max, s.std, s.mean, 0.0) if x is not None)


def _over(change: float, size: float) -> float:
    return change / size if size else math.inf if change else 0.0


def parted(moved: Drift, u: float) -> bool:
    """Do the figures of equal elements move so far? Smallest and largest are elements; sums depend
    on who adds up, and in what dtype.
    """
    return moved.extreme > u or max(moved.mean, moved.moment) > max(4 * u, NORM_SUMMATION)


def _figures(s: Statistics) -> tuple[float | None, ...]:
    return s.min, s.max, s.mean, s.std, s.norm
