"""The error histogram in powers of two: where its bins begin."""

from __future__ import annotations

import math

from whence._kernels import BINS


def edges() -> tuple[float, ...]:
    """Lower edges of the bins of `Measured.histogram`; bin k counts edges[k] <= |t - r| < edges[k + 1].

    Bin 0 holds exactly zero and nothing else; bin 1 every smaller error than 2^-46; the last one everything from 2^15 up.
    Only places where both sides are finite are counted.
    """
    return (0.0, math.ulp(0.0), *(2.0 ** (k - 48) for k in range(2, BINS)))
