"""Where along an axis an error is concentrated: the shortest stretch that holds most of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_HOLDS = 0.9
_LEAST = 8  # places; below, a quarter of the axis is one or two of them
_SHARE = 0.25


def concentrated(energy: npt.NDArray[np.float64]) -> tuple[int, int, float] | None:
    """(first, last, share) of the shortest stretch of places that holds 90 % of `energy`, None where it is longer than a quarter of them.

    energy: 1-D, sums of squared errors by place, not negative and finite. share: of all of it, at least 0.9.
    """
    total = float(energy.sum())
    if energy.size < _LEAST or not total > 0 or not np.isfinite(total):
        return None
    sums = np.concatenate(((0.0,), np.cumsum(energy)))
    ends = np.searchsorted(sums, sums[:-1] + _HOLDS * total * (1 - 1e-12))
    lengths = np.where(ends < sums.size, ends - np.arange(energy.size), energy.size + 1)
    first = int(lengths.argmin())
    length = int(lengths[first])
    if length > _SHARE * energy.size:
        return None
    return first, first + length - 1, float(sums[first + length] - sums[first]) / total
