"""The self-check: a program is used only after it reproduced its own recorded outputs from its own
recorded inputs.

Bitwise, or within 1 ulp with the reason noted. A value the recording baked in survives this on the
call it was recorded from; it is found by checking the same program on further recorded calls, with
other activations.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.replay.engine import Loaded

_ORDERED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def check(
    loaded: Loaded,
    inputs: Mapping[str, Array],
    params: Mapping[str, Array],
    outputs: Mapping[str, Array],
    strides: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """Why the program must not be used, "" when it reproduces `outputs` from `inputs` and `params`
    (all as recorded, by slot).

    Outputs that were not kept (missing from the mapping) are not compared; with none at all the
    program is refused. Within 1 ulp but not bitwise: "" and `loaded.check_note` says where.
    """
    loaded.check_note = ""
    compared = [slot for slot, _ in loaded.program.outputs if slot in outputs]
    if not compared:
        return "none of its recorded outputs were kept"
    try:
        found = loaded.run(inputs, params, working="recorded", strides=strides, outputs=compared)
    except ReplayRefused as refused:
        return str(refused)
    for slot in compared:
        want, got = outputs[slot], found[slot]
        if want.shape != got.shape or want.dtype != got.dtype:
            return (
                f"{slot}: replay gives {got.dtype} {got.shape}, the recording has "
                f"{want.dtype} {want.shape}"
            )
        distance = ulps(want, got)
        if distance > 1:
            far = "a NaN or an exact value differs" if distance == np.inf else f"{distance:.0f} ulp"
            return f"{slot}: replay does not reproduce the recording ({far})"
        if distance:
            loaded.check_note = f"{slot}: replay reproduces the recording within 1 ulp, not bitwise"
    return ""


def ulps(a: Array, b: Array) -> float:
    """The largest distance in units in the last place; 0 when bitwise equal, inf where one is NaN
    or an exact dtype differs.

    a, b: same shape and dtype. NaNs are equal whatever their bits; +0 and -0 are 1 apart at most.
    """
    kind = dtypes.of(a)
    if a.size == 0:
        return 0.0
    x, y = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    if np.array_equal(x.view(np.uint8), y.view(np.uint8)):
        return 0.0
    if kind.kind == "complex":
        part = np.float32 if kind.bits == 64 else np.float64
        return ulps(x.view(part), y.view(part))
    if kind.kind != "float":
        return float("inf")
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    if not np.array_equal(nan_x, nan_y):
        return float("inf")
    keep = ~nan_x
    i, j = (_order(v[keep], kind.itemsize) for v in (x, y))
    if i.size == 0:
        return 0.0
    # Unsigned, since the distance from -max to max does not fit into int64; wrapping around gives
    # the right magnitude.
    return float(np.max(np.maximum(i, j).view(np.uint64) - np.minimum(i, j).view(np.uint64)))


def _order(values: Array, itemsize: int) -> npt.NDArray[np.int64]:
    """Floating-point values as integers in the same order, neighbours one apart."""
    bits = values.view(_ORDERED[itemsize]).astype(np.int64)
    low = np.int64(-(1 << (8 * itemsize - 1)))
    return np.where(bits < 0, low - bits, bits).astype(np.int64)
