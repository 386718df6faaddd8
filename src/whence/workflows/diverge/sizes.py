"""The size of a difference: relative to the tensor, and for gradients relative to their
summands.
"""

from __future__ import annotations

import numpy as np

from whence.judge.diverging import LIMITS, Drift, smoothed
from whence.records.training import BACKWARD, GRADIENTS
from whence.workflows.diverge.distances import COUNT, Distances, Tested
from whence.workflows.diverge.figures import SLOTS, CallKey, Column, Names


def drift_of(found: Distances, reference: Tested, names: Names) -> Drift:
    """Relative errors of two runs."""
    scale = smoothed(found.scale)
    own = _over(found.error, scale)
    floor = np.zeros_like(scale)
    groups: dict[tuple[str, bool], list[int]] = {}
    slots = [str(names.words[place.number % SLOTS]) for place in reference.places.place]
    keys = [names.keys[place.number // SLOTS] for place in reference.places.place]
    for number, (key, slot) in enumerate(zip(keys, slots, strict=True)):
        if key.phase == BACKWARD or key.op == GRADIENTS:
            groups.setdefault((key.root, _is_of_parameter(key, slot)), []).append(number)
    for places in groups.values():
        some = np.where(scale[:, places] > 0, scale[:, places], np.nan)
        known = ~np.isnan(some).all(axis=1)
        rows = np.flatnonzero(known)[:, None]
        floor[rows, places] = LIMITS.faint * np.nanmedian(some[known], axis=1)[:, None]
    count = np.ones(len(slots))
    count[reference.place] = np.fmax(reference.figures.values[reference.record, COUNT], 1)
    for number, slot in enumerate(slots):
        if slot.startswith(_MADE_FOR_PARAMETER):
            for cause in reference.places.causes[number]:
                if keys[cause].phase == BACKWARD:
                    # a sum over rows rounds like its summands, even when these cancel out
                    size = scale[:, cause] * np.sqrt(count[cause] / count[number])
                    floor[:, number] = np.maximum(floor[:, number], size)
    return Drift(own, _over(found.error, np.maximum(scale, floor)))


_MADE_FOR_PARAMETER = "output.grad.param."


def _is_of_parameter(key: CallKey, slot: str) -> bool:
    return key.op == GRADIENTS or key.op.startswith("sum of") or ".param." in slot


def _over(error: Column, scale: Column) -> Column:
    with np.errstate(all="ignore"):
        return np.where(error == 0, 0.0, error / scale)
