"""How far rounding lets two trainings drift apart: a limit for each tensor and step, from the
errors in earlier steps, from the errors of the tensor's inputs and from repetitions of the
reference.

Training is chaotic: a rounding difference grows, in each tensor by its own law, but by a small
factor from one step to the next. A fault is a difference that starts at one place while the inputs
of this place are still as close as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Matrix = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class DriftLimits:
    """Limits of drift. floor: relative error, in unit roundoffs, that one call may cause on equal
    inputs. growth: factor over the largest error so far, after many noisy steps; first_growth:
    after one, falling with their number. gain: factor over the output-to-input ratio of errors in
    earlier steps; first_gain: largest such ratio, used if fewer than `steps` were noisy.
    repetition: factor over the errors of a repetition. blind: relative error from which on a fault
    no longer stands out. late: number of bitwise equal steps after which any first difference is
    remarkable. faint: size of a gradient, relative to the others, up to which it may be only
    rounding.
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
"""The error of a tensor that is not finite in one run only."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Relative errors between two runs, (step, tensor), NaN for a tensor that was not compared.
    own: relative to the tensor. judged: the same, but for gradients relative to at least a share of
    the other gradients.
    """

    own: Matrix
    judged: Matrix


@dataclass(frozen=True, slots=True)
class Allowed:
    """limit: the largest error that is allowed, (step, tensor). expected: the noise to compare an
    error with, from earlier steps and from the errors of the inputs.
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
    """The error that rounding may cause in each tensor and step.

    causes: by tensor, the columns of its inputs. roundoff: unit roundoff of each tensor. carried:
    the error of a tensor that an earlier step left, 0 for tensors computed in this step.
    """
    judged = np.nan_to_num(drift.judged, nan=0.0, posinf=_ENDLESS)
    past = _before(judged)
    floor = np.broadcast_to(limits.floor * roundoff, judged.shape)
    growth = np.maximum(limits.growth, limits.first_growth / np.maximum(_count(judged > 0), 1))
    given = np.maximum(came_in(drift.own, causes), carried)
    gain = _before(judged / np.maximum(given, roundoff))
    # the gain of a call is learned from noisy steps only, not while both runs were equal
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
    """The largest error of each tensor's inputs, (step, tensor); 0 if it has none."""
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
    """Sizes of tensors, (step, tensor), made to fall by at most 5 % per step, so that a gradient
    that vanishes in one step is judged by its earlier size.
    """
    out = np.nan_to_num(scale, nan=0.0)
    for row in range(1, out.shape[0]):
        np.maximum(out[row], 0.95 * out[row - 1], out=out[row])
    return out


def _count(holds: Matrix) -> Matrix:
    """For each row, the number of earlier rows in which the condition holds."""
    counted: Matrix = np.cumsum(holds, axis=0) - holds
    return counted


def _before(values: Matrix) -> Matrix:
    """For each row, the largest value of all earlier rows; 0 for the first."""
    largest = np.maximum.accumulate(np.minimum(values, _ENDLESS), axis=0)
    return np.vstack([np.zeros_like(largest[:1]), largest[:-1]])
