"""How far a target's output is from a wide replay on its own inputs, in units of that operator's
own rounding noise.

Source of the figures: VERDICT.md level 2. All arrays are widened to float64; rows are vectors along
the last axis.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array, unit_roundoff
from whence.judge.error_structure import (
    Structure,
    structure,
    weaker,
    without_memory,
    without_own_rows,
)
from whence.judge.limits import CHANGED_FOR_SLOPE, FLOOR_ROUNDING, FLOOR_SUM, LIMITS, U32, Limits
from whence.judge.precision import mask_fill
from whence.judge.ties import Choice

F64 = npt.NDArray[np.float64]
_TINY = 1e-300
_NONE: F64 = np.zeros(0)


@dataclass(frozen=True, slots=True)
class ReplayError:
    """Figures of one output. score > 1 is beyond this operator's own rounding.

    rho: ||y - r|| / E0, the error in units of the floor. z: worst element in units of its row's or
    column's rounding. z_index: where. structure: whether the difference to the working-dtype replay
    follows rows, channels, values or one scale. error_rel, floor_rel, spread_rel: ||y - r||, E0 and
    the run-to-run spread, over ||r||. With g what the reference made and r_g the wide replay on its
    inputs, y - g = (r - r_g) + (y - r) - (g - r_g) = inherited + introduced by the target +
    introduced by the reference: inherited_rel and reference_rel are the first and the last over
    ||g||, None where they are not known. mismatch: elements that are non-finite on one side only.
    whole: of a stretch of computation of which only the ends are seen (judge.whole).
    integer_mismatch: for exact dtypes, elements that agree with neither replay. choices: what chose
    otherwise than the reference's operators do, on the way to this output (judge.ties).
    """

    score: float
    rho: float = 0.0
    z: float = 0.0
    z_index: tuple[int, ...] | None = None
    structure: Structure = Structure()  # noqa: RUF009 - frozen
    error_rel: float = 0.0
    floor_rel: float = 0.0
    inherited_rel: float | None = None
    reference_rel: float | None = None
    mismatch: int = 0
    integer_mismatch: int = 0
    u: float = 0.0
    whole: bool = False
    spread_rel: float = 0.0
    choices: tuple[Choice, ...] = ()

    def parts(self, limits: Limits = LIMITS) -> dict[str, float]:
        """Every statistic over its limit, by name; the score is the largest."""
        s, gate = self.structure, max(limits.effect, limits.spread * self.spread_rel)
        if self.whole:
            return {"rho": self.rho / limits.whole, "z": self.z / limits.whole_z}
        rho, z = limits.for_dtype(self.u)
        return {
            "rho": self.rho / rho,
            "z": self.z / z,
            "slope": s.slope_z / limits.slope
            if abs(s.slope) >= gate and s.changed > CHANGED_FOR_SLOPE
            else 0.0,
            "row": s.row / limits.row if s.row_effect >= gate else 0.0,
            "channel": s.channel / limits.channel if s.channel_effect >= gate else 0.0,
            "shift": s.shift / limits.shift if s.shift_effect >= gate else 0.0,
            "value": s.value / limits.value if s.value_effect >= gate else 0.0,
        }

    @property
    def shares(self) -> dict[str, float]:
        """Of the error between both sides, the share that was inherited, introduced by the target
        and by the reference (squared norms).
        """
        if self.inherited_rel is None or self.reference_rel is None:
            return {}
        parts = {
            "inherited": self.inherited_rel**2,
            "target": self.error_rel**2,
            "reference": self.reference_rel**2,
        }
        total = sum(parts.values())
        return {name: part / total for name, part in parts.items()} if 0 < total < math.inf else {}

    @property
    def structured(self) -> bool:
        """Is there more to the error than size: one element far out, or a pattern?"""
        return any(value > 1 for name, value in self.parts().items() if name != "rho")


def measure(
    output: Array,
    wide: Array,
    working: Array,
    *,
    reduction_length: int = 1,
    reference: Array | None = None,
    reference_wide: Array | None = None,
    spread: Array | None = None,
    written_out: bool = False,
    limits: Limits = LIMITS,
) -> ReplayError:
    """Judge `output` (what the target produced) against `wide` and `working`, replays of the
    reference's program on the target's inputs.

    All of one shape. output: any dtype; its unit roundoff sets the scale. wide: the replay in
    float64 (float32 for 16-bit targets). working: the replay in the target's dtype; where it comes
    wider it is rounded once. reduction_length: the most terms that one output element sums.
    reference, reference_wide: what the reference made, and the wide replay on its inputs where
    they are others, for the shares of the error. spread: by how much each element differs between
    runs of the reference on equal inputs: it widens the floor, and a structure below
    `limits.spread` times it is no evidence; of an exact kind, `limits.spread` times as many
    elements may differ. written_out: `working` rounds at more steps than the program does, so that
    its own rounding is no measure of patterns.
    """
    kind = dtypes.of(output)
    if not kind.is_floating:
        return _exact(output, wide, working, spread, limits)
    u, fill = unit_roundoff(kind.name), mask_fill(kind)
    y, r = flat(output), flat(wide)
    w = flat(working if dtypes.of(working).name == kind.name else rounded(working, kind))
    keep, mismatch = comparable(y, r, w, fill)
    s = flat(spread) if spread is not None and spread.shape == output.shape else _NONE
    if not keep.all():
        s = np.where(keep, s, 0.0) if s.size else s
        y, r, w = (np.where(keep, a, 0.0) for a in (y, r, w))
    if y.size == 0:
        return ReplayError(0.0, u=u)
    parts = y.size // output.size  # real and imaginary parts lie side by side
    last = output.shape[-1] * parts if output.ndim > 1 else y.size
    e, f, size = y - r, w - r, norm(r)
    error, strays = norm(e), norm(s)
    floor = max(norm(f), noise_floor(kind, size, reduction_length), strays)
    z, place = worst(e, f, r, u, size, last, s)
    if mismatch:
        place = int(np.argmax(~(keep | same_fill(flat(output), flat(wide), fill))))
    local = ReplayError(
        0.0,
        ratio(error, floor),
        z,
        index_of(place // parts, output) if output.ndim else (),
        _structure(y, r, w, kind, last),
        ratio(error, size),
        floor / size if size else 0.0,
        *_shares(reference, reference_wide, r, keep, fill),
        mismatch,
        u=u,
        spread_rel=ratio(strays, size),
    )
    return _scored(local, f, r, last, written_out=written_out, limits=limits)


def _scored(
    local: ReplayError, own_error: F64, r: F64, last: int, *, written_out: bool, limits: Limits
) -> ReplayError:
    """With its score, and without patterns that the operator's own rounding has."""
    if local.mismatch:
        return dataclasses.replace(local, score=math.inf)
    if any(local.parts(limits)[name] > 1 for name in ("channel", "shift", "value")):
        local = dataclasses.replace(
            local, structure=without_memory(local.structure, own_error, r, last)
        )
    if not written_out and local.parts(limits)["row"] > 1:
        local = dataclasses.replace(
            local, structure=without_own_rows(local.structure, own_error, r, last)
        )
    return dataclasses.replace(local, score=max(local.parts(limits).values()))


def _exact(
    output: Array, wide: Array, working: Array, spread: Array | None, limits: Limits
) -> ReplayError:
    """Judge an output of an exact kind, which rounding does not touch."""
    differs = (output != wide.astype(output.dtype)) & (output != working.astype(output.dtype))
    count = int(np.count_nonzero(differs))
    if spread is not None and count <= limits.spread * np.count_nonzero(spread):
        count = 0
    index = index_of(int(np.argmax(differs)), output) if count and output.ndim else None
    return ReplayError(math.inf if count else 0.0, z_index=index, integer_mismatch=count)


def _shares(
    reference: Array | None,
    reference_wide: Array | None,
    r: F64,
    keep: npt.NDArray[np.bool_],
    fill: float,
) -> tuple[float | None, float | None]:
    """(inherited_rel, reference_rel) of a `ReplayError`; None without a reference of that size."""
    g = flat(reference) if reference is not None else _NONE
    if reference is None or g.size != r.size:
        return None, None
    r_g = flat(reference_wide) if reference_wide is not None else r
    visible = keep & (np.abs(g) < fill)
    if not visible.all():
        g, r_g = np.where(visible, g, 0.0), np.where(visible, r_g, 0.0)
    r = r if keep.all() else np.where(keep, r, 0.0)
    size = norm(g)
    return ratio(norm(r - r_g), size), ratio(norm(g - r_g), size)


def noise_floor(kind: dtypes.DType, size: float, reduction_length: int) -> float:
    """The least error that an operator's rounding makes of a result of this 2-norm: half a unit
    roundoff, and what sums of so many terms add in the dtype that they are added up in.
    """
    accumulate = 2.0**-53 if kind.name in ("float64", "complex128") else U32
    terms = math.sqrt(max(reduction_length, 1))
    return max(
        FLOOR_ROUNDING * unit_roundoff(kind.name) * size, FLOOR_SUM * terms * accumulate * size
    )


def ratio(error: float, size: float) -> float:
    """error / size; infinite for an error where there is no size, 0 where there is neither."""
    return error / size if size > 0 else (0.0 if error == 0 else math.inf)


def index_of(place: int, array: Array) -> tuple[int, ...]:
    """The index of an element of an array, by its place in the flat array."""
    return tuple(int(i) for i in np.unravel_index(place, array.shape))


def _structure(y: F64, r: F64, w: F64, kind: dtypes.DType, last: int) -> Structure:
    """The structure of y against the working replay; at 16 bits, the weaker of that and against the
    wide replay rounded once.

    Code may round inside (then the working replay does what a correct target does) or compute wide
    and round once: which of the two cannot be seen from one recording, and the wrong one has a
    structure of its own (every row of a norm its scale).
    """
    pattern = structure(y - w, r, last)
    if not dtypes.is_half(kind.name) or kind.kind == "complex":
        return pattern
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = r.astype(kind.numpy).astype(np.float64)
    if np.array_equal(rounded, w):
        return pattern
    return weaker(pattern, structure(y - np.where(np.isfinite(rounded), rounded, w), r, last))


def norm(x: F64) -> float:
    """2-norm without BLAS, whose threads spin for milliseconds on a busy machine."""
    return math.sqrt(float(np.einsum("i,i->", x, x)))


def flat(array: Array) -> F64:
    if np.iscomplexobj(array):
        return np.ascontiguousarray(array.astype(np.complex128)).reshape(-1).view(np.float64)
    return array.astype(np.float64).reshape(-1)


def rounded(array: Array, kind: dtypes.DType) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(kind.numpy)


def same_fill(a: F64, b: F64, fill: float) -> npt.NDArray[np.bool_]:
    """Where both sides are NaN, or the filling of a mask or infinite with the same sign."""
    with np.errstate(invalid="ignore"):
        filled = (np.abs(a) >= fill) & (np.abs(b) >= fill) & (np.signbit(a) == np.signbit(b))
    out: npt.NDArray[np.bool_] = filled | (np.isnan(a) & np.isnan(b))
    return out


def comparable(y: F64, r: F64, w: F64, fill: float) -> tuple[npt.NDArray[np.bool_], int]:
    """(elements that are ordinary numbers on all sides, how many are not although the replay says
    they should be).

    A NaN or Inf the replay yields too is inherited, not introduced; the working-dtype replay may
    overflow where the wide one does not.
    """
    with np.errstate(invalid="ignore"):
        fine = (np.abs(y) < fill) & (np.abs(r) < fill) & (np.abs(w) < fill)
    if fine.all():
        return fine, 0
    wrong = ~fine & ~same_fill(y, r, fill) & ~same_fill(y, w, fill)
    # The wide and the working replay disagree, the target agrees with neither: finite target next
    # to an overflowing replay is fine.
    with np.errstate(invalid="ignore"):
        wrong &= ~((np.abs(y) < fill) & (np.abs(r) < fill))
    return fine, int(np.count_nonzero(wrong))


def worst(
    e: F64, f: F64, r: F64, u: float, size: float, last: int, s: F64 = _NONE
) -> tuple[float, int]:
    """max_i |e_i| / (max(rms of f over its row, over its column) + u |r_i| + 1e-3 u rms(r)), and
    the flat index.

    s: run-to-run spread of the elements, or empty; then f^2 + s^2 takes the place of f^2, and s_i
    is added.
    """
    rows = f.reshape(-1, last)
    square = rows * rows
    if s.size:
        square += (s * s).reshape(-1, last)
    scale = np.maximum(
        np.sqrt(square.mean(1, keepdims=True)), np.sqrt(square.mean(0, keepdims=True))
    )
    scale = (
        scale.reshape(-1)
        if scale.shape == rows.shape
        else np.broadcast_to(scale, rows.shape).reshape(-1).copy()
    )
    scale += u * np.abs(r)
    if s.size:
        scale += s
    scale += 1e-3 * u * size / math.sqrt(r.size)
    np.maximum(scale, _TINY, out=scale)
    ratio = np.abs(e) / scale
    place = int(ratio.argmax())
    return float(ratio[place]), place
