"""One metric: its name, its definition, and how it is computed from the accumulators of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from whence.metrics.accumulators import Accumulators, Floats


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that describes a pair.

    tier: "core" or "full", the pass that computes it. definition: one line; r is the reference, t
    the target, sums run over elements that are finite on both sides. source: of the formula.
    formula: accumulators of k pairs -> (k,) float64, NaN where the metric is not defined (inf is a
    value). why: the reason given where it is not defined.
    """

    name: str
    tier: str
    definition: str
    source: str
    formula: Callable[[Accumulators], Floats]
    why: str = ""


def ratio(above: Floats, below: Floats) -> Floats:
    """above / below; where below is 0: 0 for 0/0, else inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(above == 0.0, 0.0, above / below)


def over(above: Floats, below: Floats) -> Floats:
    """above / below; NaN (not defined) where below is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below == 0.0, np.nan, above / below)
