"""Measures how much error rounding to codes explains in a layer whose weights cannot be compared
with the reference's one by one, because a norm was folded into them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from whence.comparison.verdicts.quantised.programs import LayerPrograms
from whence.dtypes import Array
from whence.judge.limits import NOISE_OF_STEPS, NOISE_OF_STEPS_IN_A_CHANNEL
from whence.records.quantised import QuantisedLayer

F64 = npt.NDArray[np.float64]
_DRAWS = 4
_ROUNDED = 12**-0.5
"""Root mean square of the error of rounding to a grid, in steps."""
_MOVED = 1 / 12
"""Share of codes that are moved by one step, so that they change as much as rounding does, whose
mean squared error is a twelfth of a squared step.
"""


def beyond_steps(
    programs: LayerPrograms,
    layer: QuantisedLayer,
    produced: Array,
    right: Array,
    *,
    with_weights: bool,
) -> str:
    """Describes what is wrong with the first output of a layer; "" when the steps of its codes
    explain the error. right: the result of the reference's program on the same numbers.
    with_weights: it used the reference's own weights, so that rounding the weights counts too.

    The target's own nodes are run with codes that are re-rounded at random. The change in all
    elements, and in each channel, is what rounding explains.
    """
    own = programs.own(layer)[0].astype(np.float64)
    random = np.random.default_rng(0)
    codes = {coded.codes for coded in layer.inner}
    if with_weights:
        codes |= {weight.coded.codes for weight in layer.weights}

    def moved(record: int, array: Array) -> Array:
        return _moved(array, random) if record in codes else array

    noise = np.stack(
        [programs.own(layer, moved)[0].astype(np.float64) - own for _ in range(_DRAWS)]
    )
    grid, step = layer.makes[0].grid, 0.0
    if grid is not None:
        array_of = programs.target.run.array
        scale, zero = grid.steps(array_of, own.ndim)
        step = float(np.max(scale)) * _ROUNDED
        right = np.clip(right, *((end - zero) * scale for end in grid.ends))
    off: F64 = produced.astype(np.float64) - right.astype(np.float64)
    allowed = _size(noise) + step
    whole = _size(off) / allowed if allowed else np.inf if off.any() else 0.0
    if not whole <= NOISE_OF_STEPS:  # NaN is no rounding
        return (
            f"differs from the float layer by {whole:.3g} times what rounding its weights and "
            "results to codes explains"
        )
    if off.ndim < 2:
        return ""
    axis = 1 if off.ndim > 2 else off.ndim - 1
    others = tuple(k for k in range(off.ndim) if k != axis)
    by_channel = np.sqrt(np.mean(off * off, axis=others))
    explained = np.sqrt(np.mean(noise * noise, axis=(0, *(k + 1 for k in others)))) + step
    ratio = by_channel / np.maximum(explained, 0.1 * allowed)
    worst = int(np.argmax(ratio))
    if not ratio[worst] <= NOISE_OF_STEPS_IN_A_CHANNEL:
        return (
            f"channel {worst} differs from the float layer by {ratio[worst]:.3g} times what "
            "rounding its weights and results to codes explains"
        )
    return ""


def saturates_inside(programs: LayerPrograms, layer: QuantisedLayer) -> bool:
    """Whether codes that the layer makes and reads only itself lie at the end of their range,
    except where the end stands for zero, as after a ReLU.
    """
    array_of = programs.target.run.array
    for coded in layer.inner:
        if coded.grid is None:
            continue
        codes = array_of(coded.codes)
        _, zero = coded.grid.steps(array_of, codes.ndim)
        if any(bool(((codes == end) & (zero != end)).any()) for end in coded.grid.ends):
            return True
    return False


def _moved(codes: Array, random: np.random.Generator) -> Array:
    """The codes, some of them moved by one step at random."""
    info: Any = np.iinfo(codes.dtype)
    drawn = random.random(codes.shape)
    by = (drawn < _MOVED / 2).astype(np.int64) - (drawn > 1 - _MOVED / 2)
    out: Array = np.clip(codes.astype(np.int64) + by, info.min, info.max).astype(codes.dtype)
    return out


def _size(values: F64) -> float:
    return float(np.sqrt(np.mean(values * values))) if values.size else 0.0
