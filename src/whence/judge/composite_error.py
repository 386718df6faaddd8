"""Judges a stretch of operators of which only inputs and outputs are known, with noise injected
at every operator. (VERDICT.md level 3)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from whence import dtypes
from whence.dtypes import Array, unit_roundoff
from whence.judge.error_structure import norm
from whence.judge.integer_codes import beyond_boundaries
from whence.judge.limits import LIMITS
from whence.judge.precision import mask_fill
from whence.judge.replay_error import (
    F64,
    ReplayError,
    comparable,
    element_noise,
    flat,
    index_of,
    ratio,
    rounded,
    same_fill,
    sums_in_order,
    worst,
)

_REACH = 16
"""Neighbours of an element to each side that round as it does."""


def measure(
    output: Array,
    wide: Array,
    copies: Sequence[Array],
    *,
    reference: Array | None = None,
) -> ReplayError:
    """Judge `output` (what the target made) against `wide`, the same computation in wide arithmetic
    on the target's inputs.

    copies: the computation in the target's dtype, and again with every operator's result off by up
    to one unit roundoff, drawn at random: their distance from `wide` is the noise that is due.
    Patterns in the error prove nothing here, since rounding made early spreads along rows and
    channels; the size (rho) and the worst element (z) are judged. All of one shape.
    """
    kind = dtypes.of(output)
    if not kind.is_floating:
        count = beyond_boundaries(output, [wide, *copies])
        return ReplayError(math.inf if count else 0.0, integer_mismatch=count)
    u, fill = unit_roundoff(kind.name), mask_fill(kind)
    y, r = flat(output), flat(wide)
    runs = [flat(c if dtypes.of(c).name == kind.name else rounded(c, kind)) for c in copies]
    keep, mismatch = comparable(y, r, runs[0], fill)
    if y.size == 0:
        return ReplayError(0.0, u=u)
    y, r = np.where(keep, y, 0.0), np.where(keep, r, 0.0)
    square = np.mean([np.where(keep & np.isfinite(w), w - r, 0.0) ** 2 for w in runs], axis=0)
    size, error = norm(r), norm(y - r)
    floor = max(math.sqrt(float(square.sum())), 0.3 * u * size)
    last = (output.shape[-1] if output.ndim > 1 else output.size) * (y.size // output.size)
    noise = np.maximum(element_noise(np.sqrt(square), r, u, last), _nearby(square, last))
    first = np.where(keep, runs[0], 0.0)
    z, place = worst(y - r, y - first, noise)
    if mismatch:
        place = int(np.argmax(~(keep | same_fill(flat(output), flat(wide), fill))))
    inherited = by_reference = None
    if reference is not None and reference.size == output.size:
        g = np.where(keep, flat(reference), 0.0)
        if (base := norm(g)) > 0:
            inherited, by_reference = 0.0, norm(g - r) / base
    local = ReplayError(
        0.0,
        ratio(error, floor),
        z,
        index_of(place // (y.size // output.size), output) if output.ndim else (),
        error_rel=ratio(error, size),
        floor_rel=floor / size if size else 0.0,
        inherited_rel=inherited,
        reference_rel=by_reference,
        mismatch=mismatch,
        u=u,
        whole=True,
    )
    return dataclasses.replace(local, score=math.inf if mismatch else max(local.parts().values()))


def _nearby(square: F64, last: int) -> F64:
    """Root mean square over the neighbours of each element in its row: heads of an attention lie
    side by side, and one that reads few tokens rounds far more than its row does.
    """
    rows, width = square.reshape(-1, last), 2 * _REACH + 1
    sums = np.pad(rows, ((0, 0), (_REACH + 1, _REACH)), mode="edge").cumsum(axis=1)
    near: F64 = np.maximum(sums[:, width:] - sums[:, :-width], 0.0).reshape(-1)
    return np.sqrt(near / width)


def is_one_element(local: ReplayError) -> bool:
    """Is the worst element all that stands out?"""
    over = {name for name, value in local.parts().items() if value > LIMITS.suspect}
    return over == {"z"} and not local.mismatch


def steadier(
    local: ReplayError, output: Array, wide: Array, copies: Sequence[Array], terms: int
) -> ReplayError:
    """The same figures with the worst element measured by several repetitions, where nothing but
    that one element stands out.

    copies: as for `measure`. terms: of the longest sum. What a rounding of its operands does to an
    element shows how large its terms are, however small their sum, and a kernel that sums them in
    order rounds so many times as much.
    """
    if not is_one_element(local) or any(c.shape != output.shape for c in copies):
        return local
    steady = measure(output, wide, copies)
    z = steady.z / max(1.0, sums_in_order(dtypes.of(output), terms) / steady.u)
    if z >= local.z:
        return local
    local = dataclasses.replace(local, z=z, z_index=steady.z_index)
    return dataclasses.replace(local, score=max(local.parts().values()))
