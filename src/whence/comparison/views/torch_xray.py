"""torch_xray `compare`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whence.comparison.views.formulas import Figures, cosine, figure, wide, with_result
from whence.dtypes import Array
from whence.results import ViewRow

MOVES_AGAINST_THEMSELVES = False
MAX_ERR = 0.01


def figures(reference: Array, target: Array) -> tuple[Figures, str]:
    """torch_xray's `compare`: cosine, root mean square of the error, per cent that is close (rtol
    1e-3, atol 1e-5), largest error, elements that differ at all.
    """
    if reference.shape != target.shape:
        return {}, f"shape {tuple(reference.shape)} against {tuple(target.shape)}"
    if not reference.size:
        return {}, "empty"
    g, m = wide(reference), wide(target)
    with np.errstate(invalid="ignore", over="ignore"):
        absolute = np.abs(m - g)
        rmse, close = (
            float(np.sqrt(np.mean(absolute**2))),
            np.isclose(m, g, rtol=1e-3, atol=1e-5, equal_nan=True),
        )
    return {
        "cosine": cosine(g, m, 0.0, 10, lone=0.0),
        "rmse": rmse,
        "is_close": 100.0 * float(np.mean(close)),
        "max_err": float(np.max(absolute)),
        "gt_num": float(np.count_nonzero(~((g == m) | (np.isnan(g) & np.isnan(m))))),
    }, ""


def decide(rows: Sequence[ViewRow]) -> list[ViewRow]:
    """Pass up to an error of 0.01."""
    return [with_result(row, _result(figure(row, "max_err"))) for row in rows]


def _result(error: float | None) -> str:
    return "" if error is None else "Pass" if error <= MAX_ERR else "Fail"
