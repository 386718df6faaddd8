"""What the formulas of several tools share. Where such a formula misleads, the figure is still the
tool's; what is right stands in whence's own columns.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from whence.dtypes import Array
from whence.results import ViewRow

Figures = dict[str, float | str | None]
Floats = npt.NDArray[np.floating[Any]]

EPS32, EPS64 = float(np.finfo(np.float32).eps), float(np.finfo(np.float64).eps)


def narrow(array: Array) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        return (
            np.asarray(array.real if array.dtype.kind == "c" else array)
            .reshape(-1)
            .astype(np.float32)
        )


def wide(array: Array) -> npt.NDArray[np.float64]:
    return (
        np.asarray(np.abs(array) if array.dtype.kind == "c" else array)
        .reshape(-1)
        .astype(np.float64)
    )


def masked(g: npt.NDArray[np.float32], m: npt.NDArray[np.float32], eps: float) -> Figures:
    """Errors that count as 0 where |g| <= eps."""
    counted = np.abs(g) > eps
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.where(
            counted, np.abs(m / np.where(counted, g, np.float32(1)) - np.float32(1)), np.float32(0)
        )
        absolute = np.where(counted, np.abs(m - g), np.float32(0))
    return {
        "max_relative_error": float(relative.max()),
        "mean_relative_error": float(relative.mean()),
        "max_absolute_error": float(absolute.max()),
        "mean_absolute_error": float(absolute.mean()),
    }


def cosine(
    g: Floats, m: Floats, eps: float, digits: int, *, lone: float | str
) -> float | str | None:
    """lone: what the tool says where one side alone is zero."""
    a, b = g.astype(np.float64), m.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        norm_a, norm_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
        if norm_a <= eps and norm_b <= eps:
            return 1.0
        if norm_a <= eps or norm_b <= eps:
            return lone
        value = float(np.dot(a / norm_a, b / norm_b))
    return round(value, digits) if np.isfinite(value) else None


def kl(g: npt.NDArray[np.float32], m: npt.NDArray[np.float32]) -> float:
    def log_softmax(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        wide = x.astype(np.float64) - float(x.max())
        return np.asarray(wide - float(np.log(np.exp(wide).sum())))

    p, q = log_softmax(g), log_softmax(m)
    return max(float(np.sum(np.exp(p) * (p - q))), 0.0)


def figure(row: ViewRow, name: str) -> float | None:
    value = row.figures.get(name)
    return value if isinstance(value, float) else None


def with_result(row: ViewRow, result: str, message: str = "") -> ViewRow:
    return msgspec.structs.replace(row, result=result, message=message)
