"""What rounding alone makes of each statistic, and how rarely: the one place where a limit follows
from a rate of false alarms.

Null hypothesis: the target runs the reference's program in its own dtype with other correct
kernels. Its residual against the working replay is then rounding: independent from row to row
except for what the program's own rounding shows, without a scale, a channel or a range of values
that is off by more than the allowed bias. Statistics that are averages follow Student's t, and are
put on the scale of the normal distribution; the worst element follows an exponential tail that was
measured (docs/verdicts.md, "The noise model").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

FALSE_ALARMS = 1e-3
"""Comparisons of correct targets in which some output may exceed a limit."""
FAMILIES = 3
"""Families of averages that are tested at each output: scale, channels, ranges of values."""
ASPECTS = 3
"""What a chance is the smallest of: the size of the error, its worst element, its averages."""
FEWEST_OUTPUTS = 100
"""Outputs that a comparison is taken to have at least: a limit needs some distance in a small one.
"""

_NORMAL = NormalDist()
_FARTHEST = 37.0
"""Standard deviations beyond which a double has no probability."""


@dataclass(frozen=True, slots=True)
class Tail:
    """A statistic that exceeds `start + k * decade` at one output in 10^k."""

    start: float
    decade: float

    def limit(self, outputs: int) -> float:
        """What it stays below at all of so many outputs, but for the rate of false alarms."""
        return self.start + self.decade * math.log10(max(outputs, FEWEST_OUTPUTS) / FALSE_ALARMS)

    def chance(self, value: float, outputs: int) -> float:
        """Comparisons of so many correct outputs in which one comes this far, at most 1."""
        if not math.isfinite(value):
            return 0.0
        exponent = math.log10(max(outputs, 1)) - (value - self.start) / self.decade
        return float(min(1.0, 10.0 ** max(exponent, -300.0)))


SIZE = {False: Tail(0.83, 0.35), True: Tail(-0.4, 0.7)}
"""How far the error of a whole output comes, in units of its floor (rho); True: at 16 bits."""
ELEMENT = {False: Tail(2.6, 1.4), True: Tail(0.3, 1.3)}
"""How far the worst element comes, in units of what rounding makes of it (z), and of rho where the
whole output is noisier than its floor; True: at 16 bits.
"""


def normal_score(t: float, degrees: int) -> float:
    """The quantile of the normal distribution that is as rare as this one of Student's t.

    Source: D. L. Wallace, Bounds on normal approximations to Student's and the chi-square
    distributions (1959). The probability is right to a fifth from 7 degrees of freedom on, and errs
    to the side of too large.
    """
    if degrees < 1:
        return 0.0
    t = min(abs(t), 1e100)
    return (8 * degrees + 1) / (8 * degrees + 3) * math.sqrt(degrees * math.log1p(t * t / degrees))


def student(score: float, degrees: int) -> float:
    """The quantile of Student's t that is as rare as this one of the normal distribution: the
    inverse of `normal_score`.
    """
    if degrees < 1:
        return math.inf
    stretched = score * (8 * degrees + 3) / (8 * degrees + 1)
    return math.sqrt(degrees * math.expm1(min(stretched * stretched / degrees, 600.0)))


@cache
def limit(tests: int, outputs: int) -> float:
    """Standard deviations that the largest of `tests` averages at each of so many outputs stays
    below, but for the rate of false alarms (Bonferroni, both sides).
    """
    tried = FAMILIES * tests * max(outputs, FEWEST_OUTPUTS)
    return _NORMAL.inv_cdf(1 - FALSE_ALARMS / (2 * tried))


def chance(score: float, tests: int, outputs: int) -> float:
    """Comparisons of so many correct outputs in which one of these averages is so many standard
    deviations off, at most 1.
    """
    if score >= _FARTHEST:
        return 0.0
    tried = FAMILIES * tests * max(outputs, 1)
    return min(1.0, tried * math.erfc(score / math.sqrt(2)))
