"""How far rounding lets two trainings drift apart: for each tensor and step a limit, from what both
runs showed in the steps before, from what the tensor is made of, and from what repetitions of the
reference show.

Training is chaotic: a difference of rounding grows, in each tensor by its own law, but from one
step to the next by a small factor. A fault is a difference that starts in one place while all that
this place is made of is still as near as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Matrix = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class DriftLimits:
    """floor: relative error in unit roundoffs that one call makes of equal inputs. growth: over the
    largest error so far, where many steps with noise were seen; first_growth: where one was,
    falling with their number. gain, first_gain: of a call's output over its inputs, as far as the
    steps before showed it, and where fewer than `steps` had noise. repetition: over what a
    repetition made so far. blind: relative error from which on a fault no longer stands out. late:
    steps of equal bits after which a first difference is remarkable whatever its size. faint: the
    size of a gradient, in that of the others, up to which it may be nothing but rounding.
    """

    floor: float = 400.0
    growth: float = 10.0
    first_growth: float = 1000.0
    gain: float = 10.0
    first_gain: float = 100.0
    steps: int = 10
    repetition: float = 10.0
    blind: float = 0.05
    late: int = 10
    faint: float = 1e-3


LIMITS = DriftLimits()
_ENDLESS = 1e30
"""Stands for the error of what is not finite in one run alone."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Relative errors of two runs, steps in rows and tensors in columns, NaN where nothing was
    compared. own: in units of the tensor. judged: of gradients in units of at least a part of the
    other gradients.
    """

    own: Matrix
    judged: Matrix


@dataclass(frozen=True, slots=True)
class Allowed:
    """limit: what is allowed. expected: what was seen so far, and follows from what came in: the
    noise that an error is compared with.
    """

    limit: Matrix
    expected: Matrix


def allowed(
    drift: Drift,
    causes: Sequence[Sequence[int]],
    roundoff: Matrix,
    carried: Matrix,
    repetitions: Sequence[Drift] = (),
    limits: DriftLimits = LIMITS,
) -> Allowed:
    """What rounding may make of each tensor in each step.

    causes: of each tensor those that it is made from. roundoff: of each tensor. carried: the error
    that a tensor had when an earlier step left it, 0 for what this step made.
    """
    judged = np.nan_to_num(drift.judged, nan=0.0, posinf=_ENDLESS)
    past = _before(judged)
    floor = np.broadcast_to(limits.floor * roundoff, judged.shape)
    growth = np.maximum(limits.growth, limits.first_growth / np.maximum(_count(judged > 0), 1))
    given = np.maximum(came_in(drift.own, causes), carried)
    gain = _before(judged / np.maximum(given, roundoff))
    # how noise goes through a call is learned where there was noise: not while both were equal
    is_known = _count(given > 0) >= limits.steps
    grown = np.where(is_known, limits.gain * gain, limits.first_gain)
    grown = np.minimum(grown, limits.first_gain)
    expected = np.maximum.reduce([past, np.minimum(gain, 1.0) * given, roundoff + 0 * past])
    limit = np.maximum.reduce([floor, growth * past, grown * given])
    for repetition in repetitions:
        ever = np.maximum.accumulate(np.nan_to_num(repetition.judged, nan=0.0), axis=0)
        ever = np.vstack([ever[1:], ever[-1:]])  # the next step's too: peaks need not fall together
        limit = np.maximum(limit, limits.repetition * ever)
        expected = np.maximum(expected, ever)
    return Allowed(limit, expected)


def came_in(own: Matrix, causes: Sequence[Sequence[int]]) -> Matrix:
    """The largest error of what each tensor is made from, 0 where that is nothing."""
    errors = np.nan_to_num(own, nan=0.0, posinf=_ENDLESS)
    out = np.zeros_like(errors)
    with_causes = [p for p, found in enumerate(causes) if found]
    if not with_causes:
        return out
    flat = np.concatenate([np.asarray(causes[p], np.int64) for p in with_causes])
    starts = np.cumsum([0, *(len(causes[p]) for p in with_causes[:-1])])
    rows = max(1, (1 << 23) // max(flat.size, 1))
    for low in range(0, errors.shape[0], rows):
        part = errors[low : low + rows, flat]
        out[low : low + rows, with_causes] = np.maximum.reduceat(part, starts, axis=1)
    return out


def smoothed(scale: Matrix) -> Matrix:
    """Sizes of tensors that fall by 5 % a step at most: the error of a gradient that vanishes in
    one step is judged by what it was.
    """
    out = np.nan_to_num(scale, nan=0.0)
    for row in range(1, out.shape[0]):
        np.maximum(out[row], 0.95 * out[row - 1], out=out[row])
    return out


def _count(holds: Matrix) -> Matrix:
    """In how many of the rows before something holds."""
    counted: Matrix = np.cumsum(holds, axis=0) - holds
    return counted


def _before(values: Matrix) -> Matrix:
    """The largest of the rows before, 0 for the first."""
    largest = np.maximum.accumulate(np.minimum(values, _ENDLESS), axis=0)
    return np.vstack([np.zeros_like(largest[:1]), largest[:-1]])
