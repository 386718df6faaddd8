"""Compares codes with their scales, where both sides chose different scales: do they represent the
same numbers?
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.judge.error_growth import PairError
from whence.judge.limits import CODES_BY_CHANCE

F64 = npt.NDArray[np.float64]


def error_of_scaled(codes: tuple[Array, Array], scales: tuple[Array, Array]) -> PairError | None:
    """A lower bound of the error between the numbers from which two pairs of codes and scales were
    rounded; None if no scale fits its codes.

    codes, scales: (reference, target). A scale is one number, or one for each row, column or block,
    by which codes are multiplied or divided.
    """
    if codes[0].shape != codes[1].shape or scales[0].shape != scales[1].shape:
        return None
    sides = [_Codes(array.astype(np.float64), _steps(array)) for array in codes]
    errors = [
        _apart(sides[0], sides[1], a, b)
        for a, b in zip(*(_factors(s, codes[0].shape) for s in scales), strict=True)
    ]
    return min(errors, key=lambda e: e.value or 0.0, default=None)


class _Codes(NamedTuple):
    """Codes of one side. values: as float64; steps: distance from each code to the next."""

    values: F64
    steps: F64


def _steps(codes: Array) -> F64:
    u = dtypes.of(codes).unit_roundoff
    wide = codes.astype(np.float64)
    if u is None:
        return np.ones_like(wide)
    size = np.abs(wide)
    least = float(size[size > 0].min(initial=math.inf))
    exponent = np.floor(np.log2(np.where(size > 0, size, least)))
    return np.asarray(2.0 * u * 2.0**exponent)


def _factors(scale: Array, shape: tuple[int, ...]) -> Iterator[F64]:
    """The factors, of the codes' shape, by which a scale may multiply codes."""
    wide: F64 = np.abs(scale.astype(np.float64))
    if not wide.size or not (np.isfinite(wide).all() and wide.all()):
        return
    for fitted in _fitted(wide, shape):
        yield fitted
        yield 1.0 / fitted


def _fitted(wide: F64, shape: tuple[int, ...]) -> Iterator[F64]:
    if wide.size == 1:
        yield np.broadcast_to(wide.reshape(()), shape)
        return
    for sizes in (wide.shape, (*wide.shape, 1)):
        if len(sizes) == len(shape) and all(m % n == 0 for m, n in zip(shape, sizes, strict=True)):
            blocks = wide.reshape(sizes)
            for axis, (m, n) in enumerate(zip(shape, sizes, strict=True)):
                blocks = np.repeat(blocks, m // n, axis=axis)
            yield blocks
    for axis, length in enumerate(shape):
        if len(shape) > 1 and wide.shape == (length,):
            along = [-1 if a == axis else 1 for a in range(len(shape))]
            yield np.broadcast_to(wide.reshape(along), shape)


def _apart(one: _Codes, two: _Codes, factor_one: F64, factor_two: F64) -> PairError:
    """The error between two sides beyond rounding. Each side rounds by up to half a step, as often
    up as down, and another scale moves codes by a known amount; only the rest counts.
    """
    a, b = one.values * factor_one, two.values * factor_two
    size = math.sqrt(float(np.sum(a * a)))
    if not 0 < size < math.inf or not np.isfinite(b).all():
        return PairError(math.inf, codes=True)
    step = (one.steps * factor_one + two.steps * factor_two) / 2
    apart = np.abs(a - b)
    excess = math.sqrt(float(np.sum(np.maximum(apart - step, 0.0) ** 2))) / size
    shift = max(abs(float((a - b).sum())), abs(float((np.abs(a) - np.abs(b)).sum())))
    by_chance = CODES_BY_CHANCE * math.sqrt(float(np.sum(step * step)))
    scaled = np.abs(one.values) * np.abs(factor_one / factor_two - 1.0)
    moved = np.abs(one.values - two.values) - scaled
    steps_by_chance = CODES_BY_CHANCE * math.sqrt(float(np.sum(one.steps * one.steps)))
    value = max(
        excess,
        (shift - by_chance) / float(np.abs(a).sum()),
        (float(moved.sum()) - steps_by_chance) / float(np.abs(one.values).sum()),
    )
    return PairError(value, codes=True, coarse=math.sqrt(float(np.sum(apart * apart))) / size)
