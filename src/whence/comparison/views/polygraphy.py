"""Polygraphy's comparison of outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whence.comparison.views.formulas import Figures, figure, wide, with_result
from whence.dtypes import Array
from whence.results import ViewRow

MOVES_AGAINST_THEMSELVES = False


def figures(reference: Array, target: Array) -> tuple[Figures, str]:
    """Polygraphy's simple comparison: relative differences are over |reference| (the second
    runner), 2.2e-16 where that is a floating 0; over an integer 0 they are NaN or infinite.

    failing: elements beyond both tolerances, of 1e-5 each; what is not finite on both sides is a
    failing element too.
    """
    if reference.shape != target.shape:
        return {}, f"shape {tuple(reference.shape)} against {tuple(target.shape)}"
    if not reference.size:
        return {}, "empty"
    second, first = wide(reference), wide(target)
    least = 0.0 if reference.dtype.kind in "iub" else 2.220446049250313e-16
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        absolute = np.abs(first - second)
        relative = absolute / np.where(second == 0, least, np.abs(second))
        numbers: Figures = {}
        for name, values in (("absdiff", absolute), ("reldiff", relative)):
            numbers |= {
                f"max_{name}": float(np.max(values)),
                f"mean_{name}": float(np.mean(values)),
                f"median_{name}": float(np.median(values)),
                f"quantile_{name}": float(np.quantile(values, 0.99)),
            }
        numbers["failing"] = float(np.count_nonzero(~((absolute <= 1e-5) | (relative <= 1e-5))))
    return numbers, ""


def decide(rows: Sequence[ViewRow]) -> list[ViewRow]:
    """True where no element is beyond the tolerances."""
    return [
        with_result(row, "" if (failing := figure(row, "failing")) is None else str(failing == 0))
        for row in rows
    ]
