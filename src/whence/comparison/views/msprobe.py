"""`msprobe compare` on tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from whence.comparison.views.formulas import (
    EPS32,
    EPS64,
    Figures,
    cosine,
    figure,
    wide,
    with_result,
)
from whence.dtypes import Array
from whence.records.slots import is_output
from whence.results import ViewRow

MOVES_AGAINST_THEMSELVES = False
_RATIO_IN, _RATIO_OUT = 0.9, 0.1  # the tool's text says 0.6
_COSINE_IN, _COSINE_DROP = 0.9, 0.1
_SKIPPED = (
    "empty", "empty_like", "numpy", "to", "setitem", "empty_with_format", "new_empty",
    "new_empty_strided", "empty_strided",
)  # fmt: skip


def figures(reference: Array, target: Array) -> tuple[Figures, str]:
    """`msprobe compare` on tensors: what is not finite at equal places counts as 0 on both sides,
    whatever its sign.

    Relative errors are |n - b| / |b| in float32 at least; where b is 0, the machine epsilon is
    added to both.
    """
    if reference.shape != target.shape:
        return {}, "shape unmatched"
    if not reference.size:
        return {}, "This is empty data, can not compare."
    b, n = wide(reference), wide(target)
    odd = ~np.isfinite(b)
    for test in (np.isnan, np.isinf):
        if not np.array_equal(test(b), test(n)):
            return {}, "Position of inf or nan in NPU and bench Tensor do not match."
    b, n = np.where(odd, 0.0, b), np.where(odd, 0.0, n)
    absolute = np.abs(n - b)
    is_wide = reference.dtype.itemsize > 4
    dtype, eps = (np.dtype(np.float64), EPS64) if is_wide else (np.dtype(np.float32), EPS32)
    bench: npt.NDArray[Any] = b.astype(dtype)
    npu: npt.NDArray[Any] = n.astype(dtype)
    shift = np.where(bench == 0, eps, 0.0).astype(dtype)
    relative = np.abs(npu - bench) / np.abs(bench + shift)
    similarity = cosine(b, n, 2.2e-16, 12, lone="NaN")
    if isinstance(similarity, float) and similarity > 0.9999:
        similarity = round(similarity, 6)
    return {
        "cosine": similarity,
        "euc_dist": float(np.linalg.norm(absolute)),
        "max_abs_err": round(float(absolute.max()), 12),
        "max_relative_err": round(float(relative.max()), 12),
        "one_thousandth": round(float(np.mean(relative < 1e-3)), 12),
        "five_thousandths": round(float(np.mean(relative < 5e-3)), 12),
    }, ""


def decide(rows: Sequence[ViewRow]) -> list[ViewRow]:
    """`error` before `warning` before `pass`, decided for all rows of a call together and set where
    the tool sets it.
    """
    out = list(rows)
    calls: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        calls.setdefault(row.call, []).append(index)
    for members in calls.values():
        outputs = [index for index in members if is_output(rows[index].slot)]
        inputs = [index for index in members if index not in outputs]
        for index in members:
            result = _row_result(rows[index])
            if result is None and index == next(iter(outputs), -1):
                result = _call_result(rows, inputs, outputs)
            out[index] = with_result(rows[index], *(result or ("pass", "")))
    return out


def _row_result(row: ViewRow) -> tuple[str, str] | None:
    a, b = row.reference, row.target
    if a is None or b is None:
        # their word for it is pass
        return ("pass", "No bench data matched." if a is None else "No NPU data matched.")
    if b.not_finite and not a.not_finite:
        return "error", "There is nan/inf/-inf in the maximum or minimum value of NPU."
    if a.dtype != b.dtype:
        return "error", "The dtype of NPU and Bench are inconsistent."
    if a.shape != b.shape:
        return "error", "The shape of NPU and Bench are inconsistent."
    return None


def _call_result(
    rows: Sequence[ViewRow], inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[str, str] | None:
    if any(
        a is not None and a.op_type in _SKIPPED
        for a in (rows[index].reference for index in outputs)
    ):
        return None
    ratio = [
        min((_missing(rows[index], "one_thousandth") for index in members), default=1.0)
        for members in (inputs, outputs)
    ]
    if ratio[0] > _RATIO_IN and ratio[1] < _RATIO_OUT:
        return (
            "error",
            "The input/parameters of One Thousandth Err Ratio > 0.9 while the output < 0.6.",
        )
    cosine = [
        min((_missing(rows[index], "cosine") for index in members), default=1.0)
        for members in (inputs, outputs)
    ]
    if cosine[0] > _COSINE_IN and cosine[0] - cosine[1] > _COSINE_DROP:
        return (
            "warning",
            "The Cosine of the input/parameters > 0.9 and the output is lower by more than 0.1.",
        )
    return None


def _missing(row: ViewRow, name: str) -> float:
    """A figure, 1 where there is none, as the tool takes it."""
    value = figure(row, name)
    return 1.0 if value is None or math.isnan(value) else value
