"""Pass or fail as other tools decide it, by fixed thresholds: for views only, whence rests nothing
on them. Sources: docs/views.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from whence.results import ViewRow

_RATIO_IN, _RATIO_OUT = 0.9, 0.1  # the tool's text says 0.6
_COSINE_IN, _COSINE_DROP = 0.9, 0.1
_MAX_ERR = 0.01
_SKIPPED = (
    "empty",
    "empty_like",
    "numpy",
    "to",
    "setitem",
    "empty_with_format",
    "new_empty",
    "new_empty_strided",
    "empty_strided",
)


def results(view: str, rows: Sequence[ViewRow]) -> list[ViewRow]:
    """The rows with `result` and `message` as the tool would set them."""
    if view == "msprobe":
        return _msprobe(rows)
    if view == "torch_xray":
        return [_with(row, _xray(row)) for row in rows]
    if view == "polygraphy":
        return [
            _with(row, "" if (failing := _number(row, "failing")) is None else str(failing == 0))
            for row in rows
        ]
    return list(rows)


def _xray(row: ViewRow) -> str:
    error = _number(row, "max_err")
    return "" if error is None else "Pass" if error <= _MAX_ERR else "Fail"


def _msprobe(rows: Sequence[ViewRow]) -> list[ViewRow]:
    """`error` before `warning` before `pass`, decided for all rows of a call together and set where
    the tool sets it.
    """
    out = list(rows)
    calls: dict[tuple[int, int], list[int]] = {}
    for at, row in enumerate(rows):
        calls.setdefault(row.call, []).append(at)
    for members in calls.values():
        outputs = [at for at in members if rows[at].slot.startswith("output")]
        inputs = [at for at in members if at not in outputs]
        for at in members:
            found = _row_result(rows[at])
            if found is None and at == next(iter(outputs), -1):
                found = _call_result(rows, inputs, outputs)
            out[at] = _with(rows[at], *(found or ("pass", "")))
    return out


def _row_result(row: ViewRow) -> tuple[str, str] | None:
    a, b = row.reference, row.target
    if a is None or b is None:
        return (
            "pass",
            "No bench data matched." if a is None else "No NPU data matched.",
        )  # their word for it is pass
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
    if any(a is not None and a.op_type in _SKIPPED for a in (rows[at].reference for at in outputs)):
        return None
    ratio = [
        min((_missing(rows[at], "one_thousandth") for at in members), default=1.0)
        for members in (inputs, outputs)
    ]
    if ratio[0] > _RATIO_IN and ratio[1] < _RATIO_OUT:
        return (
            "error",
            "The input/parameters of One Thousandth Err Ratio > 0.9 while the output < 0.6.",
        )
    cosine = [
        min((_missing(rows[at], "cosine") for at in members), default=1.0)
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
    value = _number(row, name)
    return 1.0 if value is None or math.isnan(value) else value


def _number(row: ViewRow, name: str) -> float | None:
    value = row.figures.get(name)
    return value if isinstance(value, float) else None


def _with(row: ViewRow, result: str, message: str = "") -> ViewRow:
    return msgspec.structs.replace(row, result=result, message=message)
