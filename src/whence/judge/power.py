"""Computes how large a fault of each kind would have been named at an output that passed, so that a
verdict `same` can be weighed.

Each size is where the statistic of that kind meets its limit, given the noise that was measured;
all are relative to the tensor (docs/verdicts.md, "What would have been named").
"""

from __future__ import annotations

import math

from whence.dtypes import is_half_roundoff
from whence.judge import noise_model
from whence.judge.limits import LIMITS, STRUCTURE_CHANGED, STRUCTURE_ELEMENTS
from whence.judge.replay_error import ReplayError
from whence.results import Verdict

_STEP = 1.5
"""Average distance between neighbouring numbers, in unit roundoffs."""
SCALE, CHANNEL, ELEMENT, NOISE = "scale", "channel", "element", "noise"
KINDS = (SCALE, CHANNEL, ELEMENT, NOISE)
"""A factor on everything; a constant added to one channel; one element off; an error without a
pattern. Sizes of the last three are in units of the tensor's root mean square.
"""


def without_visible(verdict: Verdict) -> Verdict:
    """The verdict without these sizes, for a verdict that is no longer based on the figures they
    follow from.
    """
    numbers = {k: n for k, n in verdict.numbers.items() if not k.startswith("visible_")}
    return verdict.replace(numbers=numbers)


def visible(local: ReplayError) -> dict[str, float]:
    """By kind, the smallest fault that would have been named at this output; {} where its figures
    cannot tell: integers, stretches of which only the ends are recorded, and outputs of zeros and
    fill values alone, which have no size to which a fault could be relative.
    """
    if local.whole or not local.u or not local.count or not math.isfinite(local.element_rel):
        return {}
    is_half = is_half_roundoff(local.u)
    largest = LIMITS.precision_rho if is_half else LIMITS.rho
    noise = _beyond(local, largest)
    element = noise_model.ELEMENT[is_half].limit(local.outputs) * local.element_rel
    # The total size reveals every kind of fault: one channel of n has 1 / sqrt(n) of it.
    channels = local.count // local.rows if local.rows > 1 else 1
    channel = min(noise * math.sqrt(channels), element)
    sizes = {SCALE: noise, CHANNEL: channel, ELEMENT: element, NOISE: noise}
    if local.count >= STRUCTURE_ELEMENTS and local.rows > 1:
        sizes[SCALE] = min(noise, _scale(local))
        sizes[CHANNEL] = min(channel, _channel(local))
    return sizes


def _beyond(local: ReplayError, largest: float) -> float:
    """2-norm of an unrelated error that would raise the total error to `largest` times the
    floor.
    """
    return math.sqrt(max(0.0, (largest * local.floor_rel) ** 2 - local.error_rel**2))


def _scale(local: ReplayError) -> float:
    s, limit = local.structure, noise_model.limit(1, local.outputs)
    t = noise_model.student(limit, (s.clusters or local.rows) - 1)
    flips = _above(local.bias() + t * s.slope_error, t, local.u, local.count)
    return max(flips, STRUCTURE_CHANGED * _STEP * local.u / local.count)


def _channel(local: ReplayError) -> float:
    channels = local.count // local.rows
    t = noise_model.student(noise_model.limit(channels, local.outputs), local.rows - 1)
    spread = local.residual_rel / math.sqrt(local.rows)
    return _above(local.bias() + t * spread, t, local.u, local.rows)


def _above(size: float, t: float, u: float, count: int) -> float:
    """The fault d for which d = size + t sqrt(step d / count).

    Where nothing differs yet, a fault shows in the elements that it makes round differently: by a
    step of 2 u or 1 u, each with a probability of d / step, so it brings its own noise.
    """
    root = t * math.sqrt(_STEP * u / count)
    return ((root + math.sqrt(root * root + 4 * size)) / 2) ** 2
