"""What rounding alone does to each statistic, and how rarely: the only place where limits follow
from a rate of false alarms.

Null hypothesis: the target runs the reference's program in its own dtype with other correct
kernels. Its residual against the working replay is then rounding: independent from row to row
except for what the program's own rounding shows, and without a scale, a channel or a range of
values that is off by more than the allowed bias. Statistics that are averages follow Student's t
and are converted to the scale of the normal distribution. The worst element follows an exponential
tail that was measured (docs/verdicts.md, "The noise model").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

FALSE_ALARMS = 1e-3
"""Share of comparisons of correct targets in which some output may exceed a limit."""
FAMILIES = 3
"""Number of families of averages tested at each output: scale, channels, ranges of values."""
ASPECTS = 3
"""Number of aspects of which a chance is the smallest: size of the error, its worst element, its
averages.
"""
FEWEST_OUTPUTS = 100
"""Least number of outputs that a comparison is assumed to have: limits need some margin in a small
one.
"""

_NORMAL = NormalDist()
_FARTHEST = 37.0
"""Standard deviations beyond which a probability underflows in a double."""


@dataclass(frozen=True, slots=True)
class Tail:
    """A statistic that exceeds `start + k * decade` at one output in 10^k."""

    start: float
    decade: float

    def limit(self, outputs: int) -> float:
        """The value that it exceeds at any of `outputs` outputs only at the rate of false
        alarms.
        """
        return self.start + self.decade * math.log10(max(outputs, FEWEST_OUTPUTS) / FALSE_ALARMS)

    def chance(self, value: float, outputs: int) -> float:
        """Share of comparisons with so many correct outputs in which one output reaches `value`, at
        most 1.
        """
        if not math.isfinite(value):
            return 0.0
        exponent = math.log10(max(outputs, 1)) - (value - self.start) / self.decade
        return float(min(1.0, 10.0 ** max(exponent, -300.0)))


SIZE = {False: Tail(0.83, 0.35), True: Tail(-0.4, 0.7)}
"""Tail of the error of a whole output, in units of its floor (rho). True: at 16 bits."""
ELEMENT = {False: Tail(2.6, 1.4), True: Tail(0.3, 1.3)}
"""Tail of the worst element's error, in units of its expected rounding error (z), and of rho where
the whole output is noisier than its floor. True: at 16 bits.
"""


def normal_score(t: float, degrees: int) -> float:
    """The quantile of the normal distribution with the same tail probability as t in Student's t.

    Source: D. L. Wallace, Bounds on normal approximations to Student's and the chi-square
    distributions (1959). From 7 degrees of freedom on, the probability is accurate to a fifth and
    errs towards too large.
    """
    if degrees < 1:
        return 0.0
    t = min(abs(t), 1e100)
    return (8 * degrees + 1) / (8 * degrees + 3) * math.sqrt(degrees * math.log1p(t * t / degrees))


def student(score: float, degrees: int) -> float:
    """The quantile of Student's t with the same tail probability as this normal score: the inverse
    of `normal_score`.
    """
    if degrees < 1:
        return math.inf
    stretched = score * (8 * degrees + 3) / (8 * degrees + 1)
    return math.sqrt(degrees * math.expm1(min(stretched * stretched / degrees, 600.0)))


@cache
def limit(tests: int, outputs: int) -> float:
    """The number of standard deviations that the largest of `tests` averages at each of `outputs`
    outputs exceeds only at the rate of false alarms (Bonferroni, two-sided).
    """
    tried = FAMILIES * tests * max(outputs, FEWEST_OUTPUTS)
    return _NORMAL.inv_cdf(1 - FALSE_ALARMS / (2 * tried))


def chance(score: float, tests: int, outputs: int) -> float:
    """Share of comparisons with so many correct outputs in which one of these averages is `score`
    standard deviations off, at most 1.
    """
    if score >= _FARTHEST:
        return 0.0
    tried = FAMILIES * tests * max(outputs, 1)
    return min(1.0, tried * math.erfc(score / math.sqrt(2)))
