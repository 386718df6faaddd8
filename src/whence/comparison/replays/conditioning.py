"""Measures the condition of a call: how much its output changes when its inputs change by one
rounding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from whence.comparison.replays.self_check import Threads
from whence.comparison.replays.side import ReplaySource
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call

_DRAWS = 3
_Wide = npt.NDArray[np.float64]


def movement(source: ReplaySource, call: Call, slot: str, error: float) -> float:
    """By how much an output of a call moves, over its own 2-norm: by the call's own rounding, or by
    inputs that are each off by `error` of themselves (one standard deviation), whichever is more; 0
    where the call cannot be run again.
    """
    try:
        with Threads(1):
            return _movement(source, call, slot, error)
    except (ReplayRefused, ElementsMissing):
        return 0.0


def _movement(source: ReplaySource, call: Call, slot: str, error: float) -> float:
    loaded = source.load(call)
    if slot not in dict(loaded.program.outputs):
        return 0.0
    records = source.records(call, (*loaded.program.inputs, *loaded.program.params))
    arrays, strides = source.arrays(records)
    recorded = source.run.array(source.records(call, [slot])[slot]).astype(np.float64)
    size = float(np.linalg.norm(recorded))
    if not size > 0:
        return 0.0

    def run(inputs: dict[str, Array]) -> _Wide:
        made = loaded.run(inputs, inputs, working="float64", strides=strides, outputs=[slot])
        return np.asarray(made[slot], np.float64)

    wide = run(arrays)
    moved = [float(np.linalg.norm(wide - recorded))]
    for seed in range(_DRAWS):
        draw = np.random.default_rng(seed)
        inputs = {name: _moved(array, error, draw) for name, array in arrays.items()}
        moved.append(float(np.linalg.norm(run(inputs) - wide)))
    return max(moved) / size


def _moved(array: Array, error: float, draw: np.random.Generator) -> Array:
    if array.dtype not in (np.float32, np.float64):
        return array
    wide: Array = array.astype(np.float64) * (1 + error * draw.standard_normal(array.shape))
    return wide
