"""One metric: its name, what it means, and how it follows from the accumulators of a pass.

A file of this folder adds metrics by two names: METRICS, a tuple of them, and ORDER, the place of
the file among the others (columns stand in this order). OVER_FINITE_PAIRS = True says that its
figures are taken over places where both sides are finite, and are missing where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from whence.metrics.accumulators import Accumulators, Floats


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a pair.

    tier: "core" or "full", the pass that yields it. definition: one line; r is the reference, t the
    target, sums run over the places where both are finite. source: where the formula comes from.
    formula: accumulators of k pairs -> (k,) float64, NaN where the metric is not defined (inf is a
    value). why: the sentence that then stands in its place.
    """

    name: str
    tier: str
    definition: str
    source: str
    formula: Callable[[Accumulators], Floats]
    why: str = ""


def ratio(above: Floats, below: Floats) -> Floats:
    """above / below, and where below is 0: 0 for 0/0, else inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(above == 0.0, 0.0, above / below)


def over(above: Floats, below: Floats) -> Floats:
    """above / below, NaN (not defined) where below is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below == 0.0, np.nan, above / below)
